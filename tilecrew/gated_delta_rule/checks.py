"""Checks of the public functions' inputs. Everything here raises ValueError or TypeError before anything is launched.

`check_*` functions look at types, shapes, dtypes, devices and strides only, so that torch.compile can trace them;
values of offsets are looked at by `check_offsets`, inside the operators, and only where they are on the host: reading
them from a device would synchronise.
"""

import itertools

import torch

from tilecrew._shapes import Sizes, require_dtype, require_same_device, require_tensor
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.gated_delta_rule.schedule import CHUNK_SIZES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def resolve_scale(scale: float | None, q: torch.Tensor) -> float:
    """K ** -0.5 where scale is None. Raises TypeError where it is no real number."""
    if scale is None:
        require_tensor("q", q)
        if q.dim() == 0:
            raise ValueError("q must have 4 dimensions [B, T, H, K], got 0: shape ()")
        return q.shape[-1] ** -0.5 if q.shape[-1] > 0 else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
    return float(scale)


def check_gate_options(use_gate_in_kernel: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> None:
    """A_log comes with use_gate_in_kernel and only with it; dt_bias is optional there."""
    if use_gate_in_kernel and A_log is None:
        raise ValueError("use_gate_in_kernel=True needs A_log [HV], got None")
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        if value is not None and not use_gate_in_kernel:
            raise ValueError(f"{name} is used only with use_gate_in_kernel=True, got use_gate_in_kernel=False")


def check_forward(arguments: ForwardArguments) -> None:
    """Checks all of a chunked call but the values of its offsets."""
    sizes = check_queries_keys_values(arguments.q, arguments.k, arguments.v)
    q = arguments.q
    for name, tensor in (("g", arguments.g), ("beta", arguments.beta)):
        sizes.bind(name, tensor, "B T HV")
        require_dtype(name, tensor, FLOAT_DTYPES)
        require_same_device(name, tensor, "q", q)
    check_gate_tensors(sizes, q, arguments.A_log, arguments.dt_bias)
    check_beta_options(arguments.use_beta_sigmoid, arguments.allow_neg_eigval)
    check_sequences(sizes, q, arguments.cu_seqlens, arguments.cu_seqlens_cpu)
    if arguments.initial_state is not None:
        pattern = "N HV V K" if arguments.state_v_first else "N HV K V"
        sizes.bind("initial_state", arguments.initial_state, pattern)
        check_state("initial_state", arguments.initial_state, q)
    if isinstance(arguments.chunk_size, bool) or arguments.chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {CHUNK_SIZES}, got {arguments.chunk_size!r}")
    check_history_tolerance(arguments.history_tolerance)
    if not isinstance(arguments.batch_invariant, bool):
        raise TypeError(f"batch_invariant must be a bool, got {type(arguments.batch_invariant).__name__}")


def check_history_tolerance(tolerance: float) -> None:
    """A share: a number from 0 on and below 1."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
        raise TypeError(f"history_tolerance must be a float, got {type(tolerance).__name__}")
    if not 0.0 <= tolerance < 1.0:  # NaN is neither
        raise ValueError(f"history_tolerance must be at least 0 and below 1, got {tolerance}")


def check_queries_keys_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sizes:
    """Shapes, one floating-point dtype, one device, a contiguous last dimension, and HV a multiple of H."""
    sizes = Sizes()
    for name, tensor, pattern in (("q", q, "B T H K"), ("k", k, "B T H K"), ("v", v, "B T HV V")):
        sizes.bind(name, tensor, pattern)
        require_dtype(name, tensor, FLOAT_DTYPES)
        require_same_device(name, tensor, "q", q)
        if tensor.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got q {q.dtype} and {name} {tensor.dtype}")
        if tensor.shape[-1] == 0 or tensor.shape[-2] == 0:
            raise ValueError(
                f"{name} must have at least one head of at least one element, got shape {tuple(tensor.shape)}"
            )
        if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {tuple(tensor.stride())} "
                f"of shape {tuple(tensor.shape)}: call .contiguous() on it"
            )
    if sizes["HV"] % sizes["H"] != 0:
        raise ValueError(
            f"the number of value heads HV must be a multiple of the number of heads H, got HV = {sizes['HV']} "
            f"(v of shape {tuple(v.shape)}) and H = {sizes['H']} (q of shape {tuple(q.shape)})"
        )
    return sizes


def check_gate_tensors(sizes: Sizes, q: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> None:
    """A_log and dt_bias are [HV], floating point, on the device of q."""
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor is not None:
            sizes.bind(name, tensor, "HV")
            require_dtype(name, tensor, FLOAT_DTYPES)
            require_same_device(name, tensor, "q", q)


def check_beta_options(use_beta_sigmoid: bool, allow_neg_eigval: bool) -> None:
    """Twice the sigmoid exists only where the sigmoid is asked for."""
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles the sigmoid of beta")


def check_sequences(
    sizes: Sizes, q: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None = None
) -> None:
    """Shapes, dtypes and devices of the offsets; binds N, the number of sequences."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu is a host copy of cu_seqlens, got cu_seqlens=None")
        sizes.set("N", q.shape[0], "q", q.shape)
        return
    _check_offset_tensor("cu_seqlens", cu_seqlens)
    require_same_device("cu_seqlens", cu_seqlens, "q", q)
    if q.shape[0] != 1:
        raise ValueError(
            "q must have batch size 1 with cu_seqlens (the sequences are packed along T), "
            f"got q of shape {tuple(q.shape)} and cu_seqlens of shape {tuple(cu_seqlens.shape)}"
        )
    sizes.set("N", cu_seqlens.shape[0] - 1, "cu_seqlens", cu_seqlens.shape)
    if cu_seqlens_cpu is not None:
        _check_offset_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu must be on the host, got {cu_seqlens_cpu.device}")
        if cu_seqlens_cpu.shape != cu_seqlens.shape:
            raise ValueError(
                f"cu_seqlens_cpu must have the shape of cu_seqlens, {tuple(cu_seqlens.shape)}, "
                f"got {tuple(cu_seqlens_cpu.shape)}"
            )


