"""The sizes that the Hopper kernels are written for."""

from tilecrew.device.compat import gl

CHUNK = gl.constexpr(64)  # tokens of a chunk
DIM = gl.constexpr(128)  # K and V
FACTOR_ROWS = gl.constexpr(4)  # of `Prepared.factors`, see kernel_prepare
GATE_ROWS = gl.constexpr(4)  # of `Prepared.gates`: cumulative log2 decay, beta, inverse norms of keys and of queries
