"""Problem and hardware -> Schedule: which implementation a call uses, its tile sizes, and why. Pure Python on ints and
strings; how long the Hopper kernels take is estimated in hopper_times.

Implementations of the chunked forward:
    scan       kernel for Hopper (compute capability 9.0) that keeps the state in registers, for bfloat16
    roles      kernel for Hopper whose state, value and output are roles of their own
    portable   plain Triton, every GPU that Triton compiles for
    chunked    batched torch, every device and dtype, and the one with gradients
Implementations of decode:
    recurrent  plain Triton
    torch      the same recurrence in torch, every device and dtype, and the one with gradients
"""

import functools
from dataclasses import dataclass, replace

from tilecrew._hardware import Hardware
from tilecrew.gated_delta_rule import hopper_times
from tilecrew.gated_delta_rule.hopper_times import Sizes, Variant

IMPLEMENTATIONS = ("scan", "roles", "portable", "chunked")
HOPPER = ("scan", "roles")
RECURRENT_IMPLEMENTATIONS = ("recurrent", "torch")
DIFFERENTIABLE = ("chunked", "torch")
NO_BACKWARD = "the kernel has no backward, and an input requires a gradient"
UNALIGNED = "base addresses and strides of q, k, v must be multiples of 16 bytes"
CHUNK_SIZES = (16, 32, 64)
MAX_KERNEL_DIM = 256
HALF_DTYPES = ("bfloat16", "float16")
KERNEL_DTYPES = (*HALF_DTYPES, "float32")

PORTABLE_WIDE_KEYS_BYTES = 106 * 1024  # of shared memory: 64 values a block at K > 128

HOPPER_DIM = 128
HOPPER_CHUNK_SIZE = 64
HOPPER_MAX_GATES = 2**31
# Values of a CTA where batch_invariant fixes them: 64, which the scan has with h too.
INVARIANT_BLOCK_V = 64


