"""How long the Hopper forwards take, estimated from sizes: what schedules compare. Pure Python on ints and strings.

    whole       prepare kernel + the scan or the roles, one CTA an SM: a start, and the chunks of each wave of CTAs
    beside      the prepare kernel on SMs that the scan leaves alone, while that runs: the slower of both, by chunks
    in pieces   prepare + table + states, in waves + combine, piece by piece + the scan over the pieces, in waves

All constants are in one place, below. They are fitted to measurements on an H200 (bench/forward_kernels.py,
bench/context_parallel.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilecrew.gated_delta_rule.pieces import CHUNK_SIZE, PiecePlan, plan_pieces

DIM = 128  # K and V


class WaveTimes(NamedTuple):
    """Microseconds of a kernel with one CTA an SM.

    start    of the launch: its first and its last chunk, what is not overlapped
    restart  of each wave of CTAs behind the first
    chunk    of one chunk in one CTA, where few SMs are busy
    crowded  the same where more than CROWDED of them are: bandwidth and power
    """

    start: float
    restart: float
    chunk: float
    crowded: float


class PrepareTimes(NamedTuple):
    """Microseconds of the launch, nanoseconds for each chunk and query/key head, and for each chunk and value head."""

    start: float
    head: float
    value_head: float


# By implementation and block of V. Narrower blocks of the roles repeat the work on keys.
WAVES = {
    ("scan", 128): WaveTimes(6.0, 3.0, 1.82, 2.04),
    ("scan", 64): WaveTimes(6.0, 3.0, 1.14, 1.21),
    ("roles", 128): WaveTimes(9.0, 9.0, 2.45, 2.45),
    ("roles", 64): WaveTimes(9.0, 9.0, 1.63, 1.63),
    ("roles", 32): WaveTimes(9.0, 9.0, 1.28, 1.28),
}
CROWDED = 0.75  # a share of the SMs
# By implementation, and whether the call normalises.
PREPARE = {
    ("scan", False): PrepareTimes(7.0, 7.4, 2.8),
    ("scan", True): PrepareTimes(7.0, 7.4, 2.8),
    ("roles", False): PrepareTimes(10.2, 4.9, 6.9),
    ("roles", True): PrepareTimes(13.7, 8.7, 2.9),
}
# The scan of 64 values beside the prepare kernel, whose P_g spares it the attention role. Its start is without the time
# of the first chunk's program of kernel_prepare.
BESIDE = WaveTimes(9.0, 0.0, 1.0, 1.0)
BESIDE_BLOCK_V = 64
# Of one program of kernel_prepare there, for a chunk: alone on its SM, and more for each value head; both by so much
# more where two share an SM. Three are hardly faster. Programs beyond what keeps pace with the scan only get in its way
# to the memory: 15 % more of them cost up to 4 %.
PROGRAM_MICROSECONDS = 3.3
VALUE_HEAD_MICROSECONDS = {True: 1.05, False: 1.3}  # by whether the call normalises; without it they look for long keys
SHARED_SM = 1.3
RESERVE = 1.06
# Of context parallelism.
STATES = WaveTimes(6.0, 3.0, 0.88, 0.88)
TABLE_MICROSECONDS = 3.0
COMBINE_START_MICROSECONDS = 5.0
COMBINE_MICROSECONDS = 3.0  # of a piece of the longest sequence, where the CTAs of kernel_combine are one wave
COMBINE_CTAS_PER_HEAD = 8
# How many pieces of a sequence are tried, how short a piece may be, and what share of the time must be gained.
PIECES_PER_SEQUENCE = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MIN_CHUNKS_PER_PIECE = 8
MIN_GAIN = 0.1


@dataclass(frozen=True)
class Sizes:
    """What the times follow from. num_tokens: of each sequence; those of a packed batch count as equally long, because
    their lengths are on the device. is_packed: there are several, of any lengths. needs_h: the call returns the states
    before chunks."""

    num_sequences: int
    num_tokens: int
    num_heads: int
    num_value_heads: int
    num_sms: int
    normalises: bool = False
    needs_h: bool = False
    has_initial_state: bool = False
    is_packed: bool = False

    @property
    def num_chunks(self) -> int:
        """Of each sequence."""
        return -(-self.num_tokens // CHUNK_SIZE)

    @property
    def num_left_sms(self) -> int:
        """SMs that a scan with prepare beside it leaves alone; below 0 where it has more CTAs than there are SMs."""
        return self.num_sms - self.num_sequences * self.num_value_heads * (DIM // BESIDE_BLOCK_V)

    @property
    def head_group(self) -> int:
        return head_group(self.num_heads, self.num_value_heads)


def head_group(num_heads: int, num_value_heads: int) -> int:
    """Value heads of one program of kernel_prepare: up to 4 of a key head's, a power of two."""
    return next(size for size in (4, 2, 1) if num_value_heads // num_heads % size == 0)


class Variant(NamedTuple):
    """A way to run the forward: the kernel, the values of a CTA, the chunks of a piece (0: whole sequences), and the
    programs of kernel_prepare that run beside the scan (0: they run before it)."""

    implementation: str
    block_v: int
    chunks_per_piece: int = 0
    prepare_programs: int = 0


def fastest(implementation: str, sizes: Sizes) -> Variant:
    """The variant with the least estimated time; of equals the widest block, which reads the least, and no pieces
    unless they gain MIN_GAIN."""
    whole = [*whole_variants(implementation, sizes), *beside_variants(implementation, sizes)]
    best = min(whole, key=lambda variant: microseconds(variant, sizes))
    in_pieces = list(piece_variants(implementation, sizes))
    if not in_pieces:
        return best
    best_in_pieces = min(in_pieces, key=lambda variant: microseconds(variant, sizes))
    is_gain = microseconds(best_in_pieces, sizes) < (1 - MIN_GAIN) * microseconds(best, sizes)
    return best_in_pieces if is_gain else best


def whole_variants(implementation: str, sizes: Sizes) -> Iterator[Variant]:
    """Those without context parallelism."""
    for name, block_v in WAVES:
        if name == implementation and block_v in blocks_of(implementation, sizes.needs_h):
            yield Variant(implementation, block_v)


def beside_variants(implementation: str, sizes: Sizes) -> Iterator[Variant]:
    """The scan with kernel_prepare beside it, where it leaves SMs alone: with as many programs as keep pace with it, or
    as there can be. None for packed sequences, whose first chunks would not be the first to be prepared."""
    num_left = sizes.num_left_sms
    if implementation != "scan" or sizes.is_packed or num_left <= 0 or sizes.num_sequences == 0:
        return
    for per_sm in (1, 2):
        wanted = math.ceil(RESERVE * _programs_per_chunk(sizes) * _program_microseconds(sizes, per_sm) / BESIDE.chunk)
        if wanted <= num_left * per_sm or per_sm == 2:
            num_programs = min(max(wanted, num_left * (per_sm - 1) + 1), num_left * per_sm)
            yield Variant(implementation, BESIDE_BLOCK_V, 0, num_programs)
            return


def piece_variants(implementation: str, sizes: Sizes) -> Iterator[Variant]:
    """Those with context parallelism; none where the states kernel, which does as much work again as the scan, would
    find more than half of the SMs busy without it."""
    if implementation != "scan" or 2 * sizes.num_sequences * sizes.num_value_heads >= sizes.num_sms:
        return
    lengths = {-(-sizes.num_chunks // pieces) for pieces in PIECES_PER_SEQUENCE}
    for chunks_per_piece in sorted(lengths):
        if MIN_CHUNKS_PER_PIECE <= chunks_per_piece < sizes.num_chunks:
            for variant in whole_variants(implementation, sizes):
                yield variant._replace(chunks_per_piece=chunks_per_piece)


def blocks_of(implementation: str, needs_h: bool) -> tuple[int, ...]:
    """Blocks of V that a kernel has, the widest first. The scan of 128 has no shared memory left for h."""
    return tuple(
        block_v
        for name, block_v in WAVES
        if name == implementation and not (needs_h and (implementation, block_v) == ("scan", 128))
    )


def microseconds(variant: Variant, sizes: Sizes) -> float:
    """The estimated time of a forward, from inputs to outputs."""
    if variant.prepare_programs:
        return _beside(variant.prepare_programs, sizes)
    waves = WAVES[variant.implementation, variant.block_v]
    prepare = _prepare(PREPARE[variant.implementation, sizes.normalises], sizes)
    if variant.chunks_per_piece == 0:
        num_ctas = sizes.num_sequences * sizes.num_value_heads * (DIM // variant.block_v)
        return prepare + _waves(waves, num_ctas, sizes.num_chunks, sizes.num_sms)
    plan = plan_pieces(sizes.num_sequences, sizes.num_tokens, variant.chunks_per_piece, is_packed=False)
    num_ctas = plan.num_scan_ctas(sizes.num_value_heads, variant.block_v)
    scan = _waves(waves, num_ctas, variant.chunks_per_piece, sizes.num_sms)
    return prepare + _input_states(plan, sizes) + scan


def _programs_per_chunk(sizes: Sizes) -> int:
    """Of kernel_prepare, for one chunk of all sequences."""
    return sizes.num_sequences * sizes.num_value_heads // sizes.head_group


def _program_microseconds(sizes: Sizes, per_sm: int) -> float:
    alone = PROGRAM_MICROSECONDS + VALUE_HEAD_MICROSECONDS[sizes.normalises] * sizes.head_group
    return alone * (SHARED_SM if per_sm > 1 else 1)


def _beside(num_programs: int, sizes: Sizes) -> float:
    """The first chunk's program, and from one chunk to the next the scan's time, or that in which so many programs
    prepare one of each sequence."""
    program = _program_microseconds(sizes, -(-num_programs // sizes.num_left_sms))
    chunk = max(BESIDE.chunk, _programs_per_chunk(sizes) * program / num_programs)
    return BESIDE.start + program + sizes.num_chunks * chunk


def _input_states(plan: PiecePlan, sizes: Sizes) -> float:
    """The states before all pieces: their table, what each does to the state, and one after the other."""
    num_ctas = plan.num_states_ctas(sizes.num_value_heads, sizes.has_initial_state)
    states = _waves(STATES, num_ctas, plan.chunks_per_piece, sizes.num_sms)
    num_combine_ctas = sizes.num_sequences * sizes.num_value_heads * COMBINE_CTAS_PER_HEAD
    num_waves = -(-num_combine_ctas // sizes.num_sms)
    num_pieces = plan.num_rows // max(sizes.num_sequences, 1)
    combine = COMBINE_START_MICROSECONDS + COMBINE_MICROSECONDS * num_waves * num_pieces
    return TABLE_MICROSECONDS + states + combine


def _prepare(times: PrepareTimes, sizes: Sizes) -> float:
    nanoseconds = times.head * sizes.num_heads + times.value_head * sizes.num_value_heads
    return times.start + 1e-3 * nanoseconds * sizes.num_sequences * sizes.num_chunks


def _waves(times: WaveTimes, num_ctas: int, num_chunks: int, num_sms: int) -> float:
    """Waves of CTAs with that many chunks each."""
    num_full, num_left = divmod(num_ctas, num_sms)
    time = times.start + num_full * num_chunks * times.crowded
    if num_left > 0:
        time += num_chunks * (times.crowded if num_left > CROWDED * num_sms else times.chunk)
    return time + times.restart * max(num_full + (num_left > 0) - 1, 0)
