"""Problem and hardware -> Schedule: which implementation a call uses, its tile sizes, and why. Pure Python on ints and
strings.

Implementations of the chunked forward:
    scan       kernel for Hopper (compute capability 9.0) that keeps the state in registers, for bfloat16
    roles      kernel for Hopper whose state, value and output are roles of their own
    portable   plain Triton, every GPU that Triton compiles for
    chunked    batched torch, every device and dtype, and the one with gradients
Implementations of decode:
    recurrent  plain Triton
    torch      the same recurrence in torch, every device and dtype, and the one with gradients
"""

from dataclasses import dataclass

from tilecrew._hardware import Hardware

IMPLEMENTATIONS = ("scan", "roles", "portable", "chunked")
HOPPER = ("scan", "roles")
RECURRENT_IMPLEMENTATIONS = ("recurrent", "torch")
DIFFERENTIABLE = ("chunked", "torch")
NO_BACKWARD = "the kernel has no backward, and an input requires a gradient"
CHUNK_SIZES = (16, 32, 64)
MAX_KERNEL_DIM = 256
HALF_DTYPES = ("bfloat16", "float16")
KERNEL_DTYPES = (*HALF_DTYPES, "float32")

PORTABLE_WIDE_KEYS_BYTES = 106 * 1024  # of shared memory: 64 values a block at K > 128

HOPPER_DIM = 128
HOPPER_CHUNK_SIZE = 64
HOPPER_MAX_GATES = 2**31
SCAN_BLOCK_V = 64
# Fitted to bench/results/forward_kernels.json (H200). Microseconds of one chunk in one CTA, by block of V (narrower
# blocks of the roles repeat the work on keys) and of a CTA's start and end; nanoseconds of the prepare kernel for one
# chunk and value head, by whether it normalises.
CHUNK_MICROSECONDS = {"scan": {SCAN_BLOCK_V: 1.24}, "roles": {128: 2.45, 64: 1.63, 32: 1.28}}
START_MICROSECONDS = {"scan": 6.0, "roles": 9.0}
PREPARE_NANOSECONDS = {"scan": {False: 6.6, True: 6.5}, "roles": {False: 8.5, True: 5.5}}


@dataclass(frozen=True)
class Problem:
    """What a schedule may depend on: sizes known on the host, never values on the device.

    Sizes: batch B, num_tokens T, num_sequences N, num_heads H, num_value_heads HV, key_dim K, value_dim V.
    dtype                of q, k, v, as torch prints it without its prefix
    is_aligned           base addresses and strides of q, k, v are multiples of 16 bytes, as TMA descriptors need them
    requires_gradient    an input of the call needs a gradient
    normalises           the call normalises q and k
    """

    batch: int
    num_tokens: int
    num_sequences: int
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    chunk_size: int = 64
    is_aligned: bool = True
    requires_gradient: bool = False
    normalises: bool = False


@dataclass(frozen=True)
class Schedule:
    """The choice: implementation, values per block (one of V's blocks is one CTA), tokens per chunk, and the reason in
    words."""

    implementation: str
    block_v: int
    chunk_size: int
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}, V block {self.block_v}, chunk {self.chunk_size}: {self.reason}"


def supports(implementation: str, problem: Problem, hardware: Hardware) -> str | None:
    """None where the implementation can run the problem on the hardware, else the reason why it cannot."""
    if implementation in DIFFERENTIABLE:
        return None
    if problem.requires_gradient:
        return NO_BACKWARD
    if implementation == "scan" and problem.dtype != "bfloat16":
        return f"it needs bfloat16, because it merges inverses in float16, q is {problem.dtype}"
    if implementation in HOPPER:
        return _hopper_limit(problem, hardware)
    return _triton_limit(problem, hardware)


def require_known(implementation: str | None, known: tuple[str, ...]) -> None:
    """Raises ValueError unless `implementation` is None or a known name."""
    if implementation is not None and implementation not in known:
        raise ValueError(f"implementation must be None or one of {', '.join(known)}, got {implementation!r}")


