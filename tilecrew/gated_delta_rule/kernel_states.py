"""What a piece of a sequence does to the state: its end from a state of zeros, and its transition. For Hopper.

A piece takes the state S before it to h + M S, with h [K, V] its end state from zeros and M [K, K] its transition.
Both are the scan of kernel_forward_scan without outputs: h with the piece's values from S = 0, and M with V = 0 from
S = I, column by column of I. So one CTA serves one piece, one value head and either h or M: 128 columns each, that is
128 rows of S^T, which do not depend on each other. Two scan roles have 64 rows each, in registers from the first chunk
to the last; they read the same K, A_g and factors (kernel_prepare), and nothing in their chains waits for another warp
group.

Computes (equation numbers of README.md), per chunk:
    U^T = S^T K^T;  W^T = V^T - gamma o U^T (4);  V_d^T = W^T A_g^T (5)
    S^T <- gamma_C S^T + (e^{g_C - g} o V_d)^T K (7)

Programs        (piece, value head, h or M), the last the fastest: neighbours share K and A_g in the L2 cache
Output          ends [P, HV, 2, 128, 128] float32: h^T [V, K], then M^T [K, K], as the accumulators have them. The row
                of M^T is the index of the state before the piece, its column that of the state after it: kernel_combine
                takes S^T from the left

Roles           warps  registers  job
    scan (default)    4      224      rows 0 to 63 of S^T
    scan              4      224      rows 64 to 127
    load              1       56      TMA of K, A_g, the factors, and of V for h

Ring            producer -> consumers       full by                     empty by      bytes x stages
    inputs      load -> scans               1 arrival + TMA             both scans    41 KiB x 4

Timeline        [chunk i]
    load        wait inputs empty -> TMA of the chunk that comes num_stages later
    scan        wait inputs -> U | V and gamma loaded, gamma_C S -> W -> V_d -> S -> leave the stage

Who computes nothing:
    the last piece of a sequence, whose end nobody needs here. So every chunk met here is full, since a partial chunk is
    the last of its sequence; nothing has to be kept out of rows behind an end
    rows of the table that are no piece: they have no chunks
    M of a first piece without an initial state before it
    M where history_tolerance drops it: the piece's gates multiply to less than the tolerance. M = 0 is stored then,
    and kernel_combine need not know. For 0 <= beta |k|^2 <= 2, so for keys of unit length, no singular value of M is
    larger than that product, and the share of the state that is dropped is below the tolerance. For longer keys that
    does not hold, which is why nothing is dropped unless asked for
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilecrew.device.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilecrew.device.descriptors import matrix_descriptor, token_descriptor
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout, operand_layout
from tilecrew.device.ring import Ring
from tilecrew.device.tiles import exp2, opaque, scalar
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.chunk_blocks import NUM_BLOCKS, block_descriptor, clear_top_right, load_lower, matrix_of
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, FACTOR_ROWS
from tilecrew.gated_delta_rule.chunk_state import store_state
from tilecrew.gated_delta_rule.chunk_walk import ChunkWalk
from tilecrew.gated_delta_rule.crew_states import HALF, NUM_HALVES, StatesTiles
from tilecrew.gated_delta_rule.kernel_prepare import Prepared

# Threads x registers at entry, before the roles re-divide them: 12 warps x 32 x 168 of the 65,536 of an SM.
ENTRY_REGISTERS = 168
SCAN_REGISTERS, COPY_REGISTERS = gl.constexpr(224), gl.constexpr(56)
NUM_STAGES = 4
NUM_RESULTS = gl.constexpr(2)  # h and M
TOTALS = gl.constexpr(128)  # chunks whose decay is summed at once: one a thread


class Pointers(NamedTuple):
    """Tensors that the kernel reads or writes by pointer; cu_seqlens is None where the config says so."""

    ends: Any
    factors: Any
    cu_seqlens: Any
    pieces: Any


@dataclass(frozen=True)
class StatesConfig:
    """What the kernel is compiled for. drop_history: a tolerance above zero was given."""

    num_value_heads: int
    value_heads_per_head: int
    varlen: bool
    has_initial_state: bool
    drop_history: bool
    num_stages: int


def allocate(arguments: ForwardArguments, num_pieces: int) -> torch.Tensor:
    """Ends [P, HV, 2, 128, 128] float32: h^T and M^T; what no program needs to compute stays unwritten."""
    v = arguments.v
    return v.new_empty(num_pieces, v.shape[2], 2, 128, 128, dtype=torch.float32)


def launch(
    arguments: ForwardArguments,
    prepared: Prepared,
    pieces: torch.Tensor,
    ends: torch.Tensor,
    history_tolerance: float = 0.0,
) -> Launch:
    """The launch of this kernel. prepared: by kernel_prepare.run_gated. pieces: [P, 3] as in ChunkWalk.create."""
    num_value_heads = arguments.v.shape[2]
    config = StatesConfig(
        num_value_heads=num_value_heads,
        value_heads_per_head=num_value_heads // arguments.q.shape[2],
        varlen=arguments.cu_seqlens is not None,
        has_initial_state=arguments.initial_state is not None,
        drop_history=history_tolerance > 0.0,
        num_stages=NUM_STAGES,
    )
    args = (
        token_descriptor(arguments.k, 128),
        token_descriptor(arguments.v, 64),
        block_descriptor(prepared.inverse),
        matrix_descriptor(prepared.factors, 4, 64),
        Pointers(ends, prepared.factors, arguments.cu_seqlens, pieces),
        float(history_tolerance),
        config,
    )
    num_programs = pieces.shape[0] * num_value_heads * 2
    return Launch(states_kernel, num_programs, args, {"num_warps": 4, "maxnreg": ENTRY_REGISTERS})


@gluon.jit
def states_kernel(
    k_desc,
    v_desc,
    inverse_desc,
    factors_desc,
    pointers,
    history_tolerance,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    # The block of V is which of h and M: blocks 1 wide.
    walk = ChunkWalk.create(
        opaque(k_desc.shape[1]),
        pointers.cu_seqlens,
        pointers.pieces,
        config.num_value_heads,
        NUM_RESULTS,
        1,
        config.varlen,
        True,
    )
    is_transition = walk.value_offset == 1
    is_needed = (walk.num_chunks > 0) & (walk.ends_sequence == 0)
    if not config.has_initial_state:
        is_first = gl.load(pointers.pieces + walk.piece * 3 + 1) == 0
        is_needed = is_needed & ((not is_transition) | (not is_first))
    is_walked = is_needed
    if config.drop_history:
        keeps_history = total_decay(walk, pointers.factors, config) >= history_tolerance
        is_walked = is_walked & ((not is_transition) | keeps_history)
    num_chunks = gl.where(is_walked, walk.num_chunks, 0)
    diagonal = gl.where(is_walked & is_transition, 1.0, 0.0)
    tiles = StatesTiles.create(k_desc, v_desc, factors_desc, config)
    clear_top_right(tiles.gated_inverse)
    inputs = Ring.create(config.num_stages, 1, NUM_HALVES)
    if is_transition:
        tiles.clear_values(config)
    fence_async_shared()
    barrier()
    end = pointers.ends + gl.program_id(0).to(gl.int64) * (DIM * DIM)
    place = (num_chunks, diagonal, is_needed.to(gl.int32), end)
    gl.warp_specialize(
        [
            (scan_role, (tiles, inputs, place, 0)),
            (scan_role, (tiles, inputs, place, 1)),
            (load_role, (tiles, inputs, walk, num_chunks, (k_desc, v_desc, inverse_desc, factors_desc), config)),
        ],
        [4, 1],
        [SCAN_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def total_decay(walk, factors, config: gl.constexpr):
    """The product of the piece's decays: 2 to the sum of what the cumulative log2 decay of each chunk ends with."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    log2_decay = gl.zeros([TOTALS], gl.float32, layout)
    for first in range(0, walk.num_chunks, TOTALS):
        chunk = first + gl.arange(0, TOTALS, layout)
        row = walk.slot_head(chunk, config.num_value_heads).to(gl.int64) * FACTOR_ROWS
        log2_decay += gl.load(factors + row * CHUNK + (CHUNK - 1), mask=chunk < walk.num_chunks, other=0.0)
    return exp2(gl.sum(log2_decay, 0))


