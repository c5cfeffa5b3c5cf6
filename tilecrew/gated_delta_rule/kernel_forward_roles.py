"""Chunked gated delta rule on Hopper: one CTA is a crew of roles that hand a chunk on through shared memory.

One CTA serves one piece of a sequence, one value head and one block of V, and walks the chunks in time. It keeps the
state S in registers; nothing but the outputs goes back to global memory. Stages A to F are explained in README.md.

Computes (equation numbers of README.md), per chunk, with A and the gates from kernel_prepare:
    A  the chunk's inputs are in shared memory
    B  S published; gamma = e^g; P = Q K^T; G_ij = 1[i >= j] e^{g_i - g_j}; A_g = G o A o beta_j          (3)
    C  U = K S; W = V - gamma o U; Q S; S <- gamma_C S                                                    (4) (6) (7)
    D  V_d = A_g W; P_g = scale G o P                                                                     (5) (3)
    E  V' = e^{g_C - g} o V_d; O = scale gamma o (Q S) + P_g V_d                                          (5) (6)
    F  S <- S + K^T V'; O handed to the store role                                                        (7)

Roles                 warps  registers  job
    state (default)     4      160      owns S; publishes a copy in the input dtype; decays it; S += K^T V'
    value               4      136      U, W, V_d, V'
    output              4      168      P, G, A_g, Q S, P_g, O
    load_query_key      1      48       TMA of Q and K
    load_value          1      48       TMA of V
    load_inverse        1      48       TMA of A and of the gates
    store               1      48       TMA of O and of S (the optional output h)

Ring            producers -> consumers                  full by            empty by  bytes x stages (V block 128)
    inputs      load_query_key, load_value,             3 arrivals + TMA   3 roles   57 KiB x 2
                load_inverse -> state, value, output

Hand-offs       producer -> consumers                   ready when written     free when
    state       state -> value, output (h: store)       S in the input dtype   output: Q S done (store: h stored);
                                                                               value: implied by state_delta
    gated_inverse   output -> value                     A_g over A, in place   the ring's empty
    state_delta     value -> state                      V'                     implied by the next state
    value_delta     value -> output                     V_d                    implied by the next gated_inverse
    output          output -> store                     O                      O stored

Timeline        [chunk i]
    load_*      wait inputs empty -> TMA of the chunk that comes num_stages later
    state       publish S | gamma_C S | wait state_delta -> S += K^T V'
    value       wait inputs, state -> U -> W | wait gated_inverse -> V_d -> V' out -> V_d out
    output      wait inputs -> P, G, A_g out | wait state -> Q S, P_g | wait value_delta -> O -> out
    store       (wait state -> h) | wait output -> O of chunk i, while the others compute chunk i + 1

A chunk that is not full is the last of its sequence. What follows belongs to a neighbour and may hold NaN: the load
role puts zeros over those rows of K (the product K^T V' would meet them, and NaN times 0 is NaN), the value role takes
zeros for values with beta = 0, which those are, and the store role writes the valid rows of O only. Norms of queries
and keys are factors of rows, so Q and K stay in shared memory as they came.
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
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilecrew.device.descriptors import matrix_descriptor, token_descriptor
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout, operand_layout
from tilecrew.device.tiles import exp2, opaque, scalar, store_rows, zero_rows
from tilecrew.device.trace import switch_scope
from tilecrew.gated_delta_rule import kernel_prepare
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.chunk_gates import gate_mask
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, GATE_ROWS
from tilecrew.gated_delta_rule.chunk_state import load_state, state_pointer, store_state
from tilecrew.gated_delta_rule.chunk_walk import ChunkWalk
from tilecrew.gated_delta_rule.crew_forward_roles import Crew, Tiles
from tilecrew.gated_delta_rule.kernel_prepare import Prepared
from tilecrew.gated_delta_rule.schedule import Schedule

VALUE_REGISTERS, OUTPUT_REGISTERS, COPY_REGISTERS = gl.constexpr(136), gl.constexpr(168), gl.constexpr(48)
# Threads x registers at entry, before the roles re-divide them: 16 warps x 32 x 128 = 65,536, all that an SM has.
ENTRY_REGISTERS = 128


class Pointers(NamedTuple):
    """Tensors that the kernel reads or writes by pointer; None where the config says that they are absent."""

    output: Any
    initial_state: Any
    final_state: Any
    cu_seqlens: Any
    pieces: Any


@dataclass(frozen=True)
class RolesConfig:
    """What the kernel is compiled for. Stages of the rings follow from the V block: what 227 KB hold."""

    num_value_heads: int
    value_heads_per_head: int
    block_v: int
    gate_inside_inverse: bool
    normalise: bool
    varlen: bool
    has_pieces: bool
    has_initial_state: bool
    store_final_state: bool
    store_h: bool
    state_v_first: bool

    @property
    def num_stages(self) -> int:
        return 2 if self.block_v == 128 else 3


def forward(arguments: ForwardArguments, schedule: Schedule) -> ForwardResult:
    """Outputs and states on the current stream: the prepare kernel, then the crew. See ForwardArguments for shapes."""
    prepared = kernel_prepare.allocate(arguments)
    result = allocate_result(arguments)
    kernel_prepare.launch(arguments, prepared, result.o).run()
    launch(arguments, prepared, result, schedule.block_v).run()
    return result


def allocate_result(arguments: ForwardArguments) -> ForwardResult:
    """Output tensors. Unused slots of h exist in packed batches only and are zeros."""
    q, v = arguments.q, arguments.v
    batch, num_value_heads, key_dim, value_dim = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
    state_shape = (value_dim, key_dim) if arguments.state_v_first else (key_dim, value_dim)
    h = None
    if arguments.output_h:
        new = v.new_empty if arguments.cu_seqlens is None else v.new_zeros
        h = new(batch, arguments.num_slots // batch, num_value_heads, key_dim, value_dim)
    final_state = None
    if arguments.output_final_state:
        final_state = v.new_empty(arguments.num_sequences, num_value_heads, *state_shape, dtype=torch.float32)
    return ForwardResult(o=v.new_empty(v.shape), final_state=final_state, h=h)


def launch(
    arguments: ForwardArguments,
    prepared: Prepared,
    result: ForwardResult,
    block_v: int,
    pieces: torch.Tensor | None = None,
) -> Launch:
    """The launch of this kernel.

    pieces: [P, 3] int32 rows (sequence, first chunk, chunk behind the last): sequences cut for context parallelism.
    Each piece starts from its own row of initial_state ([P, HV, K, V]); the piece that ends a sequence writes its
    final state.
    """
    q, v = arguments.q, arguments.v
    num_value_heads = v.shape[2]
    config = RolesConfig(
        num_value_heads=num_value_heads,
        value_heads_per_head=num_value_heads // q.shape[2],
        block_v=block_v,
        gate_inside_inverse=prepared.gate_inside_inverse,
        normalise=arguments.use_qk_l2norm,
        varlen=arguments.cu_seqlens is not None,
        has_pieces=pieces is not None,
        has_initial_state=arguments.initial_state is not None,
        store_final_state=result.final_state is not None,
        store_h=result.h is not None,
        state_v_first=arguments.state_v_first,
    )
    h = result.o if result.h is None else result.h
    args = (
        token_descriptor(q, 128),
        token_descriptor(arguments.k, 128),
        token_descriptor(v, block_v),
        matrix_descriptor(prepared.inverse, 64, 64),
        matrix_descriptor(prepared.gates, 4, 64),
        token_descriptor(result.o, block_v),
        matrix_descriptor(h, 128, block_v),
        Pointers(result.o, arguments.initial_state, result.final_state, arguments.cu_seqlens, pieces),
        arguments.scale,
        config,
    )
    num_pieces = arguments.num_sequences if pieces is None else pieces.shape[0]
    num_programs = num_pieces * num_value_heads * (128 // block_v)
    return Launch(forward_roles_kernel, num_programs, args, {"num_warps": 4, "maxnreg": ENTRY_REGISTERS})


@gluon.jit
def forward_roles_kernel(
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
    BV: gl.constexpr = config.block_v
    VALUE_STRIDE: gl.constexpr = DIM if config.state_v_first else 1  # of the states in global memory
    KEY_STRIDE: gl.constexpr = 1 if config.state_v_first else DIM
    num_tokens = opaque(q_desc.shape[1])
    walk = ChunkWalk.create(
        num_tokens,
        pointers.cu_seqlens,
        pointers.pieces,
        config.num_value_heads,
        DIM // BV,
        BV,
        config.varlen,
        config.has_pieces,
    )
    TOKEN_STRIDE: gl.constexpr = config.num_value_heads * DIM
    first_token = walk.batch.to(gl.int64) * num_tokens + walk.token_start
    output_pointer = pointers.output + first_token * TOKEN_STRIDE + walk.head * DIM + walk.value_offset
    tiles = Tiles.create(q_desc, k_desc, v_desc, inverse_desc, gates_desc, config)
    crew = Crew.create(config)
    # S is loaded and stored out here, where this warp group still has the registers of those that wait.
    S = gl.zeros([DIM, BV], gl.float32, accumulator_layout(BV))
    if config.has_initial_state:
        first = state_pointer(pointers.initial_state, walk.piece, walk, config)
        S = load_state(first, DIM, BV, VALUE_STRIDE, KEY_STRIDE)
    results = gl.warp_specialize(
        [
            (state_role, (tiles, crew, walk, S, config)),
            (value_role, (tiles, crew, walk, config)),
            (output_role, (tiles, crew, walk, scale, config)),
            (load_query_key_role, (tiles, crew, walk, q_desc, k_desc, config)),
            (load_value_role, (tiles, crew, walk, v_desc, config)),
            (load_inverse_role, (tiles, crew, walk, inverse_desc, gates_desc, config)),
            (store_role, (tiles, crew, walk, o_desc, h_desc, output_pointer, config)),
        ],
        [4, 4, 1, 1, 1, 1],
        [VALUE_REGISTERS, OUTPUT_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
    if config.store_final_state:
        if walk.ends_sequence == 1:
            first = state_pointer(pointers.final_state, walk.sequence, walk, config)
            store_state(results[0], first, VALUE_STRIDE, KEY_STRIDE)


@gluon.jit
def state_role(tiles, crew, walk, S, config: gl.constexpr):
    layout: gl.constexpr = S.type.layout
    dtype: gl.constexpr = tiles.state.dtype
    for i in range(walk.num_chunks):
        # B: publish S. The value role has read the one before, or V' of that chunk would not have come.
        switch_scope("state", None, "wait readers")
        crew.state.acquire(i)
        switch_scope("state", "wait readers", "S out")
        tiles.state.store(S.to(dtype))
        crew.state.publish()
        # C: S <- gamma_C S; behind the end of a sequence the cumulative gate stays: the last row is always gamma_C
        switch_scope("state", "S out", "wait inputs")
        crew.inputs.wait(i)
        switch_scope("state", "wait inputs", "gamma_C S")
        stage = crew.inputs.stage(i)
        log2_decay = tiles.gate_vectors(stage).index(0)
        S = S * exp2(scalar(log2_decay, CHUNK - 1, gl.SliceLayout(0, layout)))
        # F: S <- S + K^T V'   (7)
        switch_scope("state", "gamma_C S", "wait V'")
        crew.state_delta.wait(i)
        switch_scope("state", "wait V'", "S")
        S = warpgroup_mma(tiles.key_matrix(stage).permute((1, 0)), tiles.state_delta, S, is_async=True)
        S = warpgroup_mma_wait(0, deps=(S,))
        crew.inputs.release(i)
        switch_scope("state", "S", None)
    return (S,)


@gluon.jit
def value_role(tiles, crew, walk, config: gl.constexpr):
    BV: gl.constexpr = config.block_v
    layout: gl.constexpr = accumulator_layout(BV)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = tiles.state.dtype
    for i in range(walk.num_chunks):
        # A, B: gamma = e^g and e^{g_C - g}, while S is on its way
        switch_scope("value", None, "wait inputs")
        crew.inputs.wait(i)
        switch_scope("value", "wait inputs", "gamma")
        stage = crew.inputs.stage(i)
        gates = tiles.gate_vectors(stage)
        log2_decay = gates.index(0).load(row)
        gamma = exp2(log2_decay)
        to_end = exp2(scalar(gates.index(0), CHUNK - 1, row) - log2_decay)
        if config.normalise:  # K stays as it is in shared memory: its norms go where its rows end up
            key_norm = gates.index(2).load(row)
            gamma = gamma * key_norm
            to_end = to_end * key_norm
        value = tiles.value_matrix(stage, BV)
        if scalar(gates.index(1), CHUNK - 1, row) == 0.0:
            # Maybe a partial chunk. A value with beta = 0 counts for nothing: zeros for it, and so behind the end.
            V = value.load(layout)
            value.store(gl.where(gates.index(1).load(row)[:, None] != 0.0, V, gl.zeros_like(V)))
        # C: U = K S;  W = V - gamma o U   (4)
        switch_scope("value", "gamma", "wait S")
        crew.state.wait(i)
        switch_scope("value", "wait S", "U, W")
        U = gl.zeros([CHUNK, BV], gl.float32, layout)
        U = warpgroup_mma(tiles.key_matrix(stage), tiles.state, U, use_acc=False, is_async=True)
        V = value.load(layout).to(gl.float32)
        U = warpgroup_mma_wait(0, deps=(U,))
        tiles.residual.store((V - gamma[:, None] * U).to(dtype))
        fence_async_shared()
        barrier()
        # D: V_d = A_g W   (5)
        switch_scope("value", "U, W", "wait A_g")
        crew.gated_inverse.wait(i)
        switch_scope("value", "wait A_g", "V_d")
        V_d = gl.zeros([CHUNK, BV], gl.float32, layout)
        V_d = warpgroup_mma(tiles.inverse.index(stage), tiles.residual, V_d, use_acc=False, is_async=True)
        V_d = warpgroup_mma_wait(0, deps=(V_d,))
        switch_scope("value", "V_d", "V' out")
        # E: V' = e^{g_C - g} o V_d   (5), before V_d, because the state waits for it
        tiles.state_delta.store((V_d * to_end[:, None]).to(dtype))
        crew.state_delta.publish()
        switch_scope("value", "V' out", "V_d out")
        crew.inputs.release(i)
        if config.normalise:  # P_g has a column for every key
            V_d = V_d * key_norm[:, None]
        tiles.value_delta.store(V_d.to(dtype))
        crew.value_delta.publish()
        switch_scope("value", "V_d out", None)


@gluon.jit
def output_role(tiles, crew, walk, scale, config: gl.constexpr):
    BV: gl.constexpr = config.block_v
    square: gl.constexpr = accumulator_layout(CHUNK)
    layout: gl.constexpr = accumulator_layout(BV)
    dtype: gl.constexpr = tiles.state.dtype
    for i in range(walk.num_chunks):
        switch_scope("output", None, "wait inputs")
        crew.inputs.wait(i)
        switch_scope("output", "wait inputs", "P, A_g")
        stage = crew.inputs.stage(i)
        gates = tiles.gate_vectors(stage)
        query = tiles.query_matrix(stage)
        # B: P = Q K^T; meanwhile G, and A_g = G o A o beta_j in place   (3)
        P = gl.zeros([CHUNK, CHUNK], gl.float32, square)
        P = warpgroup_mma(query, tiles.key_matrix(stage).permute((1, 0)), P, use_acc=False, is_async=True)
        G = gate_mask(gates.index(0), square)
        beta = gates.index(1).load(gl.SliceLayout(0, square))
        A_g = tiles.inverse.index(stage).load(square).to(gl.float32) * beta[None, :]
        if not config.gate_inside_inverse:
            A_g = A_g * G
        tiles.inverse.index(stage).store(A_g.to(dtype))
        crew.gated_inverse.publish()
        gamma = exp2(gates.index(0).load(gl.SliceLayout(1, layout))) * scale
        row_scale = scale
        if config.normalise:  # P_g V_d needs the key norms too: the value role has put them on V_d
            gamma = gamma * gates.index(3).load(gl.SliceLayout(1, layout))
            row_scale = gates.index(3).load(gl.SliceLayout(1, square))[:, None] * scale
        P = warpgroup_mma_wait(0, deps=(P,))
        # C: Q S   (6); D: P_g = scale G o P   (3), while it runs where the registers hold P and O at once
        if BV == 128:
            P_g = gl.convert_layout((P * G * row_scale).to(dtype), operand_layout(layout, 0))
        switch_scope("output", "P, A_g", "wait S")
        crew.state.wait(i)
        switch_scope("output", "wait S", "Q S, P_g")
        O = gl.zeros([CHUNK, BV], gl.float32, layout)
        O = warpgroup_mma(query, tiles.state, O, use_acc=False, is_async=True)
        if BV < 128:
            P_g = gl.convert_layout((P * G * row_scale).to(dtype), operand_layout(layout, 0))
        O = warpgroup_mma_wait(0, deps=(O,))
        crew.state.release()
        crew.inputs.release(i)
        # E: O = scale gamma o (Q S) + P_g V_d   (6)
        O = O * gamma[:, None]
        switch_scope("output", "Q S, P_g", "wait V_d")
        crew.value_delta.wait(i)
        switch_scope("output", "wait V_d", "O")
        O = warpgroup_mma(P_g, tiles.value_delta, O, is_async=True)
        O = warpgroup_mma_wait(0, deps=(O,))
        # F: hand O on
        switch_scope("output", "O", "wait store")
        crew.output.acquire(i)
        switch_scope("output", "wait store", "O out")
        tiles.output_matrix(BV).store(O.to(dtype))
        crew.output.publish()
        switch_scope("output", "O out", None)


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
            load_tile(k_desc, coordinates, crew.key_tail, tiles.key.index(stage))
            mbarrier.wait(crew.key_tail, 0)
            zero_rows(tiles.key_matrix(stage), walk.tokens_left(i))
            fence_async_shared()
            barrier()
            load_tile(q_desc, coordinates, full, tiles.query.index(stage))
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
        stage = crew.inputs.stage(i)
        coordinates = [walk.batch, walk.token(i), walk.head, walk.value_offset]
        load_tile(v_desc, coordinates, full, tiles.value.index(stage))
        switch_scope("load_value", "issue", None)


@gluon.jit
def load_inverse_role(tiles, crew, walk, inverse_desc, gates_desc, config: gl.constexpr):
    for i in range(walk.num_chunks):
        switch_scope("load_inverse", None, "wait empty")
        full = crew.inputs.acquire(i)
        switch_scope("load_inverse", "wait empty", "issue")
        stage = crew.inputs.stage(i)
        row = walk.slot_head(i, config.num_value_heads)
        mbarrier.expect(full, inverse_desc.block_type.nbytes + gates_desc.block_type.nbytes)
        tma_load(gates_desc, [row * GATE_ROWS, 0], full, tiles.gates.index(stage))
        tma_load(inverse_desc, [row * CHUNK, 0], full, tiles.inverse.index(stage))
        switch_scope("load_inverse", "issue", None)


@gluon.jit
def load_tile(desc, coordinates, full, tile):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, coordinates, full, tile)


@gluon.jit
def store_role(tiles, crew, walk, o_desc, h_desc, output_pointer, config: gl.constexpr):
    BV: gl.constexpr = config.block_v
    for i in range(walk.num_chunks):
        if config.store_h:
            crew.state.wait(i)
            row = walk.slot_head(i, config.num_value_heads) * DIM
            tma_store(h_desc, [row, walk.value_offset], tiles.state)
            tma_store_wait(0)
            crew.state.release()
        switch_scope("store", None, "wait O")
        crew.output.wait(i)
        switch_scope("store", "wait O", "O")
        if walk.tokens_left(i) < CHUNK:
            TOKEN_STRIDE: gl.constexpr = config.num_value_heads * DIM
            first = output_pointer + (i * CHUNK).to(gl.int64) * TOKEN_STRIDE
            store_rows(tiles.output_matrix(BV), first, TOKEN_STRIDE, walk.tokens_left(i))
        else:
            tma_store(o_desc, [walk.batch, walk.token(i), walk.head, walk.value_offset], tiles.output)
            tma_store_wait(0)
        crew.output.release()
        switch_scope("store", "O", None)
