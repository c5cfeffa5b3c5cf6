"""Checks of a grouped GEMM's inputs. Everything here raises ValueError or TypeError before anything is launched.

`check_call` looks at types, shapes, dtypes, devices and strides only, so that torch.compile can trace it; addresses,
and values of offsets that are on the host, are looked at inside the operators.
"""

import inspect
from itertools import pairwise

import torch

from tilecrew._shapes import Sizes, require_dtype, require_same_device, require_tensor
from tilecrew.grouped_gemm.hooks import Epilogue, Gate
from tilecrew.grouped_gemm.schedule import MAX_ROWS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HOST_DTYPES = (*DTYPES, torch.float64)
MULTIPLE = 8
ALIGNMENT = 16  # bytes, of addresses and strides


def check_call(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    gate: Gate | None,
    epilogue: Epilogue | None,
    out: torch.Tensor | None,
) -> None:
    """Checks all of a call but addresses and the values of offsets."""
    sizes = Sizes()
    sizes.bind("x", x, "M K")
    sizes.bind("w", w, "E K N")
    require_dtype("x", x, HOST_DTYPES if x.device.type in ("cpu", "meta") else DTYPES)
    if w.dtype != x.dtype:
        raise TypeError(f"w must have the dtype of x, {x.dtype}, got {w.dtype}")
    require_same_device("w", w, "x", x)
    for name, symbol in (("x", "K"), ("w", "N")):
        if sizes[symbol] < MULTIPLE or sizes[symbol] % MULTIPLE:
            raise ValueError(f"{name} must have {symbol} a positive multiple of {MULTIPLE}, got {sizes[symbol]}")
    if sizes["E"] < 1:
        raise ValueError(f"w must have at least one group, got shape {tuple(w.shape)}")
    if sizes["M"] > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows, got {sizes['M']}")
    require_tensor("offs", offs)
    if offs.dtype != torch.int32:
        raise TypeError(f"offs must be int32, got {str(offs.dtype).removeprefix('torch.')}")
    sizes.bind("offs", offs, "E")
    require_same_device("offs", offs, "x", x)
    check_strides("x", x)
    check_strides("w", w if w.stride(2) == 1 else w.transpose(1, 2))
    _check_hook("gate", gate, Gate, ("wait", "check"))
    if gate is not None:
        gate.check_inputs(x)
    _check_hook("epilogue", epilogue, Epilogue, ("apply", "reference"))
    if epilogue is not None:
        if epilogue.landed is not None:
            _check_hook("epilogue", epilogue, Epilogue, ("landed_reference",))
        epilogue.check(x, w)
        if epilogue.shrink not in (1, 2):
            raise ValueError(f"epilogue must have a shrink of 1 or 2, got {epilogue.shrink!r}")
        if sizes["N"] % (MULTIPLE * epilogue.shrink):
            multiple = f"{MULTIPLE * epilogue.shrink} for an epilogue with shrink {epilogue.shrink}"
            raise ValueError(f"w must have N a multiple of {multiple}, got {sizes['N']}")
    if out is not None:
        _check_out(out, x, sizes["N"] // (1 if epilogue is None else epilogue.shrink))


def check_addresses(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError where a tensor does not start at a multiple of 16 bytes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} must start at an address that is a multiple of {ALIGNMENT} bytes, "
                f"got storage offset {tensor.storage_offset()} (address {tensor.data_ptr():#x})"
            )


def check_offsets(offs: torch.Tensor, num_rows: int) -> None:
    """Raises ValueError for offsets that are on the host and do not rise from 0 to at most the number of rows."""
    if offs.device.type != "cpu":
        return
    ends = [0, *offs.tolist()]
    if any(begin > end for begin, end in pairwise(ends)):
        raise ValueError(f"offs must start at 0 or above and never decrease, got {ends[1:]}")
    if ends[-1] > num_rows:
        raise ValueError(f"offs must end at M = {num_rows} or before, got {ends[-1]}")


def _check_out(out: torch.Tensor, x: torch.Tensor, num_columns: int) -> None:
    require_tensor("out", out)
    expected = (x.shape[0], num_columns)
    if tuple(out.shape) != expected:
        raise ValueError(f"out must have shape {expected}, got {tuple(out.shape)}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must have the dtype of x, {x.dtype}, got {out.dtype}")
    require_same_device("out", out, "x", x)
    check_strides("out", out)


def check_strides(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is contiguous, and the others go in steps of 16 bytes that are not 0.

    TMA wants it so.
    """
    if tensor.stride(-1) != 1:
        hint = "N or K must be contiguous" if name == "w" else "its last dimension must be contiguous"
        raise ValueError(f"{name}: {hint}, got strides {tensor.stride()}")
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride * tensor.element_size() % ALIGNMENT):
            raise ValueError(f"{name} must have strides of multiples of {ALIGNMENT} bytes, got {tensor.stride()}")


def _check_hook(name: str, hook: object, base: type, members: tuple[str, ...]) -> None:
    if hook is None:
        return
    if isinstance(hook, type):
        raise TypeError(f"{name} must be an instance, got the class {hook.__name__}: pass {hook.__name__}(...)")
    if not isinstance(hook, base):
        raise TypeError(f"{name} must be an instance of tilecrew.grouped_gemm.hooks.{base.__name__}, got {hook!r}")
    for member in members:
        found = inspect.getattr_static(hook, member, None)
        if found is None or found is inspect.getattr_static(base, member, None):
            raise TypeError(f"{name} must have {member}, which {type(hook).__name__} lacks")
