"""Which calls may go past torch's dispatcher, and what tells two of them apart.

The registered operators are for everything that looks at calls: torch.compile, export, make_fx, torch.jit.trace,
functorch, forward-mode gradients, autocast, modes, subclasses, fake tensors. A call that none of these can see, of
plain tensors on a GPU that need no gradient, gets the same results without them. Its signature then decides whether it
is like an earlier call that passed all checks, whose plan (`tilecrew._plans`) is repeated.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from tilecrew._plans import ADDRESS_ALIGNMENT, PlainCall, Tensors

DEVICE_TYPES = ("cuda",)
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def plain_call(tensors: Tensors, options: tuple[Any, ...]) -> PlainCall | None:
    """The call as a PlainCall; None where the dispatcher must see it, or where an argument is odd: checks tell why.

    tensors: every tensor that the call may take, None for an absent one; the first one must be there, and tells the
    device. options: everything else.
    The signature holds shapes, strides, dtypes, devices and alignment of the tensors, and values and types of the
    options: whatever checks and schedules look at, but for values of offsets.
    """
    # First, because torch.compile traces no further.
    if torch.compiler.is_compiling() or _is_watched():
        return None
    first = tensors[0]
    if first is None or type(first) not in PLAIN_TYPES:
        return None
    device_type = first.device.type
    if device_type not in DEVICE_TYPES or torch.is_autocast_enabled(device_type):
        return None
    needs_gradients = torch.is_grad_enabled()
    parts: list[Any] = [options, tuple(map(type, options))]
    addresses = []
    try:
        for tensor in tensors:
            if tensor is None:
                parts.append(None)
                addresses.append(0)
                continue
            if type(tensor) not in PLAIN_TYPES or (needs_gradients and tensor.requires_grad) or tensor.is_neg():
                return None
            address = tensor.data_ptr()
            addresses.append(address)
            parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address % ADDRESS_ALIGNMENT)
        signature = tuple(parts)
        key = hash(signature)
    except (RuntimeError, TypeError):  # a tensor without strides or storage, an option that cannot be hashed
        return None
    return PlainCall(signature, key, tensors, addresses)


def _is_watched() -> bool:
    """Whether something that torch's dispatcher would have told about a call is active."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )
