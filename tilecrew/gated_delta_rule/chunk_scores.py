"""Device code of stage (3): what kernel_prepare makes of Q K^T of one chunk, for the scan."""

from tilecrew.device.compat import barrier, fence_async_shared, gl, gluon
from tilecrew.device.mma import accumulator_layout
from tilecrew.device.tiles import exp2
from tilecrew.device.triangular import causal
from tilecrew.gated_delta_rule.chunk_blocks import allocate_matrices, matrix_of, store_lower
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK

HALF = gl.constexpr(CHUNK // 2)


@gluon.jit
def store_products(P, norms, log2_decay, desc, place, scale, config: gl.constexpr):
    """What the scan takes of P = Q K^T, of a chunk and group of value heads: scale Q K^T or, beside it, P_g.

    place: (length, value_head, slot). Returns what TMA reads in shared memory until the next `tma_store_wait(0)`.
    """
    length, value_head, slot = place
    NUM_VALUE_HEADS: gl.constexpr = config.num_heads * config.value_heads_per_head
    P = scaled_scores(P, norms, scale, length, config)
    NUM_TILES: gl.constexpr = config.head_group if config.beside_scan else 1
    tiles = allocate_matrices(NUM_TILES, desc.dtype)
    if config.beside_scan:
        store_attention(P, tiles, log2_decay, desc, slot * NUM_VALUE_HEADS + value_head, config)
    else:
        index = slot * config.num_heads + value_head // config.value_heads_per_head
        store_scores(P, tiles, desc, index, value_head % config.value_heads_per_head == 0)
    return tiles


@gluon.jit
def scaled_scores(P, norms, scale, length, config: gl.constexpr):
    """scale Q K^T, with norms in it, and zeros in the rows behind the end."""
    square: gl.constexpr = accumulator_layout(CHUNK)
    if config.normalise:
        P *= norms.index(1).load(gl.SliceLayout(1, square))[:, None] * scale
        P *= norms.index(0).load(gl.SliceLayout(0, square))[None, :]
    else:
        P *= scale
    if length < CHUNK:
        P = gl.where(gl.arange(0, CHUNK, gl.SliceLayout(1, square))[:, None] < length, P, 0.0)
    return P


@gluon.jit
def store_scores(P, scores, scores_desc, index, is_first):
    """scale Q K^T, rounded before the gates are put on: once for all value heads, by the key head's first program."""
    matrix_of(scores, 0).store(P.to(scores.dtype))
    fence_async_shared()
    barrier()
    if is_first:
        store_lower(scores_desc, index, scores, 0)


@gluon.jit
def store_attention(P, tiles, log2_decay, desc, first_row, config: gl.constexpr):
    """P_g = G o (scale Q K^T) (3) of every value head of the group, each in a tile of its own. Rounded before the gates
    are put on, too, so that the bits are those of the scan's attention role."""
    half: gl.constexpr = accumulator_layout(HALF)
    GROUP: gl.constexpr = config.head_group
    P = P.to(tiles.dtype).to(gl.float32)
    left, right = gl.split(gl.permute(gl.reshape(P, [CHUNK, 2, HALF]), (0, 2, 1)))
    left = gl.convert_layout(left, half, assert_trivial=True)
    right = gl.convert_layout(right, half, assert_trivial=True)
    for group_idx in gl.static_range(GROUP):
        g = log2_decay.index(group_idx)
        tile = matrix_of(tiles, group_idx)
        store_gated_half(left, g, tile, 0)
        store_gated_half(right, g, tile, HALF)
    fence_async_shared()
    barrier()
    for group_idx in gl.static_range(GROUP):
        store_lower(desc, first_row + group_idx, tiles, group_idx)


@gluon.jit
def store_gated_half(P, g, tile, FIRST_COLUMN: gl.constexpr):
    """P_g of 32 columns into their place in shared memory."""
    rows = g.load(gl.SliceLayout(1, P.type.layout))[:, None]
    columns = g.slice(FIRST_COLUMN, HALF).load(gl.SliceLayout(0, P.type.layout))[None, :]
    # e^{g_i - g_j}: above the diagonal it may be infinite, and `causal` selects
    gated = causal(P * exp2(rows - columns), FIRST_COLUMN)
    tile.slice(FIRST_COLUMN, HALF, dim=1).store(gated.to(tile.dtype))
