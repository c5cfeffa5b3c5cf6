"""Chunked gated delta rule on Hopper, with the state in registers from the first chunk to the last.

One CTA serves one piece of a sequence, one value head and 64 values, and walks the chunks in time. Its scan role keeps
the *transposed* state S^T [V, K] as the accumulator of a warp group's MMA. Rows of S^T do not depend on each other, and
an accumulator becomes the left operand of the next MMA in registers: so S, U, W and V_d never leave the scan role, and
nothing in the chain from one chunk to the next waits for another warp group. A_g comes from kernel_prepare; P_g is made
ahead by another role.

Computes (equation numbers of README.md), per chunk:
    attention   P_g = scale G o Q K^T (3), and the factors below
    scan        U^T = S^T K^T;  W^T = V^T - gamma o U^T (4);  V_d^T = W^T A_g^T (5)
                O^T = scale gamma o (S^T Q^T) + V_d^T P_g^T (6);  S^T <- gamma_C S^T + (e^{g_C - g} o V_d)^T K (7)

Roles                 warps  registers  job
    scan (default)      4      240      S, U, W, V_d, O
    attention           4      168      P_g and factors of the chunks to come
    load_query_key      1      48       TMA of Q and K
    load_value          1      48       TMA of V
    load_inverse        1      48       TMA of A_g and of the gates
    store               1      48       TMA of O and of S (the optional output h)

Ring            producers -> consumers                       full by            empty by    bytes x stages
    inputs      load_query_key, load_value, load_inverse     3 arrivals + TMA   scan        49 KiB x 4 (with h: 3)
                -> attention, scan

Hand-offs       producer -> consumers                        ready when written         free when
    prepared    attention -> scan (2 slots)                  P_g, factors               implied by inputs' empty
    output      scan -> store                                O: told by inputs' empty   O stored
    state       scan -> store (h only)                       S before the chunk         S stored

Timeline        [chunk i]
    load_*      wait inputs empty -> TMA of the chunk that comes num_stages later
    attention   wait inputs -> P, G -> wait until chunk i - 2 is finished -> P_g, factors out
    scan        wait inputs -> U | wait prepared, gamma_C S -> W -> V_d, Q S | O of chunk i - 1 out -> S, O
    store       (wait state -> h) | wait inputs empty -> O of chunk i, while the scan computes chunk i + 1

A chunk that is not full is the last of its sequence, and what follows may hold NaN: rows of K behind the end become
zeros as they land, values behind the end become zeros before the scan reads them (their beta is 0), rows of O behind
the end are not stored; Q reaches only those rows.
"""

from dataclasses import dataclass

import torch

from tilecrew.device.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilecrew.device.descriptors import matrix_descriptor, token_descriptor
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout, operand_layout
from tilecrew.device.tiles import exp2, opaque, scalar, store_rows, zero_rows
from tilecrew.device.triangular import causal
from tilecrew.gated_delta_rule import kernel_prepare
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, GATE_ROWS
from tilecrew.gated_delta_rule.chunk_state import load_state, state_pointer, store_state
from tilecrew.gated_delta_rule.chunk_walk import ChunkWalk
from tilecrew.gated_delta_rule.crew_forward_scan import FACTORS, NUM_SLOTS, SCAN_VALUES, ScanCrew, ScanTiles
from tilecrew.gated_delta_rule.kernel_forward_roles import Pointers, allocate_result
from tilecrew.gated_delta_rule.kernel_prepare import Prepared
from tilecrew.gated_delta_rule.schedule import Schedule

# Threads x registers at entry, before the roles re-divide them: 12 warps x 32 x 168 of the 65,536 of an SM.
ENTRY_REGISTERS = 168
ATTENTION_REGISTERS, COPY_REGISTERS = gl.constexpr(168), gl.constexpr(48)
NUM_STAGES = 4


@dataclass(frozen=True)
class ScanConfig:
    """What the kernel is compiled for. num_stages: of the ring, what 227 KB hold."""

    num_value_heads: int
    value_heads_per_head: int
    normalise: bool
    varlen: bool
    has_pieces: bool
    has_initial_state: bool
    store_final_state: bool
    store_h: bool
    state_v_first: bool
    num_stages: int


def forward(arguments: ForwardArguments, schedule: Schedule) -> ForwardResult:
    """Outputs and states on the current stream: the prepare kernel, then the scan. See ForwardArguments for shapes."""
    result = allocate_result(arguments)
    prepared = kernel_prepare.run_gated(arguments, result.o)
    launch(arguments, prepared, result).run()
    return result


