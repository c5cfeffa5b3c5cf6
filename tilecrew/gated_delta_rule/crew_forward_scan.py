"""Shared memory and hand-offs of kernel_forward_scan: what the roles of one CTA share. The tables are in that file."""

from tilecrew.device.compat import aggregate, barrier, fence_async_shared, gl, gluon, mbarrier
from tilecrew.device.handoff import Handoff, Signal
from tilecrew.device.mma import tile_layout
from tilecrew.device.ring import Ring, quotient_parity, remainder
from tilecrew.device.tiles import matrix_view, vectors_view
from tilecrew.gated_delta_rule.chunk_blocks import allocate_matrices
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, FACTOR_ROWS


@aggregate
class ScanTiles:
    """Shared memory.

    query, key, value, gated_inverse, factors   a stage each of the ring `inputs`
    attention                                   the same; scale P lands there, and P_g takes its place, or lands itself
    output                                      O
    state                                       S, where h is asked for
    """

    query: gl.shared_memory_descriptor
    key: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    gated_inverse: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    attention: gl.shared_memory_descriptor
    output: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, query, key, value, gated_inverse, factors, attention, output, state):
        self.query, self.key, self.value = query, key, value
        self.gated_inverse, self.factors, self.attention = gated_inverse, factors, attention
        self.output, self.state = output, state

    @gluon.jit
    def create(descs, config: gl.constexpr):
        q_desc, k_desc, v_desc, factors_desc, o_desc, h_desc = descs
        STAGES: gl.constexpr = config.num_stages
        BLOCK_V: gl.constexpr = config.block_v
        dtype: gl.constexpr = q_desc.dtype
        output = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, BLOCK_V], o_desc.layout)
        state = output
        if config.store_h:
            state = gl.allocate_shared_memory(dtype, [DIM, BLOCK_V], h_desc.layout)
        return ScanTiles(
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], q_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], k_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, BLOCK_V], v_desc.layout),
            allocate_matrices(STAGES, dtype),
            gl.allocate_shared_memory(gl.float32, [STAGES, FACTOR_ROWS, CHUNK], factors_desc.layout),
            allocate_matrices(STAGES, dtype),
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
        BLOCK_V: gl.constexpr = self.value.shape[-1]
        layout: gl.constexpr = tile_layout([CHUNK, BLOCK_V], self.value.dtype)
        return matrix_view(self.value.index(stage), CHUNK, BLOCK_V, layout)

    @gluon.jit
    def factor_vectors(self, stage):
        """0 cumulative log2 decay; what multiplies 1 U, 2 Q S, 3 V_d on its way into S."""
        return vectors_view(self.factors.index(stage), FACTOR_ROWS, CHUNK)

    @gluon.jit
    def output_matrix(self):
        BLOCK_V: gl.constexpr = self.output.shape[-1]
        layout: gl.constexpr = tile_layout([CHUNK, BLOCK_V], self.output.dtype)
        return matrix_view(self.output, CHUNK, BLOCK_V, layout)


@aggregate
class ScanCrew:
    """The ring and the hand-offs by which the roles of one CTA work together (tables in kernel_forward_scan).

    inputs        released by the scan role when it has finished the chunk, which also tells the store role that O is
                  written: one arrival for two purposes
    gated         [stages]: P_g has taken the place of scale P, and values behind the end are zeros; not beside prepare
    output_free   O is stored
    state         S, for h
    key_tail      one arrival, used once: the keys of a partial chunk have landed
    value_tail    the same of its values, where the role that loads them writes zeros behind the end
    """

    inputs: Ring
    gated: gl.shared_memory_descriptor
    output_free: gl.shared_memory_descriptor
    state: Handoff
    key_tail: gl.shared_memory_descriptor
    value_tail: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, inputs, gated, output_free, state, key_tail, value_tail):
        self.inputs, self.gated, self.output_free = inputs, gated, output_free
        self.state, self.key_tail, self.value_tail = state, key_tail, value_tail

    @gluon.jit
    def create(config: gl.constexpr):
        NUM_LOAD_ROLES: gl.constexpr = 3  # load_query_key, load_value, load_prepared
        STAGES: gl.constexpr = config.num_stages
        # Each of its own: the compiler puts a barrier between two waits on what it takes for one piece of memory. What
        # nobody uses has none: they would lie where the compiler then puts something else.
        output_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        key_tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(output_free, count=1)
        mbarrier.init(key_tail, count=1)
        inputs = Ring.create(config.num_stages, NUM_LOAD_ROLES, 1)
        gated, value_tail = key_tail, key_tail
        if config.beside_prepare:
            value_tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(value_tail, count=1)
        else:
            gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for stage in gl.static_range(STAGES):
                mbarrier.init(gated.index(stage), count=1)
        state = Handoff(Signal(output_free), output_free)
        if config.store_h:
            state = Handoff.create(1)
        return ScanCrew(inputs, gated, output_free, state, key_tail, value_tail)

    @gluon.jit
    def publish_attention(self, step):
        """Attention role: P_g of the chunk is written."""
        fence_async_shared()
        barrier()
        mbarrier.arrive(self.gated.index(remainder(step, self.inputs.num_stages)), count=1)

    @gluon.jit
    def wait_attention(self, step):
        STAGES: gl.constexpr = self.inputs.num_stages
        mbarrier.wait(self.gated.index(remainder(step, STAGES)), quotient_parity(step, STAGES))

    @gluon.jit
    def acquire_output(self, step):
        """Scan role: waits until O of the chunk before is stored."""
        mbarrier.wait(self.output_free, (step & 1) ^ 1)

    @gluon.jit
    def finish_chunk(self, step):
        """Scan role: O is written, and the chunk's tiles are read."""
        fence_async_shared()
        self.inputs.release(step)

    @gluon.jit
    def release_output(self):
        """Store role: O has left shared memory."""
        barrier()
        mbarrier.arrive(self.output_free, count=1)