def require_differentiable(implementation: str | None) -> None:
    """Raises ValueError where a kernel without a backward is forced although an input requires a gradient."""
    if implementation not in (None, *DIFFERENTIABLE):
        raise ValueError(f"implementation={implementation!r} cannot run: {NO_BACKWARD}")


def pick(problem: Problem, hardware: Hardware, implementation: str | None = None) -> Schedule:
    """The Schedule of a chunked forward; `implementation` forces one.

    Raises ValueError with the limit where the forced implementation cannot run the problem.
    """
    if implementation is not None:
        require_known(implementation, IMPLEMENTATIONS)
        return _schedule(implementation, problem, hardware, _forced(implementation, problem, hardware))
    if problem.requires_gradient:
        reason = "an input requires a gradient, and the differentiable chunked torch path is the one with a backward"
        return _schedule("chunked", problem, hardware, reason)
    candidates = [name for name in HOPPER if supports(name, problem, hardware) is None]
    if candidates:
        fastest = min(candidates, key=lambda name: hopper_microseconds(name, problem, hardware.num_sms))
        return _schedule(fastest, problem, hardware, f"the fastest for this problem on {hardware.name}")
    hopper_limit = supports("roles", problem, hardware)
    portable_limit = supports("portable", problem, hardware)
    if portable_limit is None:
        return _schedule("portable", problem, hardware, f"scan and roles cannot run: {hopper_limit}")
    return _schedule("chunked", problem, hardware, f"no kernel can run: {portable_limit}")


def pick_recurrent(problem: Problem, hardware: Hardware, implementation: str | None = None) -> Schedule:
    """The Schedule of a decode call, a "chunk" being one token; `implementation` forces one, with pick's error."""
    if implementation is not None:
        require_known(implementation, RECURRENT_IMPLEMENTATIONS)
        return Schedule(implementation, problem.value_dim, 1, _forced(implementation, problem, hardware))
    limit = supports("recurrent", problem, hardware)
    if limit is None:
        return Schedule("recurrent", problem.value_dim, 1, f"the decode kernel runs on {hardware.name}")
    return Schedule("torch", problem.value_dim, 1, f"the decode kernel cannot run: {limit}")


def hopper_microseconds(implementation: str, problem: Problem, num_sms: int) -> float:
    """Estimated time of a Hopper kernel and its prepare kernel, one CTA per SM: prepare + waves (start + chunks).

    Sequences of a packed batch count as equally long, because their lengths are on the device.
    """
    return min(
        _microseconds(implementation, block_v, problem, num_sms) for block_v in CHUNK_MICROSECONDS[implementation]
    )


def roles_block_v(problem: Problem, num_sms: int) -> int:
    """The block of V with the least estimated time; the widest of equals, which reads the least."""
    return min(CHUNK_MICROSECONDS["roles"], key=lambda block_v: _microseconds("roles", block_v, problem, num_sms))