@gluon.jit
def scan_role(tiles, inputs, place, HALF_IDX: gl.constexpr):
    wide: gl.constexpr = accumulator_layout(DIM)  # of S^T [64 columns of S, 128 keys]
    square: gl.constexpr = accumulator_layout(CHUNK)  # of U^T, V_d^T [64 columns of S, 64 tokens]
    tokens: gl.constexpr = gl.SliceLayout(0, square)
    dtype: gl.constexpr = tiles.key.dtype
    num_chunks, diagonal, is_needed, end = place
    row = gl.arange(0, HALF, gl.SliceLayout(1, wide)) + HALF_IDX * HALF
    column = gl.arange(0, DIM, gl.SliceLayout(0, wide))
    S = gl.where(row[:, None] == column[None, :], diagonal, 0.0)
    # Without a wait for an MMA in front of the loop, ptxas takes S for one in flight and waits for U where S decays.
    warpgroup_mma_wait(0, deps=(gl.zeros([CHUNK, 8], gl.float32, accumulator_layout(8)),))
    for i in range(num_chunks):
        inputs.wait(i)
        stage = inputs.stage(i)
        key = tiles.key_matrix(stage)
        factors = tiles.factor_vectors(stage)
        gamma = factors.index(1).load(tokens)
        # (4)
        state = gl.convert_layout(S.to(dtype), operand_layout(square, 0))
        U = gl.zeros([HALF, CHUNK], gl.float32, square)
        U = warpgroup_mma(state, key.permute((1, 0)), U, use_acc=False, is_async=True)
        V = tiles.value_matrix(stage, HALF_IDX).permute((1, 0)).load(square).to(gl.float32)
        S = S * exp2(scalar(factors.index(0), CHUNK - 1, gl.SliceLayout(0, wide)))
        U, state = warpgroup_mma_wait(0, deps=(U, state))
        W = gl.convert_layout((V - gamma[None, :] * U).to(dtype), operand_layout(square, 0))
        # (5)
        V_d = gl.zeros([HALF, CHUNK], gl.float32, square)
        A_g = matrix_of(tiles.gated_inverse, stage).permute((1, 0))
        V_d = warpgroup_mma(W, A_g, V_d, use_acc=False, is_async=True)
        to_end = factors.index(3).load(tokens)
        V_d, W = warpgroup_mma_wait(0, deps=(V_d, W))
        # (7)
        delta = gl.convert_layout((V_d * to_end[None, :]).to(dtype), operand_layout(wide, 0))
        S = warpgroup_mma(delta, key, S, is_async=True)
        S, delta = warpgroup_mma_wait(0, deps=(S, delta))
        inputs.release(i)
    if is_needed == 1:
        store_state(S, end + HALF_IDX * HALF * DIM, 1, DIM)


