"""First kernel of the portable forward, in plain Triton: everything of a chunk that does not depend on the state.

Computes stages (1) to (3) of README.md, with the gated inverse, which stays finite for keys of any norm:

    (1) g = cumulative sum of the log decay
    (2) A = (I + StrictLower(beta_i e^(g_i - g_j) k_i . k_j))^-1
    (3) A_g = A * beta_j,  P_g = scale * e^(g_i - g_j) * q_i . k_j for i >= j

Programs: one per (slot of a chunk, value head), head fastest, so that value heads of one key head meet in cache;
flattened into grid.x. A slot of no chunk only zeroes its part of h.

Buffers (written here, read by `kernel_portable`): see Workspace.

Per program: find the chunk of the slot -> load g, beta -> load q, k in slices of channels: K K^T, Q K^T, norms ->
store decays, norms, P_g -> inverse -> store A_g. Rows past the end of a sequence are loaded as zeros (never multiplied
by zero), with g and beta 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilecrew.gated_delta_rule.kernel_gates import L2NORM_EPS, MINIMUM_LOG_DECAY, log_decay, write_strength
from tilecrew.gated_delta_rule.kernel_strides import offset_of


class Inputs(NamedTuple):
    """Pointers of ForwardArguments; None where absent."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any


class Strides(NamedTuple):
    """(batch, token, head) strides of q, k, v, g, beta, in elements."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class Workspace(NamedTuple):
    """Per slot and value head: A_g and P_g [slots, HV, C, C] in q's dtype; rows [slots, HV, 4, C] float32, which are
    gamma = e^g, e^(g_C - g), 1 / |q| and 1 / |k| (the norms only where use_qk_l2norm)."""

    A_g: Any
    P_g: Any
    rows: Any


class Config(NamedTuple):
    """Everything a binary is compiled for beside dtypes and which pointers are None."""

    H: int
    HV: int
    K: int
    V: int
    C: int
    BLOCK_K: int
    BLOCK_V: int
    BLOCK_SLICE: int
    V_FIRST: bool
    USE_L2NORM: bool
    USE_BETA_SIGMOID: bool
    ALLOW_NEG_EIGVAL: bool
    PRECISION: str
    NUM_STAGES: int


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def prepare_kernel(workspace, h, inputs, strides, cu_seqlens, scale, num_sequences, num_tokens, config: tl.constexpr):
    """Fills the workspace of one (slot, value head), and zeroes h where the slot has no chunk."""
    C: tl.constexpr = config.C
    head = tl.program_id(0) % config.HV
    slot = tl.program_id(0) // config.HV
    batch, first, num_rows = chunk_of_slot(slot, cu_seqlens, num_sequences, num_tokens, C)
    slot_head = slot.to(tl.int64) * config.HV + head
    if num_rows <= 0:
        if h is not None:
            zero_state(h, slot_head, config)
        return

    row = tl.arange(0, C)
    is_row = row < num_rows
    g = load_per_row(inputs.g, strides.g, batch, first, head, is_row, C)
    decay = tl.where(is_row, log_decay(g, head, inputs.A_log, inputs.dt_bias), 0.0)
    # Hard resets (tokens at the floor) are summed apart: multiples of the floor are exact, and the sum of the other
    # decays keeps the precision that a sum of hundreds would cost.
    is_reset = decay <= MINIMUM_LOG_DECAY
    g = tl.cumsum(tl.where(is_reset, 0.0, decay), 0)
    resets = tl.cumsum(tl.where(is_reset, MINIMUM_LOG_DECAY, 0.0), 0)
    beta = load_per_row(inputs.beta, strides.beta, batch, first, head, is_row, C)
    beta = tl.where(is_row, write_strength(beta, config.USE_BETA_SIGMOID, config.ALLOW_NEG_EIGVAL), 0.0)

    key_head = head // (config.HV // config.H)
    KK, QK, k_squares, q_squares = key_products(inputs, strides, batch, first, key_head, num_rows, config)
    rows = workspace.rows + slot_head * (4 * C) + row
    tl.store(rows, tl.exp(g + resets))
    to_end = (at_last(g, C) - g) + (at_last(resets, C) - resets)
    tl.store(rows + C, tl.exp(to_end))
    if config.USE_L2NORM:
        q_norm = tl.rsqrt(q_squares + L2NORM_EPS)
        k_norm = tl.rsqrt(k_squares + L2NORM_EPS)
        KK *= k_norm[:, None] * k_norm[None, :]
        QK *= q_norm[:, None] * k_norm[None, :]
        tl.store(rows + 2 * C, q_norm)
        tl.store(rows + 3 * C, k_norm)

    # G_ij = 1[i >= j] e^(g_i - g_j): the exponent is masked, because above the diagonal its exponential could be
    # infinite.
    is_past = row[:, None] >= row[None, :]
    between = (g[:, None] - g[None, :]) + (resets[:, None] - resets[None, :])
    G = tl.where(is_past, tl.exp(tl.where(is_past, between, 0.0)), 0.0)
    square = slot_head * (C * C) + row[:, None] * C + row[None, :]
    dtype = workspace.A_g.dtype.element_ty
    tl.store(workspace.P_g + square, tl.where(is_past, scale * G * QK, 0.0).to(dtype))
    A = unit_lower_inverse(tl.where(row[:, None] > row[None, :], beta[:, None] * G * KK, 0.0), config)
    tl.store(workspace.A_g + square, (A * beta[None, :]).to(dtype))


@triton.jit
def at_last(x, C: tl.constexpr):
    """x[C - 1]."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0))