@dataclass(frozen=True)
class Problem:
    """What a schedule may depend on: sizes known on the host, never values on the device.

    Sizes: batch B, num_tokens T, num_sequences N, num_heads H, num_value_heads HV, key_dim K, value_dim V.
    dtype                of q, k, v, as torch prints it without its prefix
    is_aligned           base addresses and strides of q, k, v are multiples of 16 bytes, as TMA descriptors need them
    requires_gradient    an input of the call needs a gradient
    normalises           the call normalises q and k
    output_h             the call returns the states before chunks
    has_initial_state    the call gives states to start from
    batch_invariant      nothing may depend on the other sequences of the batch
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
    output_h: bool = False
    has_initial_state: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class Schedule:
    """The choice: implementation, values per block (one of V's blocks is one CTA; 0 for decode, whose kernel has its
    own), tokens per chunk, the reason in words, chunks per piece where sequences are cut into pieces that run at the
    same time (context parallelism; 0 where they are not), and programs of kernel_prepare that run beside the scan (0
    where they run before it)."""

    implementation: str
    block_v: int
    chunk_size: int
    reason: str
    chunks_per_piece: int = 0
    prepare_programs: int = 0

    def __str__(self) -> str:
        form = f", V block {self.block_v}, chunk {self.chunk_size}" if self.block_v else ""
        if self.chunks_per_piece:
            form += f", pieces of {self.chunks_per_piece} chunks"
        if self.prepare_programs:
            form += f", beside {self.prepare_programs} programs of prepare"
        return f"{self.implementation}{form}: {self.reason}"


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


@functools.lru_cache(maxsize=1024)
def pick(problem: Problem, hardware: Hardware, implementation: str | None = None) -> Schedule:
    """The Schedule of a chunked forward; `implementation` forces one.

    Raises ValueError with the limit where the forced implementation cannot run the problem, and where the bits of a
    sequence cannot be kept the same in every batch although batch_invariant asks for it.
    """
    require_known(implementation, IMPLEMENTATIONS)
    if problem.batch_invariant:
        return _pick_invariant(problem, hardware, implementation)
    if implementation is not None:
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
        return Schedule(implementation, 0, 1, _forced(implementation, problem, hardware))
    limit = supports("recurrent", problem, hardware)
    if limit is None:
        return Schedule("recurrent", 0, 1, f"the decode kernel runs on {hardware.name}")
    return Schedule("torch", 0, 1, f"the decode kernel cannot run: {limit}")


def hopper_microseconds(implementation: str, problem: Problem, num_sms: int) -> float:
    """Estimated time of a forward by a Hopper kernel, as its schedule would run it."""
    variant = hopper_variant(implementation, problem, num_sms)
    return hopper_times.microseconds(variant, hopper_sizes(problem, num_sms))


@functools.lru_cache(maxsize=1024)  # up to twenty variants are compared
def hopper_variant(implementation: str, problem: Problem, num_sms: int) -> Variant:
    """How a Hopper kernel runs a problem: the fastest of its blocks of V, and of pieces where it takes them."""
    if problem.batch_invariant:
        return Variant(implementation, INVARIANT_BLOCK_V)
    return hopper_times.fastest(implementation, hopper_sizes(problem, num_sms))


def hopper_sizes(problem: Problem, num_sms: int) -> Sizes:
    """What the times of Hopper kernels follow from."""
    num_sequences = problem.num_sequences
    return Sizes(
        num_sequences=num_sequences,
        num_tokens=-(-problem.batch * problem.num_tokens // max(num_sequences, 1)),
        num_heads=problem.num_heads,
        num_value_heads=problem.num_value_heads,
        num_sms=num_sms,
        normalises=problem.normalises,
        needs_h=problem.output_h,
        has_initial_state=problem.has_initial_state,
        is_packed=problem.batch != num_sequences,
    )


def _pick_invariant(problem: Problem, hardware: Hardware, implementation: str | None) -> Schedule:
    """The Schedule of a problem whose sequences have the same bits in every batch.

    The implementation follows from what a sequence has in common with every batch that it may be part of: heads,
    dtype, options, device. Where that one cannot run this batch, no other may take its place.
    """
    if problem.requires_gradient:
        raise ValueError(
            "batch_invariant=True cannot be kept where an input requires a gradient: gates and norms are then made by "
            "torch for all tokens at once, and their rounding may depend on where a token is"
        )
    fixed, reason = implementation, f"batch_invariant fixes it for such heads, dtype and options on {hardware.name}"
    if fixed is None:
        alone = replace(problem, batch=1, num_tokens=1, num_sequences=1, is_aligned=True)
        fixed = next(name for name in IMPLEMENTATIONS if supports(name, alone, hardware) is None)
    else:
        reason = _forced(fixed, problem, hardware)
    limit = supports(fixed, problem, hardware)
    if fixed == "portable" and not problem.is_aligned:
        # Triton compiles for what addresses are multiples of, and lays out sums along K by it.
        limit = UNALIGNED
    if limit is not None:
        raise ValueError(f"batch_invariant=True cannot be kept: {fixed} serves calls like this one, but here {limit}")
    return _schedule(fixed, problem, hardware, reason)


def _forced(implementation: str, problem: Problem, hardware: Hardware) -> str:
    limit = supports(implementation, problem, hardware)
    if limit is not None:
        raise ValueError(f"implementation={implementation!r} cannot run: {limit}")
    return "asked for by implementation="


def _schedule(implementation: str, problem: Problem, hardware: Hardware, reason: str) -> Schedule:
    if implementation in HOPPER:
        _, block_v, chunks_per_piece, prepare_programs = hopper_variant(implementation, problem, hardware.num_sms)
        num_rows = problem.num_sequences
        if chunks_per_piece:
            num_tokens = hopper_sizes(problem, hardware.num_sms).num_tokens
            num_rows *= -(-num_tokens // (HOPPER_CHUNK_SIZE * chunks_per_piece))
            reason = f"{reason}; context parallelism"
        num_ctas = num_rows * problem.num_value_heads * (HOPPER_DIM // block_v)
        reason = f"{reason}; {num_ctas} CTAs of {block_v} values on {hardware.num_sms} SMs"
        return Schedule(implementation, block_v, HOPPER_CHUNK_SIZE, reason, chunks_per_piece, prepare_programs)
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
    if limit := hardware.hopper_limit():
        return limit
    if problem.dtype not in HALF_DTYPES:
        return f"it needs bfloat16 or float16, q is {problem.dtype}"
    if (problem.key_dim, problem.value_dim) != (HOPPER_DIM, HOPPER_DIM):
        return f"it needs K = V = {HOPPER_DIM}, got K = {problem.key_dim}, V = {problem.value_dim}"
    if problem.chunk_size != HOPPER_CHUNK_SIZE:
        return f"it needs chunk_size {HOPPER_CHUNK_SIZE}, got {problem.chunk_size}"
    if not problem.is_aligned:
        return UNALIGNED
    num_gates = problem.batch * problem.num_tokens * problem.num_value_heads
    if num_gates >= HOPPER_MAX_GATES:
        return f"B * T * HV must be below 2**31, got {num_gates}"
    return None


def _triton_limit(problem: Problem, hardware: Hardware) -> str | None:
    """Limits of the kernels in plain Triton: portable and recurrent."""
    if limit := hardware.triton_limit():
        return limit
    if problem.dtype not in KERNEL_DTYPES:
        return f"it needs {', '.join(KERNEL_DTYPES)}, q is {problem.dtype}"
    if max(problem.key_dim, problem.value_dim) > MAX_KERNEL_DIM:
        return f"it needs K and V up to {MAX_KERNEL_DIM}, got K = {problem.key_dim}, V = {problem.value_dim}"
    return None