def _microseconds(implementation: str, block_v: int, problem: Problem, num_sms: int) -> float:
    num_sequences = problem.num_sequences
    num_chunks = -(-problem.batch * problem.num_tokens // (HOPPER_CHUNK_SIZE * max(num_sequences, 1)))
    num_ctas = num_sequences * problem.num_value_heads * (HOPPER_DIM // block_v)
    num_waves = -(-num_ctas // num_sms)
    prepare = PREPARE_NANOSECONDS[implementation][problem.normalises] * 1e-3
    chunk = CHUNK_MICROSECONDS[implementation][block_v]
    return prepare * num_sequences * num_chunks * problem.num_value_heads + num_waves * (
        START_MICROSECONDS[implementation] + num_chunks * chunk
    )


def _forced(implementation: str, problem: Problem, hardware: Hardware) -> str:
    limit = supports(implementation, problem, hardware)
    if limit is not None:
        raise ValueError(f"implementation={implementation!r} cannot run: {limit}")
    return "asked for by implementation="


def _schedule(implementation: str, problem: Problem, hardware: Hardware, reason: str) -> Schedule:
    if implementation in HOPPER:
        block_v = SCAN_BLOCK_V if implementation == "scan" else roles_block_v(problem, hardware.num_sms)
        num_ctas = problem.num_sequences * problem.num_value_heads * (HOPPER_DIM // block_v)
        reason = f"{reason}; {num_ctas} CTAs of {block_v} values on {hardware.num_sms} SMs"
        return Schedule(implementation, block_v, HOPPER_CHUNK_SIZE, reason)
    if implementation == "portable":
        return Schedule(implementation, _portable_block_v(problem, hardware), problem.chunk_size, reason)
    return Schedule(implementation, problem.value_dim, problem.chunk_size, reason)


def _portable_block_v(problem: Problem, hardware: Hardware) -> int:
    """As many values as V has, up to 64 of 2 bytes and 32 of 4 bytes; half of that where a block needs more room.

    That is at K > 64 with 4 bytes (registers), and at K > 128 with 2 bytes where a block may have less than the 106 KB
    of shared memory that 64 values take there (the smallest of these GPUs have 99). At K > 128 with 2 bytes blocks are
    no narrower than that, however small V is: Triton 3.6 then reads past its shared memory on sm_90.
    """
    if problem.dtype in HALF_DTYPES and problem.key_dim > 128:
        return 64 if hardware.shared_memory_bytes >= PORTABLE_WIDE_KEYS_BYTES else 32
    widest = 64 if problem.dtype in HALF_DTYPES else 32 if problem.key_dim <= 64 else 16
    block_v = 16
    while block_v < min(widest, problem.value_dim):
        block_v *= 2
    return block_v


def _hopper_limit(problem: Problem, hardware: Hardware) -> str | None:
    if hardware.backend != "cuda" or hardware.capability != (9, 0):
        return f"it needs compute capability 9.0 (Hopper), the device is {_describe(hardware)}"
    if not hardware.has_triton:
        return "Triton is not installed"
    if problem.dtype not in HALF_DTYPES:
        return f"it needs bfloat16 or float16, q is {problem.dtype}"
    if (problem.key_dim, problem.value_dim) != (HOPPER_DIM, HOPPER_DIM):
        return f"it needs K = V = {HOPPER_DIM}, got K = {problem.key_dim}, V = {problem.value_dim}"
    if problem.chunk_size != HOPPER_CHUNK_SIZE:
        return f"it needs chunk_size {HOPPER_CHUNK_SIZE}, got {problem.chunk_size}"
    if not problem.is_aligned:
        return "base addresses and strides of q, k, v must be multiples of 16 bytes"
    num_gates = problem.batch * problem.num_tokens * problem.num_value_heads
    if num_gates >= HOPPER_MAX_GATES:
        return f"B * T * HV must be below 2**31, got {num_gates}"
    return None


def _triton_limit(problem: Problem, hardware: Hardware) -> str | None:
    """Limits of the kernels in plain Triton: portable and recurrent."""
    if hardware.device_type in ("cpu", "meta", "mps"):
        return f"Triton has no compiler for {hardware.device_type} tensors"
    if not hardware.has_triton:
        return "Triton is not installed"
    if hardware.backend == "cuda" and hardware.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, the device is {_describe(hardware)}"
    if problem.dtype not in KERNEL_DTYPES:
        return f"it needs {', '.join(KERNEL_DTYPES)}, q is {problem.dtype}"
    if max(problem.key_dim, problem.value_dim) > MAX_KERNEL_DIM:
        return f"it needs K and V up to {MAX_KERNEL_DIM}, got K = {problem.key_dim}, V = {problem.value_dim}"
    return None


def _describe(hardware: Hardware) -> str:
    if hardware.backend != "cuda":
        return hardware.name or hardware.backend
    return f"{hardware.name} with {hardware.capability[0]}.{hardware.capability[1]}"