@triton.jit
def key_products(inputs, strides, batch, first, key_head, num_rows, config: tl.constexpr):
    """K K^T and Q K^T [C, C], and the sums of squares of the rows of K and Q [C], in float32, in slices of BLOCK_SLICE
    channels."""
    C: tl.constexpr = config.C
    SLICE: tl.constexpr = config.BLOCK_SLICE
    KK = tl.zeros([C, C], tl.float32)
    QK = tl.zeros([C, C], tl.float32)
    k_squares = tl.zeros([C], tl.float32)
    q_squares = tl.zeros([C], tl.float32)
    for channel in range(0, config.BLOCK_K, SLICE):
        k = load_tile(inputs.k, strides.k, batch, first, key_head, num_rows, channel, C, SLICE, config.K)
        q = load_tile(inputs.q, strides.q, batch, first, key_head, num_rows, channel, C, SLICE, config.K)
        KK += tl.dot(k, tl.trans(k), input_precision=config.PRECISION)
        QK += tl.dot(q, tl.trans(k), input_precision=config.PRECISION)
        if config.USE_L2NORM:
            k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
            q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
    return KK, QK, k_squares, q_squares


@triton.jit
def unit_lower_inverse(N, config: tl.constexpr):
    """(I + N)^-1 of a strictly lower triangular N [C, C], in float32: diagonal blocks of 16 rows by substitution, then
    pairs of neighbouring blocks joined on tensor cores. A sum of powers of N would cancel catastrophically for equal
    keys.

    With P and R joined by L below the diagonal, [[P, 0], [L, R]]^-1 = [[P^-1, 0], [-R^-1 L P^-1, R^-1]].
    """
    C: tl.constexpr = config.C
    A = diagonal_inverses(N, C)
    if C == 32:
        A = joined_blocks(A, N, config)
    if C == 64:
        N_P, N_L, N_R = quarters(N, C)
        A_P, A_L, A_R = quarters(A, C)
        A_P = joined_blocks(A_P, N_P, config)
        A_R = joined_blocks(A_R, N_R, config)
        A_L = -tl.dot(A_R, tl.dot(N_L, A_P, input_precision=config.PRECISION), input_precision=config.PRECISION)
        A = from_quarters(A_P, A_L, A_R, C)
    return A


@triton.jit
def diagonal_inverses(N, C: tl.constexpr):
    """The inverses of the diagonal blocks of 16 rows of I + N, zeros elsewhere, by forward substitution in all blocks
    at once."""
    NUM_BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, NUM_BLOCKS)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(is_diagonal, tl.reshape(N, [NUM_BLOCKS, 16, NUM_BLOCKS, 16]), 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    inverse = tl.where(row == tl.arange(0, 16)[None, None, :], 1.0, 0.0) + tl.zeros([NUM_BLOCKS, 16, 16], tl.float32)
    for i in range(1, 16):
        # row i of the inverse = e_i - sum over j < i of N_ij (row j of the inverse)
        N_i = tl.sum(tl.where(row == i, blocks, 0.0), 1)
        inverse -= tl.where(row == i, tl.sum(N_i[:, :, None] * inverse, 1)[:, None, :], 0.0)
    return tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), [C, C])