def launch(
    arguments: ForwardArguments,
    prepared: Prepared,
    result: ForwardResult,
    pieces: torch.Tensor | None = None,
) -> Launch:
    """The launch of this kernel; `pieces` as in kernel_forward_roles.launch."""
    q, v = arguments.q, arguments.v
    num_value_heads = v.shape[2]
    config = ScanConfig(
        num_value_heads=num_value_heads,
        value_heads_per_head=num_value_heads // q.shape[2],
        normalise=arguments.use_qk_l2norm,
        varlen=arguments.cu_seqlens is not None,
        has_pieces=pieces is not None,
        has_initial_state=arguments.initial_state is not None,
        store_final_state=result.final_state is not None,
        store_h=result.h is not None,
        state_v_first=arguments.state_v_first,
        num_stages=NUM_STAGES - (result.h is not None),
    )
    h = result.o if result.h is None else result.h
    args = (
        token_descriptor(q, 128),
        token_descriptor(arguments.k, 128),
        token_descriptor(v, 64),
        matrix_descriptor(prepared.inverse, 64, 64),
        matrix_descriptor(prepared.gates, 4, 64),
        token_descriptor(result.o, 64),
        matrix_descriptor(h, 128, 64),
        Pointers(result.o, arguments.initial_state, result.final_state, arguments.cu_seqlens, pieces),
        arguments.scale,
        config,
    )
    num_pieces = arguments.num_sequences if pieces is None else pieces.shape[0]
    num_programs = num_pieces * num_value_heads * 2
    return Launch(forward_scan_kernel, num_programs, args, {"num_warps": 4, "maxnreg": ENTRY_REGISTERS})