@gluon.jit
def load_role(tiles, inputs, walk, num_chunks, descs, config: gl.constexpr):
    k_desc, v_desc, inverse_desc, factors_desc = descs
    INVERSE_BYTES: gl.constexpr = NUM_BLOCKS * inverse_desc.block_type.nbytes
    KEY_BYTES: gl.constexpr = k_desc.block_type.nbytes + INVERSE_BYTES + factors_desc.block_type.nbytes
    VALUE_BYTES: gl.constexpr = 2 * v_desc.block_type.nbytes
    head = walk.head // config.value_heads_per_head
    for i in range(num_chunks):
        full = inputs.acquire(i)
        stage = inputs.stage(i)
        row = walk.slot_head(i, config.num_value_heads)
        token = walk.token(i)
        if walk.value_offset == 0:
            mbarrier.expect(full, KEY_BYTES + VALUE_BYTES)
            for half in gl.static_range(2):
                coordinates = [walk.batch, token, walk.head, half * HALF]
                tma_load(v_desc, coordinates, full, tiles.value.index(stage * 2 + half))
        else:
            mbarrier.expect(full, KEY_BYTES)
        tma_load(k_desc, [walk.batch, token, head, 0], full, tiles.key.index(stage))
        tma_load(factors_desc, [row * FACTOR_ROWS, 0], full, tiles.factors.index(stage))
        load_lower(inverse_desc, row, full, tiles.gated_inverse, stage)
