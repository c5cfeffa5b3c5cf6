"""Device code of stage (1) and of the gate mask of stage (3): decays, write strengths and norms of one chunk."""

from tilecrew.device.compat import gl, gluon, reinterpret
from tilecrew.device.tiles import LOG2_E, exp2
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, FACTOR_ROWS, GATE_ROWS

MINIMUM_LOG_DECAY = gl.constexpr(
    -100.0
)  # e^-100 is 0 in float32; a lower floor would cost the cumulative sum precision
NORM_EPSILON = gl.constexpr(1e-6)


@gluon.jit
def gate_mask(log2_decay, LAYOUT: gl.constexpr):
    """G_ij = 1[i >= j] e^{g_i - g_j}   (3), from the cumulative log2 decay in shared memory.

    The exponent is masked before the exponential, so that it is never positive.
    """
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
    rows = log2_decay.load(gl.SliceLayout(1, LAYOUT))[:, None]
    columns = log2_decay.load(gl.SliceLayout(0, LAYOUT))[None, :]
    return exp2(gl.where(row >= column, rows - columns, float("-inf")))


@gluon.jit
def softplus(x):
    """log(1 + e^x) without overflow."""
    return gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x)))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def load_gates(g_ptr, beta_ptr, strides, place, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """g and beta of a chunk and a group of heads as they are, [GROUP, 64] float32 each; 0 behind the chunk's end.

    Every line of memory is asked for once: each thread loads what a token has for all heads of the group, which is one
    access where heads are adjacent, and two warps load gates while the other two load betas.
    """
    batch, token, length, value_head = place
    layout: gl.constexpr = gl.BlockedLayout([GROUP, 1], [1, 32], [1, 4], [0, 1])
    index = gl.arange(0, 2 * CHUNK, gl.SliceLayout(0, layout))[None, :]
    position = index % CHUNK
    is_gate = index < CHUNK
    valid = position < length
    position64 = (token + position).to(gl.int64)
    head64 = (value_head + gl.arange(0, GROUP, gl.SliceLayout(1, layout))).to(gl.int64)[:, None]
    batch64 = batch.to(gl.int64)
    g_offset = batch64 * strides[0] + position64 * strides[1] + head64 * strides[2]
    beta_offset = batch64 * strides[3] + position64 * strides[4] + head64 * strides[5]
    g = gl.load(g_ptr + g_offset, mask=valid & is_gate, other=0.0).to(gl.float32)
    beta = gl.load(beta_ptr + beta_offset, mask=valid & (index >= CHUNK), other=0.0).to(gl.float32)
    both = gl.permute(gl.reshape(gl.where(is_gate, g, beta), [GROUP, 2, CHUNK]), (0, 2, 1))
    by_head: gl.constexpr = gl.BlockedLayout([1, 2, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    g, beta = gl.split(gl.convert_layout(both, by_head))
    return (
        gl.convert_layout(g, LAYOUT, assert_trivial=True),
        gl.convert_layout(beta, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def prepare_gates(tensors, strides, place, tiles, gates, config: gl.constexpr):
    """Cumulative log2 decay and beta of a group of value heads, into shared memory; for the roles kernel also into rows
    0 and 1 of `gates`.

    tensors: (g, beta, A_log, dt_bias) pointers; strides: of g, then of beta, over batch, token, head.
    place: (batch, token, length, value_head). Behind `length` tokens the decay stays and beta is 0.
    """
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr = tensors
    batch, token, length, value_head = place
    log2_decay_tile, beta_tile = tiles
    GROUP: gl.constexpr = config.head_group
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    g, beta = load_gates(g_ptr, beta_ptr, strides, place, GROUP, layout)
    head = value_head + gl.arange(0, GROUP, gl.SliceLayout(1, layout))
    position = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    valid = (position < length)[None, :]
    if config.compute_gate:
        if config.has_gate_bias:
            g += gl.load(dt_bias_ptr + head).to(gl.float32)[:, None]
        g = -gl.exp(gl.load(A_log_ptr + head).to(gl.float32))[:, None] * softplus(g)
    if config.sigmoid_beta:
        beta = config.beta_factor / (1.0 + gl.exp(-beta))
    g = gl.where(g < MINIMUM_LOG_DECAY, MINIMUM_LOG_DECAY, g) * LOG2_E  # a NaN stays one
    g = gl.where(valid, g, 0.0)
    beta = gl.where(valid, beta, 0.0)
    g = gl.associative_scan(g, 1, _add)
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpret(log2_decay_tile, gl.float32, [GROUP, CHUNK], matrix).store(g)
    reinterpret(beta_tile, gl.float32, [GROUP, CHUNK], matrix).store(beta)
    if not config.for_scan:
        row = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None] * (GATE_ROWS * CHUNK) + position[None, :]
        gl.store(gates + row, g)
        gl.store(gates + row + CHUNK, beta)


@gluon.jit
def inverse_norms(squares, length):
    """1 / sqrt(|row|^2 + 1e-6) from the squares of 64 rows, 0 behind `length` rows."""
    row = gl.arange(0, CHUNK, squares.type.layout)
    return gl.where(row < length, gl.rsqrt(squares + NORM_EPSILON), 0.0)


@gluon.jit
def store_norms(norms, gates, config: gl.constexpr):
    """Rows 2 (keys) and 3 (queries) of `gates` for every value head of the group."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    position = gl.arange(0, CHUNK, layout)
    key_norm = norms.index(0).load(layout)
    query_norm = norms.index(1).load(layout)
    GROUP: gl.constexpr = config.head_group
    for group_idx in gl.static_range(GROUP):
        gl.store(gates + (group_idx * GATE_ROWS + 2) * CHUNK + position, key_norm)
        gl.store(gates + (group_idx * GATE_ROWS + 3) * CHUNK + position, query_norm)


@gluon.jit
def store_factors(log2_decay, norms, scale, factors, config: gl.constexpr):
    """What the scan multiplies rows of a chunk with, for every value head of the group: the rows of `factors`.

    0  g, the cumulative log2 decay     1  gamma / n, of U             2  scale gamma / n_q, of Q S
    3  e^{g_C - g} / n, of V_d in V'    (n, n_q: norms of keys and queries where asked)
    """
    GROUP: gl.constexpr = config.head_group
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    position = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
    g = reinterpret(log2_decay, gl.float32, [GROUP, CHUNK], matrix).load(layout)
    total = gl.sum(gl.where(position == CHUNK - 1, g, 0.0), 1)[:, None]
    of_key = exp2(g)
    of_query = of_key * scale
    to_end = exp2(total - g)
    if config.normalise:
        key_norm = norms.index(0).load(gl.SliceLayout(0, layout))[None, :]
        of_key *= key_norm
        to_end *= key_norm
        of_query *= norms.index(1).load(gl.SliceLayout(0, layout))[None, :]
    head = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    first = factors + head * (FACTOR_ROWS * CHUNK) + position
    gl.store(first, g)
    gl.store(first + CHUNK, of_key)
    gl.store(first + 2 * CHUNK, of_query)
    gl.store(first + 3 * CHUNK, to_end)