def check_state(name: str, state: torch.Tensor, q: torch.Tensor) -> None:
    """A floating-point state on the device of q; float64 only where q is float64, since it would be rounded
    otherwise."""
    allowed = FLOAT_DTYPES if q.dtype == torch.float64 else FLOAT_DTYPES[:3]
    require_dtype(name, state, allowed, because=f" with q {str(q.dtype).removeprefix('torch.')}")
    require_same_device(name, state, "q", q)


def check_offsets(cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None, num_tokens: int) -> None:
    """Requires offsets to start at 0, never to decrease, and to end at T or before, as far as they are on the host."""
    if cu_seqlens is None:
        return
    if cu_seqlens.device.type == "cpu":
        _check_offset_values("cu_seqlens", cu_seqlens.tolist(), num_tokens)
        if cu_seqlens_cpu is not None and cu_seqlens_cpu.tolist() != cu_seqlens.tolist():
            raise ValueError(
                f"cu_seqlens_cpu must equal cu_seqlens, got {_abbreviated(cu_seqlens_cpu.tolist())} "
                f"and {_abbreviated(cu_seqlens.tolist())}"
            )
    elif cu_seqlens_cpu is not None:
        _check_offset_values("cu_seqlens_cpu", cu_seqlens_cpu.tolist(), num_tokens)


def _check_offset_tensor(name: str, offsets: torch.Tensor) -> None:
    require_tensor(name, offsets)
    require_dtype(name, offsets, INDEX_DTYPES)
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{name} must have shape [N + 1] with at least one element, got shape {tuple(offsets.shape)}")


def _check_offset_values(name: str, offsets: list[int], num_tokens: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {_abbreviated(offsets)}")
    for index, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"{name} must not decrease, got {start} then {end} at index {index} of {_abbreviated(offsets)}"
            )
    if offsets[-1] > num_tokens:
        raise ValueError(f"{name} must end at T = {num_tokens} or before, got {_abbreviated(offsets)}")


def _abbreviated(offsets: list[int]) -> str:
    if len(offsets) <= 12:
        return str(offsets)
    return f"[{', '.join(map(str, offsets[:6]))}, ..., {', '.join(map(str, offsets[-5:]))}] ({len(offsets)} values)"


def check_recurrent(arguments: RecurrentArguments) -> None:
    """Checks all of a decode call but the values of its offsets and indices."""
    q = arguments.q
    sizes = check_queries_keys_values(q, arguments.k, arguments.v)
    per_head_or_channel = "B T HV" if arguments.beta is None or arguments.beta.dim() == 3 else "B T HV V"
    gates = (
        ("g", arguments.g, "B T HV"),
        ("gk", arguments.gk, "B T HV K"),
        ("gv", arguments.gv, "B T HV V"),
        ("beta", arguments.beta, per_head_or_channel),
    )
    for name, tensor, pattern in gates:
        if tensor is not None:
            sizes.bind(name, tensor, pattern)
            require_dtype(name, tensor, FLOAT_DTYPES)
            require_same_device(name, tensor, "q", q)
    if arguments.A_log is not None and arguments.g is None:
        raise ValueError("use_gate_in_kernel=True needs the raw gate in g [B, T, HV], got None")
    check_gate_tensors(sizes, q, arguments.A_log, arguments.dt_bias)
    if arguments.use_beta_sigmoid and arguments.beta is None:
        raise ValueError("use_beta_sigmoid_in_kernel=True needs beta, got None")
    check_beta_options(arguments.use_beta_sigmoid, arguments.allow_neg_eigval)
    check_sequences(sizes, q, arguments.cu_seqlens)
    _check_recurrent_state(sizes, arguments)


def has_contiguous_rows(state: torch.Tensor) -> bool:
    """Whether each row (the dimensions behind the first) is contiguous, at any stride between the rows."""
    expected = 1
    for size, stride in zip(reversed(state.shape[1:]), reversed(state.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_recurrent_state(sizes: Sizes, arguments: RecurrentArguments) -> None:
    state, indices, q = arguments.initial_state, arguments.state_indices, arguments.q
    if state is None:
        for name, is_given in (("inplace_state", arguments.inplace_state), ("state_indices", indices is not None)):
            if is_given:
                raise ValueError(f"{name} needs initial_state, got None")
        return
    if indices is not None:
        sizes.bind("state_indices", indices, "N")
        require_dtype("state_indices", indices, INDEX_DTYPES)
        require_same_device("state_indices", indices, "q", q)
    num_rows = "N" if indices is None else "P"
    sizes.bind("initial_state", state, f"{num_rows} HV V K" if arguments.state_v_first else f"{num_rows} HV K V")
    check_state("initial_state", state, q)
    if indices is None and not arguments.inplace_state:
        return
    # The caller's own storage is read or written where it lies, so nothing may be converted.
    stored = (torch.float64,) if q.dtype == torch.float64 else (torch.float32, torch.bfloat16)
    require_dtype("initial_state", state, stored, because=" with state_indices or inplace_state")
    if not has_contiguous_rows(state):
        raise ValueError(
            f"initial_state must have contiguous rows with state_indices or inplace_state, got strides "
            f"{tuple(state.stride())} of shape {tuple(state.shape)}"
        )
