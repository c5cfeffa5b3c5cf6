"""Chunked gated delta rule on Hopper, with the state in registers from the first chunk to the last.

One CTA serves one piece of a sequence, one value head and 64 or 128 values, and walks the chunks in time. Its scan role
keeps the *transposed* state S^T [V, K] as the accumulator of MMAs of warp groups, each with 64 rows. Rows of S^T do not
depend on each other, and an accumulator becomes the left operand of the next MMA in registers: so S, U, W and V_d never
leave the scan role, and nothing in the chain from one chunk to the next waits for another warp. With 128 values two
warp groups work in step and share every tile. A_g, scale Q K^T and all factors come from kernel_prepare, the matrices
without their top right quarters: in shared memory these are zeros from the start, and no copy touches them
(chunk_blocks).

Computes (equation numbers of README.md), per chunk:
    attention   P_g = G o (scale Q K^T) (3), in the place where scale Q K^T landed
    scan        U^T = S^T K^T;  W^T = V^T - gamma o U^T (4);  V_d^T = W^T A_g^T (5)
                O^T = scale gamma o (S^T Q^T) + V_d^T P_g^T (6);  S^T <- gamma_C S^T + (e^{g_C - g} o V_d)^T K (7)

Roles                 64 values:            128 values:           job
                      warps   registers     warps   registers
    scan (default)      4       256           8       216         S, U, W, V_d, O
    attention           4       168           4        48         P_g of the chunks to come; zeros behind the end of V
    load_query_key      1        48           1        32         TMA of Q and K; zeros behind the end of K
    load_value          1        48           1        32         TMA of V
    load_prepared       1        48           1        32         TMA of A_g, scale Q K^T and the factors
    store               1        48           1        32         TMA of O and of S (the optional output h)

Beside kernel_prepare (64 values; chunk_flags) that makes P_g, on multiprocessors that the scan leaves alone. There is
no attention role then: load_prepared waits for the flag of a chunk and brings its P_g, load_value writes the zeros
behind the end of V.

Ring            producers -> consumers                       full by            empty by    bytes x stages
    inputs      load_query_key, load_value, load_prepared    3 arrivals + TMA   scan        57 KiB x 3
                -> attention, scan                                                          (128 values: 65 KiB x 3)

Hand-offs       producer -> consumers                        ready when written         free when
    gated       attention -> scan (a barrier a stage)        P_g, zeros in V            implied by inputs' empty
    flags       kernel_prepare -> load_prepared (beside)     all of the chunk           never: one for each chunk
    output      scan -> store                                O: told by inputs' empty   O stored
    state       scan -> store (h only, of 64 values)         S before the chunk         S stored

Timeline        [chunk i]
    load_*      wait inputs empty -> TMA of the chunk that comes num_stages later
    attention   wait inputs -> per half of 32 columns: P in, G, P_g out
    scan        wait inputs -> U | wait gated, V in, gamma_C S -> W -> V_d, Q S -> S, O | wait store -> O out
    store       (wait state -> h) | wait inputs empty -> O of chunk i, while the scan computes chunk i + 1

A chunk that is not full is the last of its sequence, and what follows may hold NaN: rows of K behind the end become
zeros as they land, values behind the end become zeros before the scan reads them, rows of O behind the end are not
stored; Q reaches only those rows.

ptxas keeps MMAs in flight, and their addresses in uniform registers, only where it sees that all threads of a warp come
by together, and it is easily put off: `ring.remainder` and the wait at the top of the attention role are there for its
sake. tests/gated_delta_rule/test_gluon_compile.py tells where it serialises MMAs.
"""

from dataclasses import dataclass, replace

import torch

