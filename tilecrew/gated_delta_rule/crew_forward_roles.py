"""Shared memory and hand-offs of kernel_forward_roles: what the roles of one CTA share. The tables are in that file."""

from tilecrew.device.compat import aggregate, gl, gluon, mbarrier
from tilecrew.device.handoff import Handoff, Signal
from tilecrew.device.mma import tile_layout
from tilecrew.device.ring import Ring
from tilecrew.device.tiles import matrix_view, vectors_view
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, GATE_ROWS


@aggregate
class Tiles:
    """Shared memory. query, key, value, inverse and gates have the stages of the ring; the others have one copy."""

    query: gl.shared_memory_descriptor
    key: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    inverse: gl.shared_memory_descriptor
    gates: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor
    residual: gl.shared_memory_descriptor
    value_delta: gl.shared_memory_descriptor
    state_delta: gl.shared_memory_descriptor
    output: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, query, key, value, inverse, gates, state, residual, value_delta, state_delta, output):
        self.query, self.key, self.value, self.inverse, self.gates = query, key, value, inverse, gates
        self.state, self.residual = state, residual
        self.value_delta, self.state_delta, self.output = value_delta, state_delta, output

    @gluon.jit
    def create(q_desc, k_desc, v_desc, inverse_desc, gates_desc, config: gl.constexpr):
        BV: gl.constexpr = config.block_v
        STAGES: gl.constexpr = config.num_stages
        dtype: gl.constexpr = q_desc.dtype
        matrix: gl.constexpr = tile_layout([CHUNK, BV], dtype)
        return Tiles(
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], q_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], k_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, BV], v_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], inverse_desc.layout),
            gl.allocate_shared_memory(gl.float32, [STAGES, GATE_ROWS, CHUNK], gates_desc.layout),
            gl.allocate_shared_memory(dtype, [DIM, BV], tile_layout([DIM, BV], dtype)),
            gl.allocate_shared_memory(dtype, [CHUNK, BV], matrix),
            gl.allocate_shared_memory(dtype, [CHUNK, BV], matrix),
            gl.allocate_shared_memory(dtype, [CHUNK, BV], matrix),
            gl.allocate_shared_memory(dtype, [1, CHUNK, 1, BV], v_desc.layout),
        )

    @gluon.jit
    def query_matrix(self, stage):
        return matrix_view(self.query.index(stage), CHUNK, DIM, tile_layout([CHUNK, DIM], self.query.dtype))

    @gluon.jit
    def key_matrix(self, stage):
        return matrix_view(self.key.index(stage), CHUNK, DIM, tile_layout([CHUNK, DIM], self.key.dtype))

    @gluon.jit
    def value_matrix(self, stage, BV: gl.constexpr):
        return matrix_view(self.value.index(stage), CHUNK, BV, tile_layout([CHUNK, BV], self.value.dtype))

    @gluon.jit
    def output_matrix(self, BV: gl.constexpr):
        return matrix_view(self.output, CHUNK, BV, tile_layout([CHUNK, BV], self.output.dtype))

    @gluon.jit
    def gate_vectors(self, stage):
        """Rows of the gates: 0 cumulative log2 decay, 1 beta, 2 and 3 the inverse norms of the keys and queries."""
        return vectors_view(self.gates.index(stage), GATE_ROWS, CHUNK)


@aggregate
class Crew:
    """The ring and the hand-offs by which the roles of one CTA work together (tables in kernel_forward_roles).

    key_tail: one arrival, used once: the keys of a partial chunk have landed.
    """

    inputs: Ring
    gated_inverse: Signal
    state: Handoff
    value_delta: Signal
    state_delta: Signal
    output: Handoff
    key_tail: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, inputs, gated_inverse, state, value_delta, state_delta, output, key_tail):
        self.inputs, self.gated_inverse, self.state = inputs, gated_inverse, state
        self.value_delta, self.state_delta, self.output = value_delta, state_delta, output
        self.key_tail = key_tail

    @gluon.jit
    def create(config: gl.constexpr):
        NUM_STAGES: gl.constexpr = config.num_stages
        NUM_LOAD_ROLES: gl.constexpr = 3  # query_key, value, inverse
        NUM_COMPUTE_ROLES: gl.constexpr = 3  # state, value, output
        NUM_STATE_READERS: gl.constexpr = 2 if config.store_h else 1  # output, and the store role for h
        key_tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(key_tail, count=1)
        return Crew(
            Ring.create(NUM_STAGES, NUM_LOAD_ROLES, NUM_COMPUTE_ROLES),
            Signal.create(),
            Handoff.create(NUM_STATE_READERS),
            Signal.create(),
            Signal.create(),
            Handoff.create(1),
            key_tail,
        )
