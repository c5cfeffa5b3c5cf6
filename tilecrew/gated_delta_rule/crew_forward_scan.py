"""Shared memory and hand-offs of kernel_forward_scan: what the roles of one CTA share. The tables are in that file."""

from tilecrew.device.compat import aggregate, barrier, fence_async_shared, gl, gluon, mbarrier
from tilecrew.device.handoff import Handoff
from tilecrew.device.mma import tile_layout
from tilecrew.device.ring import Ring
from tilecrew.device.tiles import matrix_view, vectors_view
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, GATE_ROWS

SCAN_VALUES = gl.constexpr(64)  # values of a CTA: the rows of one warp group's MMA
FACTORS = gl.constexpr(4)  # vectors of a chunk that the scan multiplies with, see ScanTiles.factor_vectors
NUM_SLOTS = gl.constexpr(2)  # of what the attention role makes ahead


@aggregate
class ScanTiles:
    """Shared memory.

    query, key, value, gated_inverse, gates     a stage each of the ring `inputs`
    attention, factors                          P_g, and [4, 64] factors: a slot each
    output                                      O
    state                                       S, where h is asked for
    """

    query: gl.shared_memory_descriptor
    key: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    gated_inverse: gl.shared_memory_descriptor
    gates: gl.shared_memory_descriptor
    attention: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    output: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, query, key, value, gated_inverse, gates, attention, factors, output, state):
        self.query, self.key, self.value = query, key, value
        self.gated_inverse, self.gates = gated_inverse, gates
        self.attention, self.factors = attention, factors
        self.output, self.state = output, state

    @gluon.jit
    def create(q_desc, k_desc, v_desc, inverse_desc, gates_desc, o_desc, h_desc, config: gl.constexpr):
        STAGES: gl.constexpr = config.num_stages
        dtype: gl.constexpr = q_desc.dtype
        output = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, SCAN_VALUES], o_desc.layout)
        state = output
        if config.store_h:
            state = gl.allocate_shared_memory(dtype, [DIM, SCAN_VALUES], h_desc.layout)
        return ScanTiles(
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], q_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], k_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, SCAN_VALUES], v_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], inverse_desc.layout),
            gl.allocate_shared_memory(gl.float32, [STAGES, GATE_ROWS, CHUNK], gates_desc.layout),
            gl.allocate_shared_memory(dtype, [NUM_SLOTS, CHUNK, CHUNK], tile_layout([CHUNK, CHUNK], dtype)),
            gl.allocate_shared_memory(
                gl.float32, [NUM_SLOTS, FACTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            ),
            output,
            state,
        )

    @gluon.jit
    def query_matrix(self, stage):
        return matrix_view(self.query.index(stage), CHUNK, DIM, tile_layout([CHUNK, DIM], self.query.dtype))

    @gluon.jit
    def key_matrix(self, stage):
        return matrix_view(self.key.index(stage), CHUNK, DIM, tile_layout([CHUNK, DIM], self.key.dtype))

    @gluon.jit
    def value_matrix(self, stage):
        layout: gl.constexpr = tile_layout([CHUNK, SCAN_VALUES], self.value.dtype)
        return matrix_view(self.value.index(stage), CHUNK, SCAN_VALUES, layout)

    @gluon.jit
    def gate_vectors(self, stage):
        """Rows of the gates: 0 cumulative log2 decay, 1 beta, 2 and 3 the inverse norms of the keys and queries."""
        return vectors_view(self.gates.index(stage), GATE_ROWS, CHUNK)

    @gluon.jit
    def factor_vectors(self, slot):
        """What multiplies 0 U, 1 Q S, 2 V_d on its way into S, 3 S (64 times the same)."""
        return vectors_view(self.factors.index(slot), FACTORS, CHUNK)

    @gluon.jit
    def output_matrix(self):
        layout: gl.constexpr = tile_layout([CHUNK, SCAN_VALUES], self.output.dtype)
        return matrix_view(self.output, CHUNK, SCAN_VALUES, layout)


@aggregate
class ScanCrew:
    """The ring and the hand-offs by which the roles of one CTA work together (tables in kernel_forward_scan).

    inputs        released by the scan role when it has finished the chunk, which also tells the store role that O is
                  written, and the attention role that the chunk's slot is free: one arrival for three purposes
    prepared      [slots]: P_g and the factors of a chunk are written; a slot has every second chunk
    output_free   O is stored
    state         S, for h
    key_tail      one arrival, used once: the keys of a partial chunk have landed
    """

    inputs: Ring
    prepared: gl.shared_memory_descriptor
    output_free: gl.shared_memory_descriptor
    state: Handoff
    key_tail: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, inputs, prepared, output_free, state, key_tail):
        self.inputs, self.prepared, self.output_free = inputs, prepared, output_free
        self.state, self.key_tail = state, key_tail

    @gluon.jit
    def create(config: gl.constexpr):
        NUM_LOAD_ROLES: gl.constexpr = 3  # load_query_key, load_value, load_inverse
        barriers = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS + 2, 1], mbarrier.MBarrierLayout())
        for index in gl.static_range(NUM_SLOTS + 2):
            mbarrier.init(barriers.index(index), count=1)
        return ScanCrew(
            Ring.create(config.num_stages, NUM_LOAD_ROLES, 1),
            barriers,
            barriers.index(NUM_SLOTS),
            Handoff.create(1),
            barriers.index(NUM_SLOTS + 1),
        )

    @gluon.jit
    def acquire_slot(self, step):
        """Attention role: waits until the scan role has finished the chunk that had the slot before."""
        before = gl.maximum(step - NUM_SLOTS, 0)
        self.inputs.wait_released(before, pred=step >= NUM_SLOTS)

    @gluon.jit
    def publish_slot(self, step):
        """Attention role: the chunk's slot is written, and its tiles are read."""
        fence_async_shared()
        barrier()
        mbarrier.arrive(self.prepared.index(step % NUM_SLOTS), count=1)

    @gluon.jit
    def wait_prepared(self, step):
        mbarrier.wait(self.prepared.index(step % NUM_SLOTS), (step // NUM_SLOTS) & 1)

    @gluon.jit
    def acquire_output(self, step):
        """Scan role: waits until O of the chunk before is stored."""
        mbarrier.wait(self.output_free, (step & 1) ^ 1, pred=step > 0)

    @gluon.jit
    def finish_chunk(self, step):
        """Scan role: O is written, and the chunk's tiles are read. Nothing for step -1."""
        fence_async_shared()
        barrier()
        stage = gl.maximum(step, 0) % self.inputs.num_stages
        mbarrier.arrive(self.inputs.empty.index(stage), count=1, pred=step >= 0)

    @gluon.jit
    def release_output(self):
        """Store role: O has left shared memory."""
        barrier()
        mbarrier.arrive(self.output_free, count=1)