@triton.jit
def joined_blocks(A, N, config: tl.constexpr):
    """The inverse of I + N [32, 32] from A, which has those of its two diagonal blocks."""
    half = tl.arange(0, 32) // 16
    L = tl.where((half[:, None] == 1) & (half[None, :] == 0), N, 0.0)
    return A - tl.dot(A, tl.dot(L, A, input_precision=config.PRECISION), input_precision=config.PRECISION)


@triton.jit
def quarters(x, C: tl.constexpr):
    """The upper left, lower left and lower right quarter of x [C, C]."""
    HALF: tl.constexpr = C // 2
    left, right = tl.split(tl.permute(tl.reshape(x, [2, HALF, 2, HALF]), 1, 3, 0, 2))
    upper_left, lower_left = tl.split(left)
    _, lower_right = tl.split(right)
    return upper_left, lower_left, lower_right


@triton.jit
def from_quarters(upper_left, lower_left, lower_right, C: tl.constexpr):
    """The inverse of `quarters` for a lower triangular matrix."""
    left = tl.join(upper_left, lower_left)
    right = tl.join(tl.zeros_like(upper_left), lower_right)
    return tl.reshape(tl.permute(tl.join(left, right), 2, 0, 3, 1), [C, C])


@triton.jit
def chunk_of_slot(slot, cu_seqlens, num_sequences, num_tokens, C: tl.constexpr):
    """(batch row, first token, number of tokens) of the chunk in a slot; the number is <= 0 for a slot of no chunk.

    Chunk c of the packed sequence n has the slot cu_seqlens[n] // C + n + c. The first slot of a sequence grows with
    n, so a binary search finds the sequence. C = 64, lengths 1, 100: first slots 0 and 0 + 1; slots 0, 1, 2 have the
    chunks (0, 0), (1, 0), (1, 1).
    """
    if cu_seqlens is None:
        num_chunks = (num_tokens + C - 1) // C
        first = (slot % num_chunks) * C
        return (slot // num_chunks).to(tl.int64), first.to(tl.int64), (num_tokens - first).to(tl.int64)
    else:
        low = num_sequences * 0
        high = num_sequences
        while high - low > 1:
            middle = (low + high) // 2
            is_before = tl.load(cu_seqlens + middle) // C + middle <= slot
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle)
        start = tl.load(cu_seqlens + low).to(tl.int64)
        end = tl.load(cu_seqlens + low + 1, mask=low < num_sequences, other=0).to(tl.int64)
        first = start + (slot - (start // C + low)) * C
        return tl.zeros([], tl.int64), first, end - first


@triton.jit
def load_per_row(x, stride, batch, first, head, is_row, C: tl.constexpr):
    """x[batch, first : first + C, head], zeros where not is_row."""
    row = tl.arange(0, C).to(tl.int64)
    return tl.load(x + offset_of(stride, batch, first, head) + row * stride[1], mask=is_row, other=0.0)


@triton.jit
def load_tile(
    x, stride, batch, first, head, num_rows, first_column, C: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """x[batch, first : first + C, head, first_column : first_column + BLOCK]; zeros from row num_rows and column SIZE
    on."""
    row = tl.arange(0, C)[:, None]
    column = first_column + tl.arange(0, BLOCK)[None, :]
    pointers = x + offset_of(stride, batch, first, head) + (row.to(tl.int64) * stride[1] + column)
    return tl.load(pointers, mask=(row < num_rows) & (column < SIZE), other=0.0)


@triton.jit
def scaled_rows(x, factor):
    """Rows of x times factor, in x's dtype."""
    return (x.to(tl.float32) * factor[:, None]).to(x.dtype)


@triton.jit
def zero_state(h, slot_head, config: tl.constexpr):
    """h[slot, head] = 0."""
    BLOCK_K: tl.constexpr = config.BLOCK_K
    BLOCK_V: tl.constexpr = config.BLOCK_V
    key = tl.arange(0, BLOCK_K)[:, None]
    for first_value in range(0, config.V, BLOCK_V):
        value = first_value + tl.arange(0, BLOCK_V)[None, :]
        pointers = h + slot_head * (config.K * config.V) + key * config.V + value
        zeros = tl.zeros([BLOCK_K, BLOCK_V], h.dtype.element_ty)
        tl.store(pointers, zeros, mask=(key < config.K) & (value < config.V))
