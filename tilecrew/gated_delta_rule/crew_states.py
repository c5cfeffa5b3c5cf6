"""Shared memory of kernel_states: what the roles of one CTA share. The tables are in that file."""

from tilecrew.device.compat import aggregate, gl, gluon
from tilecrew.device.mma import tile_layout
from tilecrew.device.tiles import matrix_view, vectors_view
from tilecrew.gated_delta_rule.chunk_blocks import allocate_matrices
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, FACTOR_ROWS

HALF = gl.constexpr(64)  # rows of S^T that a scan role has: those of one warp group's MMA
NUM_HALVES = gl.constexpr(2)


@aggregate
class StatesTiles:
    """Shared memory, a stage each of the ring `inputs`.

    key, gated_inverse, factors   of the chunk
    value                         V, two tiles of 64 columns a stage: one for each scan role
    """

    key: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    gated_inverse: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, key, value, gated_inverse, factors):
        self.key, self.value = key, value
        self.gated_inverse, self.factors = gated_inverse, factors

    @gluon.jit
    def create(k_desc, v_desc, factors_desc, config: gl.constexpr):
        STAGES: gl.constexpr = config.num_stages
        dtype: gl.constexpr = k_desc.dtype
        return StatesTiles(
            gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, DIM], k_desc.layout),
            gl.allocate_shared_memory(dtype, [STAGES * NUM_HALVES, 1, CHUNK, 1, HALF], v_desc.layout),
            allocate_matrices(STAGES, dtype),
            gl.allocate_shared_memory(gl.float32, [STAGES, FACTOR_ROWS, CHUNK], factors_desc.layout),
        )

    @gluon.jit
    def key_matrix(self, stage):
        return matrix_view(self.key.index(stage), CHUNK, DIM, tile_layout([CHUNK, DIM], self.key.dtype))

    @gluon.jit
    def value_matrix(self, stage, half):
        layout: gl.constexpr = tile_layout([CHUNK, HALF], self.value.dtype)
        return matrix_view(self.value.index(stage * NUM_HALVES + half), CHUNK, HALF, layout)

    @gluon.jit
    def factor_vectors(self, stage):
        """0 cumulative log2 decay; what multiplies 1 U, 3 V_d on its way into S (2 is for outputs)."""
        return vectors_view(self.factors.index(stage), FACTOR_ROWS, CHUNK)

    @gluon.jit
    def clear_values(self, config: gl.constexpr):
        """V = 0 in every stage: what a transition has for values, and no copy overwrites."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        TILES: gl.constexpr = config.num_stages * NUM_HALVES
        for tile in gl.static_range(TILES):
            self.value_matrix(0, tile).store(gl.zeros([CHUNK, HALF], self.value.dtype, layout))