@gluon.jit
def forward_scan_kernel(
    q_desc,
    k_desc,
    v_desc,
    inverse_desc,
    gates_desc,
    o_desc,
    h_desc,
    pointers,
    scale,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    num_tokens = opaque(q_desc.shape[1])
    walk = ChunkWalk.create(
        num_tokens,
        pointers.cu_seqlens,
        pointers.pieces,
        config.num_value_heads,
        DIM // SCAN_VALUES,
        SCAN_VALUES,
        config.varlen,
        config.has_pieces,
    )
    TOKEN_STRIDE: gl.constexpr = config.num_value_heads * DIM
    first_token = walk.batch.to(gl.int64) * num_tokens + walk.token_start
    output_pointer = pointers.output + first_token * TOKEN_STRIDE + walk.head * DIM + walk.value_offset
    tiles = ScanTiles.create(q_desc, k_desc, v_desc, inverse_desc, gates_desc, o_desc, h_desc, config)
    crew = ScanCrew.create(config)
    VALUE_STRIDE: gl.constexpr = DIM if config.state_v_first else 1  # of the states in global memory
    KEY_STRIDE: gl.constexpr = 1 if config.state_v_first else DIM
    S = gl.zeros([SCAN_VALUES, DIM], gl.float32, accumulator_layout(DIM))
    if config.has_initial_state:
        first = state_pointer(pointers.initial_state, walk.piece, walk, config)
        S = load_state(first, SCAN_VALUES, DIM, KEY_STRIDE, VALUE_STRIDE)
    results = gl.warp_specialize(
        [
            (scan_role, (tiles, crew, walk, S, config)),
            (attention_role, (tiles, crew, walk, scale, config)),
            (load_query_key_role, (tiles, crew, walk, q_desc, k_desc, config)),
            (load_value_role, (tiles, crew, walk, v_desc, config)),
            (load_inverse_role, (tiles, crew, walk, inverse_desc, gates_desc, config)),
            (store_role, (tiles, crew, walk, o_desc, h_desc, output_pointer, config)),
        ],
        [4, 1, 1, 1, 1],
        [ATTENTION_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
    if config.store_final_state:
        if walk.ends_sequence == 1:
            first = state_pointer(pointers.final_state, walk.sequence, walk, config)
            store_state(results[0], first, KEY_STRIDE, VALUE_STRIDE)


@gluon.jit
def scan_role(tiles, crew, walk, S, config: gl.constexpr):
    wide: gl.constexpr = accumulator_layout(DIM)  # of S^T [64 values, 128 keys]
    square: gl.constexpr = accumulator_layout(CHUNK)  # of U^T, V_d^T, O^T [64 values, 64 tokens]
    tokens: gl.constexpr = gl.SliceLayout(0, square)
    dtype: gl.constexpr = tiles.query.dtype
    O = gl.zeros([SCAN_VALUES, CHUNK], gl.float32, square)
    for i in range(walk.num_chunks):
        if config.store_h:
            crew.state.acquire(i)
            tiles.state.permute((1, 0)).store(S.to(dtype))
            crew.state.publish()
        crew.inputs.wait(i)
        stage = crew.inputs.stage(i)
        key = tiles.key_matrix(stage)
        # (4)
        state = gl.convert_layout(S.to(dtype), operand_layout(square, 0))
        U = gl.zeros([SCAN_VALUES, CHUNK], gl.float32, square)
        U = warpgroup_mma(state, key.permute((1, 0)), U, use_acc=False, is_async=True)
        crew.wait_prepared(i)
        factors = tiles.factor_vectors(i % NUM_SLOTS)
        V = tiles.value_matrix(stage).permute((1, 0)).load(square).to(gl.float32)
        gamma = factors.index(0).load(tokens)
        S = S * scalar(factors.index(3), 0, gl.SliceLayout(0, wide))
        U = warpgroup_mma_wait(0, deps=(U,))
        W = gl.convert_layout((V - gamma[None, :] * U).to(dtype), operand_layout(square, 0))
        # (5); then Q S, which nothing waits for yet
        V_d = gl.zeros([SCAN_VALUES, CHUNK], gl.float32, square)
        A_g = tiles.gated_inverse.index(stage).permute((1, 0))
        V_d = warpgroup_mma(W, A_g, V_d, use_acc=False, is_async=True)
        Q_S = gl.zeros([SCAN_VALUES, CHUNK], gl.float32, square)
        Q_S = warpgroup_mma(state, tiles.query_matrix(stage).permute((1, 0)), Q_S, use_acc=False, is_async=True)
        # O of the chunk before, meanwhile
        crew.acquire_output(i - 1)
        tiles.output_matrix().permute((1, 0)).store(O.to(dtype))
        crew.finish_chunk(i - 1)
        to_end = factors.index(2).load(tokens)
        V_d, W = warpgroup_mma_wait(1, deps=(V_d, W))
        # (7), (6)
        delta = gl.convert_layout((V_d * to_end[None, :]).to(dtype), operand_layout(wide, 0))
        S = warpgroup_mma(delta, key, S, is_async=True)
        V_d = gl.convert_layout(V_d.to(dtype), operand_layout(square, 0))
        Q_S, state = warpgroup_mma_wait(1, deps=(Q_S, state))
        O = Q_S * factors.index(1).load(tokens)[None, :]
        P_g = tiles.attention.index(i % NUM_SLOTS).permute((1, 0))
        O = warpgroup_mma(V_d, P_g, O, is_async=True)
        S, O, delta, V_d = warpgroup_mma_wait(0, deps=(S, O, delta, V_d))
    crew.acquire_output(walk.num_chunks - 1)
    tiles.output_matrix().permute((1, 0)).store(O.to(dtype))
    crew.finish_chunk(walk.num_chunks - 1)
    return (S,)


@gluon.jit
def attention_role(tiles, crew, walk, scale, config: gl.constexpr):
    square: gl.constexpr = accumulator_layout(CHUNK)
    rows: gl.constexpr = gl.SliceLayout(1, square)
    columns: gl.constexpr = gl.SliceLayout(0, square)
    dtype: gl.constexpr = tiles.query.dtype
    for i in range(walk.num_chunks):
        crew.inputs.wait(i)
        stage = crew.inputs.stage(i)
        gates = tiles.gate_vectors(stage)
        # (3)
        P = gl.zeros([CHUNK, CHUNK], gl.float32, square)
        key = tiles.key_matrix(stage).permute((1, 0))
        P = warpgroup_mma(tiles.query_matrix(stage), key, P, use_acc=False, is_async=True)
        # e^{g_i - g_j}: above the diagonal it may be infinite, and `causal` selects
        G = exp2(gates.index(0).load(rows)[:, None] - gates.index(0).load(columns)[None, :])
        query_factor = gl.full([CHUNK], 1.0, gl.float32, rows) * scale
        if config.normalise:
            query_factor = query_factor * gates.index(3).load(rows)
            G = G * gates.index(2).load(columns)[None, :]
        G = G * query_factor[:, None]
        P = warpgroup_mma_wait(0, deps=(P,))
        crew.acquire_slot(i)
        tiles.attention.index(i % NUM_SLOTS).store(causal(P * G).to(dtype))
        tiles.factors.index(i % NUM_SLOTS).store(scan_factors(gates, scale, config))
        if scalar(gates.index(1), CHUNK - 1, rows) == 0.0:
            # Maybe a partial chunk. A value with beta = 0 counts for nothing: zeros for it, and so behind the end.
            value = tiles.value_matrix(stage)
            V = value.load(square)
            value.store(gl.where(gates.index(1).load(rows)[:, None] != 0.0, V, gl.zeros_like(V)))
        crew.publish_slot(i)


@gluon.jit
def scan_factors(gates, scale, config: gl.constexpr):
    """[4, 64]: gamma / n for U, scale gamma / n_q for Q S, e^{g_C - g} / n for V', gamma_C for S; norms where asked."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    g = gates.index(0).load(layout)
    total = scalar(gates.index(0), CHUNK - 1, layout)
    gamma = exp2(g)
    to_end = exp2(total - g)
    query_factor = gamma * scale
    if config.normalise:
        key_norm = gates.index(2).load(layout)
        query_factor = query_factor * gates.index(3).load(layout)
        gamma = gamma * key_norm
        to_end = to_end * key_norm
    # Joined, the last two dimensions count the vectors: the outer pair is the low bit, the inner the high bit.
    pairs = gl.join(gl.join(gamma, to_end), gl.join(query_factor, exp2(gl.zeros_like(g) + total)))
    return gl.reshape(gl.permute(pairs, (1, 2, 0)), [FACTORS, CHUNK])


@gluon.jit
def load_query_key_role(tiles, crew, walk, q_desc, k_desc, config: gl.constexpr):
    head = walk.head // config.value_heads_per_head
    for i in range(walk.num_chunks):
        full = crew.inputs.acquire(i)
        stage = crew.inputs.stage(i)
        coordinates = [walk.batch, walk.token(i), head, 0]
        if walk.tokens_left(i) < CHUNK:
            # Rows of Q behind the end only make rows of O that are not stored; rows of K would reach S.
            mbarrier.expect(crew.key_tail, k_desc.block_type.nbytes)
            tma_load(k_desc, coordinates, crew.key_tail, tiles.key.index(stage))
            mbarrier.wait(crew.key_tail, 0)
            zero_rows(tiles.key_matrix(stage), walk.tokens_left(i))
            fence_async_shared()
            barrier()
            mbarrier.expect(full, q_desc.block_type.nbytes)
            tma_load(q_desc, coordinates, full, tiles.query.index(stage))
        else:
            mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
            tma_load(k_desc, coordinates, full, tiles.key.index(stage))
            tma_load(q_desc, coordinates, full, tiles.query.index(stage))


@gluon.jit
def load_value_role(tiles, crew, walk, v_desc, config: gl.constexpr):
    for i in range(walk.num_chunks):
        full = crew.inputs.acquire(i)
        mbarrier.expect(full, v_desc.block_type.nbytes)
        coordinates = [walk.batch, walk.token(i), walk.head, walk.value_offset]
        tma_load(v_desc, coordinates, full, tiles.value.index(crew.inputs.stage(i)))


@gluon.jit
def load_inverse_role(tiles, crew, walk, inverse_desc, gates_desc, config: gl.constexpr):
    for i in range(walk.num_chunks):
        full = crew.inputs.acquire(i)
        stage = crew.inputs.stage(i)
        row = walk.slot_head(i, config.num_value_heads)
        mbarrier.expect(full, inverse_desc.block_type.nbytes + gates_desc.block_type.nbytes)
        tma_load(gates_desc, [row * GATE_ROWS, 0], full, tiles.gates.index(stage))
        tma_load(inverse_desc, [row * CHUNK, 0], full, tiles.gated_inverse.index(stage))


@gluon.jit
def store_role(tiles, crew, walk, o_desc, h_desc, output_pointer, config: gl.constexpr):
    for i in range(walk.num_chunks):
        if config.store_h:
            crew.state.wait(i)
            row = walk.slot_head(i, config.num_value_heads) * DIM
            tma_store(h_desc, [row, walk.value_offset], tiles.state)
            tma_store_wait(0)
            crew.state.release()
        crew.inputs.wait_released(i)
        if walk.tokens_left(i) < CHUNK:
            TOKEN_STRIDE: gl.constexpr = config.num_value_heads * DIM
            first = output_pointer + (i * CHUNK).to(gl.int64) * TOKEN_STRIDE
            store_rows(tiles.output_matrix(), first, TOKEN_STRIDE, walk.tokens_left(i))
        else:
            tma_store(o_desc, [walk.batch, walk.token(i), walk.head, walk.value_offset], tiles.output)
            tma_store_wait(0)
        crew.release_output()