from tilecrew._hardware import hardware_of
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
from tilecrew.device.tiles import exp2, opaque, scalar, store_rows, wait_for_kernel_before, zero_rows
from tilecrew.device.trace import switch_scope
from tilecrew.device.triangular import causal
from tilecrew.gated_delta_rule import kernel_prepare
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.chunk_blocks import NUM_BLOCKS, block_descriptor, clear_top_right, load_lower, matrix_of
from tilecrew.gated_delta_rule.chunk_flags import FIRST_FLAG, Placement, wait_until_prepared
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, FACTOR_ROWS
from tilecrew.gated_delta_rule.chunk_state import load_state, state_pointer, store_state
from tilecrew.gated_delta_rule.chunk_walk import ChunkWalk
from tilecrew.gated_delta_rule.crew_forward_scan import ScanCrew, ScanTiles
from tilecrew.gated_delta_rule.hopper_times import head_group
from tilecrew.gated_delta_rule.kernel_forward_roles import Pointers, allocate_result
from tilecrew.gated_delta_rule.kernel_prepare import Prepared
from tilecrew.gated_delta_rule.schedule import Schedule

NUM_STAGES = 3  # what 227 KB hold of them, with O, for either block of V, and with S for 64 values
HALF = gl.constexpr(CHUNK // 2)
# By block of V, registers of a thread. The scan role gets what is left of an SM's 65,536: with 128 values it needs
# 216, or ptxas serialises its MMAs: that of Triton 3.6 above 200, that of 3.9 above 208.
ATTENTION_REGISTERS = {64: 168, 128: 48}
COPY_REGISTERS = {64: 48, 128: 32}


@dataclass(frozen=True)
class ScanConfig:
    """What the kernel is compiled for; block_v is 64 or 128, registers are those of a thread."""

    num_value_heads: int
    value_heads_per_head: int
    normalise: bool
    varlen: bool
    has_pieces: bool
    beside_prepare: bool
    head_group: int
    has_initial_state: bool
    store_final_state: bool
    store_h: bool
    state_v_first: bool
    block_v: int
    num_stages: int
    attention_registers: int
    copy_registers: int


def forward(arguments: ForwardArguments, schedule: Schedule) -> ForwardResult:
    """Outputs and states on the current stream: the prepare kernel, then the scan. See ForwardArguments for shapes."""
    result = allocate_result(arguments)
    if schedule.prepare_programs:
        run_beside(arguments, schedule, result)
        return result
    prepared = kernel_prepare.run_gated(arguments, result.o)
    run_prepared(arguments, schedule, prepared, result)
    return result


def run_prepared(arguments: ForwardArguments, schedule: Schedule, prepared: Prepared, result: ForwardResult) -> None:
    """What follows kernel_prepare.run_gated: the scan, and the states before pieces (context_parallel) where the
    schedule cuts sequences into them."""
    pieces = None
    if schedule.chunks_per_piece:
        # Here, because importing its kernels takes a tenth of a second that most calls need not spend.
        from tilecrew.gated_delta_rule import context_parallel

        plan = context_parallel.plan(arguments, schedule.chunks_per_piece)
        pieces = context_parallel.table(arguments, plan)
        states = context_parallel.input_states(arguments, prepared, plan, pieces, arguments.history_tolerance)
        arguments = replace(arguments, initial_state=states)
    launch(arguments, prepared, result, schedule.block_v, pieces).run()


def run_beside(arguments: ForwardArguments, schedule: Schedule, result: ForwardResult) -> None:
    """The prepare kernel and the scan at the same time (chunk_flags)."""
    num_sms = hardware_of(arguments.q.device).num_sms
    num_ctas = arguments.num_sequences * arguments.v.shape[2] * (DIM.value // schedule.block_v)
    placement = Placement(schedule.prepare_programs, min(num_ctas, num_sms - 1), num_sms)
    prepared = kernel_prepare.allocate_beside(arguments)
    kernel_prepare.launch(arguments, prepared, result.o, placement).run()
    launch(arguments, prepared, result, schedule.block_v).run()


def launch(
    arguments: ForwardArguments,
    prepared: Prepared,
    result: ForwardResult,
    block_v: int,
    pieces: torch.Tensor | None = None,
) -> Launch:
    """The launch of this kernel; `pieces` as in kernel_forward_roles.launch."""
    q, v = arguments.q, arguments.v
    num_value_heads, beside_prepare = v.shape[2], prepared.attention is not None
    config = ScanConfig(
        num_value_heads=num_value_heads,
        value_heads_per_head=num_value_heads // q.shape[2],
        normalise=arguments.use_qk_l2norm,
        varlen=arguments.cu_seqlens is not None,
        has_pieces=pieces is not None,
        beside_prepare=beside_prepare,
        head_group=head_group(q.shape[2], num_value_heads),
        has_initial_state=arguments.initial_state is not None,
        store_final_state=result.final_state is not None,
        store_h=result.h is not None,
        state_v_first=arguments.state_v_first,
        block_v=block_v,
        num_stages=NUM_STAGES,
        attention_registers=ATTENTION_REGISTERS[block_v],
        copy_registers=COPY_REGISTERS[block_v],
    )
    h = result.o if result.h is None else result.h
    args = (
        token_descriptor(q, 128),
        token_descriptor(arguments.k, 128),
        token_descriptor(v, block_v),
        block_descriptor(prepared.inverse),
        block_descriptor(prepared.attention if beside_prepare else prepared.scores),
        matrix_descriptor(prepared.factors, 4, 64),
        token_descriptor(result.o, block_v),
        matrix_descriptor(h, 128, block_v),
        Pointers(result.o, arguments.initial_state, result.final_state, arguments.cu_seqlens, pieces),
        prepared.tickets,
        config,
    )
    num_pieces = arguments.num_sequences if pieces is None else pieces.shape[0]
    num_programs = num_pieces * num_value_heads * (v.shape[3] // block_v)
    scan_warps = block_v // 16
    other_warps = 4 if beside_prepare else 8
    entry_registers = 65_536 // (32 * (scan_warps + other_warps)) // 8 * 8  # before the roles re-divide them
    # It may start while the kernel before ends: the roles that read what that wrote wait for it.
    options = {"num_warps": scan_warps, "maxnreg": entry_registers, "launch_pdl": True}
    return Launch(forward_scan_kernel, num_programs, args, options)


@gluon.jit
def forward_scan_kernel(
    q_desc,
    k_desc,
    v_desc,
    inverse_desc,
    scores_desc,
    factors_desc,
    o_desc,
    h_desc,
    pointers,
    tickets,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    BLOCK_V: gl.constexpr = config.block_v
    num_tokens = opaque(q_desc.shape[1])
    walk = ChunkWalk.create(
        num_tokens,
        pointers.cu_seqlens,
        pointers.pieces,
        config.num_value_heads,
        DIM // BLOCK_V,
        BLOCK_V,
        config.varlen,
        config.has_pieces,
    )
    TOKEN_STRIDE: gl.constexpr = config.num_value_heads * DIM
    first_token = walk.batch.to(gl.int64) * num_tokens + walk.token_start
    output_pointer = pointers.output + first_token * TOKEN_STRIDE + walk.head * DIM + walk.value_offset
    tiles = ScanTiles.create((q_desc, k_desc, v_desc, factors_desc, o_desc, h_desc), config)
    clear_top_right(tiles.gated_inverse)
    clear_top_right(tiles.attention)
    fence_async_shared()
    barrier()
    crew = ScanCrew.create(config)
    VALUE_STRIDE: gl.constexpr = DIM if config.state_v_first else 1  # of the states in global memory
    KEY_STRIDE: gl.constexpr = 1 if config.state_v_first else DIM
    S = gl.zeros([BLOCK_V, DIM], gl.float32, accumulator_layout(DIM, num_warps))
    if config.has_initial_state:
        if not config.beside_prepare:  # else the kernel before did not make it, and has not ended
            wait_for_kernel_before()
        first = state_pointer(pointers.initial_state, walk.piece, walk, config)
        S = load_state(first, BLOCK_V, DIM, KEY_STRIDE, VALUE_STRIDE)
    COPY: gl.constexpr = config.copy_registers
    prepared_descs = (inverse_desc, scores_desc, factors_desc)
    # Roles twice: a list of functions must stand in the call.
    if config.beside_prepare:  # which makes P_g
        results = gl.warp_specialize(
            [
                (scan_role, (tiles, crew, walk, S, config)),
                (load_query_key_role, (tiles, crew, walk, q_desc, k_desc, config)),
                (load_value_role, (tiles, crew, walk, v_desc, config)),
                (load_prepared_role, (tiles, crew, walk, prepared_descs, tickets, config)),
                (store_role, (tiles, crew, walk, o_desc, h_desc, output_pointer, config)),
            ],
            [1, 1, 1, 1],
            [COPY, COPY, COPY, COPY],
        )
    else:
        results = gl.warp_specialize(
            [
                (scan_role, (tiles, crew, walk, S, config)),
                (attention_role, (tiles, crew, walk, config)),
                (load_query_key_role, (tiles, crew, walk, q_desc, k_desc, config)),
                (load_value_role, (tiles, crew, walk, v_desc, config)),
                (load_prepared_role, (tiles, crew, walk, prepared_descs, tickets, config)),
                (store_role, (tiles, crew, walk, o_desc, h_desc, output_pointer, config)),
            ],
            [4, 1, 1, 1, 1],
            [config.attention_registers, COPY, COPY, COPY, COPY],
        )
    if config.store_final_state:
        if walk.ends_sequence == 1:
            first = state_pointer(pointers.final_state, walk.sequence, walk, config)
            store_state(results[0], first, KEY_STRIDE, VALUE_STRIDE)


@gluon.jit
def scan_role(tiles, crew, walk, S, config: gl.constexpr):
    BLOCK_V: gl.constexpr = config.block_v
    wide: gl.constexpr = accumulator_layout(DIM, BLOCK_V // 16)  # of S^T [values, 128 keys]
    square: gl.constexpr = accumulator_layout(CHUNK, BLOCK_V // 16)  # of U^T, V_d^T, O^T [values, 64 tokens]
    tokens: gl.constexpr = gl.SliceLayout(0, square)
    dtype: gl.constexpr = tiles.query.dtype
    for i in range(walk.num_chunks):
        if config.store_h:
            crew.state.acquire(i)
            tiles.state.permute((1, 0)).store(S.to(dtype))
            crew.state.publish()
        switch_scope("scan", None, "wait inputs")
        crew.inputs.wait(i)
        switch_scope("scan", "wait inputs", "U")
        stage = crew.inputs.stage(i)
        key = tiles.key_matrix(stage)
        # (4)
        state = gl.convert_layout(S.to(dtype), operand_layout(square, 0))
        U = gl.zeros([BLOCK_V, CHUNK], gl.float32, square)
        U = warpgroup_mma(state, key.permute((1, 0)), U, use_acc=False, is_async=True)
        switch_scope("scan", "U", "wait P_g")
        if not config.beside_prepare:
            crew.wait_attention(i)
        switch_scope("scan", "wait P_g", "W")
        factors = tiles.factor_vectors(stage)
        V = tiles.value_matrix(stage).permute((1, 0)).load(square).to(gl.float32)
        gamma = factors.index(1).load(tokens)
        S = S * exp2(scalar(factors.index(0), CHUNK - 1, gl.SliceLayout(0, wide)))
        U = warpgroup_mma_wait(0, deps=(U,))
        W = gl.convert_layout((V - gamma[None, :] * U).to(dtype), operand_layout(square, 0))
        switch_scope("scan", "W", "V_d, Q S")
        # (5)
        V_d = gl.zeros([BLOCK_V, CHUNK], gl.float32, square)
        A_g = matrix_of(tiles.gated_inverse, stage).permute((1, 0))
        V_d = warpgroup_mma(W, A_g, V_d, use_acc=False, is_async=True)
        Q_S = gl.zeros([BLOCK_V, CHUNK], gl.float32, square)
        Q_S = warpgroup_mma(state, tiles.query_matrix(stage).permute((1, 0)), Q_S, use_acc=False, is_async=True)
        to_end = factors.index(3).load(tokens)
        V_d, W = warpgroup_mma_wait(1, deps=(V_d, W))
        switch_scope("scan", "V_d, Q S", "S, O")
        # (7), (6)
        delta = gl.convert_layout((V_d * to_end[None, :]).to(dtype), operand_layout(wide, 0))
        S = warpgroup_mma(delta, key, S, is_async=True)
        V_d = gl.convert_layout(V_d.to(dtype), operand_layout(square, 0))
        Q_S, state = warpgroup_mma_wait(1, deps=(Q_S, state))
        O = Q_S * factors.index(2).load(tokens)[None, :]
        P_g = matrix_of(tiles.attention, stage).permute((1, 0))
        O = warpgroup_mma(V_d, P_g, O, is_async=True)
        switch_scope("scan", "S, O", "wait store")
        crew.acquire_output(i)
        switch_scope("scan", "wait store", "S, O done")
        S, O, delta, V_d = warpgroup_mma_wait(0, deps=(S, O, delta, V_d))
        switch_scope("scan", "S, O done", "O out")
        tiles.output_matrix().permute((1, 0)).store(O.to(dtype))
        crew.finish_chunk(i)
        switch_scope("scan", "O out", None)
    return (S,)


@gluon.jit
def attention_role(tiles, crew, walk, config: gl.constexpr):
    half: gl.constexpr = accumulator_layout(HALF)  # of P [64 queries, 32 keys]: all 64 would take too many registers
    rows: gl.constexpr = gl.SliceLayout(1, half)
    columns: gl.constexpr = gl.SliceLayout(0, half)
    # Without a wait for an MMA in some other role, ptxas takes the scan role for divergent code and serialises its
    # MMAs.
    warpgroup_mma_wait(0, deps=(gl.zeros([CHUNK, 8], gl.float32, accumulator_layout(8)),))
    for i in range(walk.num_chunks):
        switch_scope("attention", None, "wait inputs")
        crew.inputs.wait(i)
        switch_scope("attention", "wait inputs", "P_g")
        stage = crew.inputs.stage(i)
        g = tiles.factor_vectors(stage).index(0)
        # (3)
        for first in gl.static_range(0, CHUNK, HALF):
            attention = matrix_of(tiles.attention, stage).slice(first, HALF, dim=1)
            P = attention.load(half).to(gl.float32)
            # e^{g_i - g_j}: above the diagonal it may be infinite, and `causal` selects
            G = exp2(g.load(rows)[:, None] - g.slice(first, HALF).load(columns)[None, :])
            attention.store(causal(P * G, first).to(attention.dtype))
        if walk.tokens_left(i) < CHUNK:
            # What follows belongs to a neighbour, and S would meet it: zero times NaN is NaN.
            value = tiles.value_matrix(stage)
            V = value.load(half)
            row = gl.arange(0, CHUNK, rows)[:, None]
            value.store(gl.where(row < walk.tokens_left(i), V, gl.zeros_like(V)))
        crew.publish_attention(i)
        switch_scope("attention", "P_g", None)


@gluon.jit
def load_query_key_role(tiles, crew, walk, q_desc, k_desc, config: gl.constexpr):
    head = walk.head // config.value_heads_per_head
    for i in range(walk.num_chunks):
        switch_scope("load_query_key", None, "wait empty")
        full = crew.inputs.acquire(i)
        switch_scope("load_query_key", "wait empty", "issue")
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
        switch_scope("load_query_key", "issue", None)


@gluon.jit
def load_value_role(tiles, crew, walk, v_desc, config: gl.constexpr):
    for i in range(walk.num_chunks):
        switch_scope("load_value", None, "wait empty")
        full = crew.inputs.acquire(i)
        switch_scope("load_value", "wait empty", "issue")
        coordinates = [walk.batch, walk.token(i), walk.head, walk.value_offset]
        value = tiles.value.index(crew.inputs.stage(i))
        if config.beside_prepare and walk.tokens_left(i) < CHUNK:
            # What follows belongs to a neighbour, and S would meet it: zero times NaN is NaN.
            mbarrier.expect(crew.value_tail, v_desc.block_type.nbytes)
            tma_load(v_desc, coordinates, crew.value_tail, value)
            mbarrier.wait(crew.value_tail, 0)
            zero_rows(tiles.value_matrix(crew.inputs.stage(i)), walk.tokens_left(i))
            barrier()
            mbarrier.arrive(full, count=1)
        else:
            mbarrier.expect(full, v_desc.block_type.nbytes)
            tma_load(v_desc, coordinates, full, value)
        switch_scope("load_value", "issue", None)


@gluon.jit
def load_prepared_role(tiles, crew, walk, descs, tickets, config: gl.constexpr):
    inverse_desc, scores_desc, factors_desc = descs
    # Of rows of Q K^T, scale Q K^T has one for a key head, P_g one for a value head.
    NUM_ROWS: gl.constexpr = config.num_value_heads // (1 if config.beside_prepare else config.value_heads_per_head)
    of_scores = walk.head // (config.num_value_heads // NUM_ROWS)
    NUM_GROUPS: gl.constexpr = config.num_value_heads // config.head_group
    group = walk.head // config.head_group
    if not config.beside_prepare:
        wait_for_kernel_before()
    for i in range(walk.num_chunks):
        if config.beside_prepare:  # in front of the other wait, which is longer as a rule
            wait_until_prepared(tickets + FIRST_FLAG + (walk.first_slot + i) * NUM_GROUPS + group)
        switch_scope("load_prepared", None, "wait empty")
        full = crew.inputs.acquire(i)
        switch_scope("load_prepared", "wait empty", "issue")
        stage = crew.inputs.stage(i)
        row = walk.slot_head(i, config.num_value_heads)
        LOWER_BYTES: gl.constexpr = NUM_BLOCKS * (inverse_desc.block_type.nbytes + scores_desc.block_type.nbytes)
        mbarrier.expect(full, LOWER_BYTES + factors_desc.block_type.nbytes)
        tma_load(factors_desc, [row * FACTOR_ROWS, 0], full, tiles.factors.index(stage))
        load_lower(inverse_desc, row, full, tiles.gated_inverse, stage)
        load_lower(scores_desc, (walk.first_slot + i) * NUM_ROWS + of_scores, full, tiles.attention, stage)
        switch_scope("load_prepared", "issue", None)
    if config.beside_prepare:  # who comes next finds all that the kernel before wrote
        wait_for_kernel_before()


@gluon.jit
def store_role(tiles, crew, walk, o_desc, h_desc, output_pointer, config: gl.constexpr):
    for i in range(walk.num_chunks):
        if config.store_h:
            crew.state.wait(i)
            row = walk.slot_head(i, config.num_value_heads) * DIM
            tma_store(h_desc, [row, walk.value_offset], tiles.state)
            tma_store_wait(0)
            crew.state.release()
        switch_scope("store", None, "wait O")
        crew.inputs.wait_released(i)
        switch_scope("store", "wait O", "O")
        if walk.tokens_left(i) >= CHUNK:
            tma_store(o_desc, [walk.batch, walk.token(i), walk.head, walk.value_offset], tiles.output)
            tma_store_wait(0)
            crew.release_output()
        switch_scope("store", "O", None)
    # Behind the loop, whose every turn would else have the registers of this.
    last = walk.num_chunks - 1
    if walk.tokens_left(last) < CHUNK:
        TOKEN_STRIDE: gl.constexpr = config.num_value_heads * DIM
        first = output_pointer + (last * CHUNK).to(gl.int64) * TOKEN_STRIDE
        store_rows(tiles.output_matrix(), first, TOKEN_STRIDE, walk.tokens_left(last))
