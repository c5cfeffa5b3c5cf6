"""Everything of a chunk that does not depend on the state: cumulative gates, norms, scores, and the inverse A.

Computes (equation numbers of README.md), per chunk of 64 tokens:
    (1)  g      log decay (from A_log and dt_bias where given), floored at -100, cumulative, in powers of two
         norms  1 / sqrt(sum of squares + 1e-6) of the rows of K and Q, where normalise
    (2)  A      (I + StrictLower(diag(beta) K K^T))^-1, or with the gates inside

Programs    one per slot (chunk), query/key head and group of up to 4 of its value heads, the last slots first; 4 warps,
            no roles
Buffers     for the roles: inverse [slots, HV, 64, 64] in the input dtype; gates [slots, HV, 4, 64] float32, rows:
            cumulative log2 decay, beta, inverse norms of the keys, of the queries (the last two only where normalise)
            for the scan: inverse [slots, HV, 3, 32, 32] in the input dtype, blocks as in chunk_blocks; factors
            [slots, HV, 4, 64] float32, rows in chunk_gates.store_factors; scores [slots, H, 3, 32, 32] in the input
            dtype: scale Q K^T, not masked, norms in it
Timeline    TMA of K (and Q), the gates meanwhile | K K^T (and Q Q^T, whose diagonals are the squares of norms), for the
            scan Q K^T too, once for all heads | per value head: 16x16 diagonal blocks inverted in registers, merged by
            MMA, stored by TMA under the next head's work

Precision. Unit keys and beta <= 2 bound every entry of A by 2 (|A_ij| <= beta_i |k_i| |k_j|, see README.md): the
operands of the inverse's merges are fp16 then. Keys of other sizes can make A as large as (beta |k|^2 - 1)^63; their
merges run in bf16, each operand split in two parts, and the gates go inside the inverse, which keeps A finite where
strong gates do. For the scan the gates are always inside, and a program whose keys are long finds that out itself.

Rows behind the end of a sequence: beta and norms are 0, the cumulative gate stays, A is the identity.
Rows of the output behind the last sequence (packed batches) are set to zero by the programs of the slots that cover
them.
"""

from dataclasses import dataclass

import torch

from tilecrew.device.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilecrew.device.descriptors import matrix_descriptor, token_descriptor
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout, tile_layout, vector_layout, warp_accumulator_layout
from tilecrew.device.tiles import exp2, let_next_kernel_start, matrix_view
from tilecrew.device.triangular import (
    invert_diagonal_blocks,
    left_and_middle,
    own_diagonal,
    own_lower_blocks,
    scale_columns,
)
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.chunk_blocks import (
    NUM_BLOCKS,
    allocate_matrices,
    block_descriptor,
    matrix_of,
    store_lower,
)
from tilecrew.gated_delta_rule.chunk_gates import inverse_norms, prepare_gates, store_factors, store_norms
from tilecrew.gated_delta_rule.chunk_inverse import (
    allocate_parts,
    join_columns,
    merge_blocks,
    merge_columns,
    store_parts,
)
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, FACTOR_ROWS, GATE_ROWS
from tilecrew.gated_delta_rule.chunk_walk import find_chunk

BLOCK = gl.constexpr(16)
# From here on a fifth program on every SM, at 96 registers, is worth what it spills; with fewer they are all resident.
MANY_PROGRAMS = 2000
# Bounds of beta |k|^2 and |k|^2 for merges in fp16.
LARGEST_WRITE, LARGEST_SQUARE = gl.constexpr(2.1), gl.constexpr(64.0)


@dataclass(frozen=True)
class PrepareConfig:
    """What the kernel is compiled for.

    head_group             value heads of one program, a power of two
    gate_inside_inverse    A_g / beta_j comes out, not A; for the scan A_g
    for_scan               writes what the scan kernel takes
    split                  merges in bf16 parts, for keys of any length; else in fp16, but for chunks with long keys
    """

    num_heads: int
    value_heads_per_head: int
    head_group: int
    normalise: bool
    gate_inside_inverse: bool
    split: bool
    for_scan: bool
    compute_gate: bool
    has_gate_bias: bool
    sigmoid_beta: bool
    beta_factor: float
    varlen: bool


@dataclass(frozen=True)
class Prepared:
    """What the kernel writes, see Buffers above. For the scan: A_g, factors and scores; else the inverse and gates.

    gate_inside_inverse    which inverse the roles kernel gets, see PrepareConfig
    """

    inverse: torch.Tensor
    gates: torch.Tensor | None = None
    gate_inside_inverse: bool = True
    factors: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def allocate(arguments: ForwardArguments) -> Prepared:
    """Workspace for the roles kernel: un-gated needs unit keys, which only the in-kernel norm guarantees."""
    slots, num_value_heads = arguments.num_slots, arguments.v.shape[2]
    return Prepared(
        inverse=arguments.v.new_empty(slots, num_value_heads, 64, 64),
        gates=arguments.v.new_empty(slots, num_value_heads, 4, 64, dtype=torch.float32),
        gate_inside_inverse=not arguments.use_qk_l2norm,
    )


def allocate_gated(arguments: ForwardArguments) -> Prepared:
    """Workspace for the scan kernel."""
    v = arguments.v
    slots, num_value_heads = arguments.num_slots, v.shape[2]
    return Prepared(
        inverse=v.new_empty(slots, num_value_heads, NUM_BLOCKS.value, 32, 32),
        factors=v.new_empty(slots, num_value_heads, 4, 64, dtype=torch.float32),
        scores=v.new_empty(slots, arguments.q.shape[2], NUM_BLOCKS.value, 32, 32),
    )


def run_gated(arguments: ForwardArguments, o: torch.Tensor) -> Prepared:
    """A_g, factors and scores on the current stream. o: as in `launch`."""
    prepared = allocate_gated(arguments)
    launch(arguments, prepared, o).run()
    return prepared


def launch(arguments: ForwardArguments, prepared: Prepared, o: torch.Tensor) -> Launch:
    """The launch of this kernel. o: the output, whose rows behind the last sequence become zeros."""
    q, k, g = arguments.q, arguments.k, arguments.g
    num_heads, num_value_heads = q.shape[2], arguments.v.shape[2]
    value_heads_per_head = num_value_heads // num_heads
    for_scan = prepared.scores is not None
    head_group = next(size for size in (4, 2, 1) if value_heads_per_head % size == 0)
    config = PrepareConfig(
        num_heads=num_heads,
        value_heads_per_head=value_heads_per_head,
        head_group=head_group,
        normalise=arguments.use_qk_l2norm,
        gate_inside_inverse=prepared.gate_inside_inverse,
        split=prepared.gate_inside_inverse and not for_scan,
        for_scan=for_scan,
        compute_gate=arguments.A_log is not None,
        has_gate_bias=arguments.dt_bias is not None,
        sigmoid_beta=arguments.use_beta_sigmoid,
        beta_factor=2.0 if arguments.allow_neg_eigval else 1.0,
        varlen=arguments.cu_seqlens is not None,
    )
    args = (
        token_descriptor(k, 128),
        token_descriptor(q, 128),
        block_descriptor(prepared.inverse) if for_scan else matrix_descriptor(prepared.inverse, 64, 64),
        block_descriptor(prepared.scores) if for_scan else None,
        (g, arguments.beta, arguments.A_log, arguments.dt_bias),
        (*g.stride(), *arguments.beta.stride()),
        (prepared.factors if for_scan else prepared.gates, o),
        arguments.cu_seqlens,
        arguments.num_sequences,
        arguments.scale,
        config,
    )
    num_programs = arguments.num_slots * (num_value_heads // head_group)
    options = {"num_warps": 4}
    if num_programs >= MANY_PROGRAMS:
        options["maxnreg"] = 96
    return Launch(prepare_kernel, num_programs, args, options)


@gluon.jit(do_not_specialize=["num_sequences"])
def prepare_kernel(
    k_desc,
    q_desc,
    inverse_desc,
    scores_desc,
    gate_tensors,
    gate_strides,
    outputs,
    cu_seqlens,
    num_sequences,
    scale,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    gates, o = outputs
    if config.for_scan:  # which is launched to start early
        let_next_kernel_start()
    NUM_GROUPS: gl.constexpr = config.num_heads * config.value_heads_per_head // config.head_group
    program = gl.program_id(0)
    # The last slots first: what is made last is in the L2 cache still when the scan begins, and that is first chunks.
    slot = (gl.num_programs(0) - 1 - program) // NUM_GROUPS
    value_head = (program % NUM_GROUPS) * config.head_group
    num_tokens = k_desc.shape[1]
    batch, token, length = find_chunk(slot, num_tokens, cu_seqlens, num_sequences, config.varlen)
    if config.varlen:
        zero_tail(o, slot, num_tokens, gl.load(cu_seqlens + num_sequences), value_head, config)
    if length > 0:
        prepare_chunk(
            (k_desc, q_desc, inverse_desc, scores_desc),
            gate_tensors,
            gate_strides,
            gates,
            (batch, token, length, value_head, slot),
            scale,
            config,
        )


@gluon.jit
def zero_tail(o, slot, num_tokens, first, value_head, config: gl.constexpr):
    """Zeros in the rows of this slot's 64 tokens that lie behind the last sequence, for this program's value heads."""
    COLUMNS: gl.constexpr = config.head_group * DIM
    LANES: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // min(LANES, 32), min(LANES, 32)], [4 // max(LANES // 32, 1), max(LANES // 32, 1)], [1, 0]
    )
    if (slot + 1) * CHUNK > first:
        row = slot * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        stride: gl.constexpr = config.num_heads * config.value_heads_per_head * DIM
        pointers = o + row.to(gl.int64)[:, None] * stride + (value_head * DIM + column)[None, :]
        zeros = gl.zeros([CHUNK, COLUMNS], o.dtype.element_ty, layout)
        gl.store(pointers, zeros, mask=((row >= first) & (row < num_tokens))[:, None])


@gluon.jit
def prepare_chunk(descs, gate_tensors, gate_strides, gates, place, scale, config: gl.constexpr):
    k_desc, q_desc, inverse_desc, scores_desc = descs
    batch, token, length, value_head, slot = place
    NUM_VALUE_HEADS: gl.constexpr = config.num_heads * config.value_heads_per_head
    LOAD_QUERY: gl.constexpr = config.normalise or config.for_scan
    head = value_head // config.value_heads_per_head
    dtype: gl.constexpr = k_desc.dtype
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    key = gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout)
    mbarrier.expect(landed, k_desc.block_type.nbytes * (2 if LOAD_QUERY else 1))
    tma_load(k_desc, [batch, token, head, 0], landed, key)
    matrix: gl.constexpr = tile_layout([CHUNK, DIM], dtype)
    query = key
    if LOAD_QUERY:
        query = gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout)
        tma_load(q_desc, [batch, token, head, 0], landed, query)
    # The head group's gates and betas: [group, 64]
    log2_decay = gl.allocate_shared_memory(gl.float32, [config.head_group, CHUNK], vector_layout())
    beta = gl.allocate_shared_memory(gl.float32, [config.head_group, CHUNK], vector_layout())
    ROWS: gl.constexpr = FACTOR_ROWS if config.for_scan else GATE_ROWS
    gates = gates + (slot * NUM_VALUE_HEADS + value_head).to(gl.int64) * (ROWS * CHUNK)
    prepare_gates(gate_tensors, gate_strides, (batch, token, length, value_head), (log2_decay, beta), gates, config)
    mbarrier.wait(landed, 0)
    key = matrix_view(key, CHUNK, DIM, matrix)
    query = matrix_view(query, CHUNK, DIM, matrix)
    # K K^T: stage (2) without beta and gates, where only what lies below the diagonal is of use. On the diagonals of
    # K K^T and Q Q^T are the squares of the norms.
    square: gl.constexpr = accumulator_layout(CHUNK)
    KK = gl.zeros([CHUNK, CHUNK], gl.float32, square)
    KK = warpgroup_mma(key, key.permute((1, 0)), KK, use_acc=False, is_async=True)
    norms = gl.allocate_shared_memory(gl.float32, [2, CHUNK], vector_layout())
    if config.normalise:
        QQ = gl.zeros([CHUNK, CHUNK], gl.float32, square)
        QQ = warpgroup_mma(query, query.permute((1, 0)), QQ, use_acc=False, is_async=True)
        KK, QQ = warpgroup_mma_wait(0, deps=(KK, QQ))
        barrier()
        norms.index(0).store(inverse_norms(own_diagonal(KK), length))
        norms.index(1).store(inverse_norms(own_diagonal(QQ), length))
    if config.for_scan:
        P = gl.zeros([CHUNK, CHUNK], gl.float32, square)
        P = warpgroup_mma(query, key.permute((1, 0)), P, use_acc=False, is_async=True)
    barrier()
    if config.for_scan:
        store_factors(log2_decay, norms, scale, gates, config)
    elif config.normalise:
        store_norms(norms, gates, config)
    if config.for_scan:
        P, KK = warpgroup_mma_wait(0, deps=(P, KK))
        # Every warp waits for its own rows of a product, and the products of others may still read keys and queries, in
        # whose place the compiler puts the tiles that follow. It takes the barrier above for enough.
        barrier()
        index = slot * config.num_heads + head
        is_first = value_head % config.value_heads_per_head == 0
        scores = allocate_matrices(1, dtype)
        store_scores(P, scores, norms, scale, length, scores_desc, index, is_first, config)
    elif not config.normalise:
        KK = warpgroup_mma_wait(0, deps=(KK,))
        barrier()
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, square))[:, None]
    if config.normalise:
        norm = norms.index(0)
        KK *= norm.load(gl.SliceLayout(1, square))[:, None]
        KK *= norm.load(gl.SliceLayout(0, square))[None, :]
    if length < CHUNK:
        KK = gl.where(rows < length, KK, 0.0)  # what follows may be NaN
    first_row = slot * NUM_VALUE_HEADS + value_head
    if config.for_scan and not config.normalise:
        norms.index(0).store(own_diagonal(KK))
        barrier()
        if has_long_keys(norms.index(0), beta, config):
            invert_heads(KK, log2_decay, beta, inverse_desc, first_row, True, config)
        else:
            invert_heads(KK, log2_decay, beta, inverse_desc, first_row, False, config)
    else:
        invert_heads(KK, log2_decay, beta, inverse_desc, first_row, config.split, config)
    landed._keep_alive()  # else the compiler gives its memory to others, see aot.overlaid_barriers
    if config.for_scan:
        # The compiler does not know that TMA reads the tile meanwhile, and would give its memory to others.
        scores._keep_alive()


@gluon.jit
def store_scores(P, scores, norms, scale, length, scores_desc, index, is_first, config: gl.constexpr):
    """scale Q K^T, rounded before the gates are put on: once for all value heads, by the key head's first program.

    scores: tile in shared memory, which TMA reads until the next `tma_store_wait(0)`.
    """
    square: gl.constexpr = accumulator_layout(CHUNK)
    if config.normalise:
        P *= norms.index(1).load(gl.SliceLayout(1, square))[:, None] * scale
        P *= norms.index(0).load(gl.SliceLayout(0, square))[None, :]
    else:
        P *= scale
    if length < CHUNK:
        P = gl.where(gl.arange(0, CHUNK, gl.SliceLayout(1, square))[:, None] < length, P, 0.0)
    matrix_of(scores, 0).store(P.to(scores.dtype))
    fence_async_shared()
    barrier()
    if is_first:
        store_lower(scores_desc, index, scores)


@gluon.jit
def has_long_keys(squares, beta, config: gl.constexpr):
    """1 where beta |k|^2 of a token passes 2.1, or |k|^2 64: the inverse in fp16 may overflow there (README.md)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    square = squares.load(layout)
    largest = gl.max(square, 0) / LARGEST_SQUARE
    GROUP: gl.constexpr = config.head_group
    for group_idx in gl.static_range(GROUP):
        largest = gl.maximum(largest, gl.max(square * beta.index(group_idx).load(layout), 0) / LARGEST_WRITE)
    return largest > 1.0


@gluon.jit
def store_gated(KK, g, beta, parts, FIRST_COLUMN: gl.constexpr, SPLIT: gl.constexpr):
    """-L of some columns into a tile of their own, with beta where SPLIT, from K K^T of these columns."""
    rows: gl.constexpr = gl.SliceLayout(1, KK.type.layout)
    COLUMNS: gl.constexpr = KK.shape[1]
    columns = g.slice(FIRST_COLUMN, COLUMNS).load(gl.SliceLayout(0, KK.type.layout))
    minus_L = -KK * exp2(g.load(rows)[:, None] - columns[None, :])
    if SPLIT:
        minus_L *= beta.load(rows)[:, None]
    store_parts(minus_L, parts, SPLIT)


@gluon.jit
def gated_blocks(KK_blocks, g):
    """The strictly lower parts of -L's blocks on the diagonal, [64, 16], without beta, from those of K K^T."""
    NUM_BLOCKS: gl.constexpr = CHUNK // BLOCK
    blocks = gl.reshape(KK_blocks, [NUM_BLOCKS, BLOCK, BLOCK])
    layout: gl.constexpr = blocks.type.layout
    tile = reinterpret(g, gl.float32, [NUM_BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rows = gl.expand_dims(tile.load(gl.SliceLayout(2, layout)), 2)
    columns = gl.expand_dims(tile.load(gl.SliceLayout(1, layout)), 1)
    # Above the diagonal the exponent may be large, and an infinite factor times the zeros there would be NaN.
    gated = gl.where(blocks == 0.0, 0.0, -blocks * exp2(rows - columns))
    return gl.convert_layout(gl.reshape(gated, [CHUNK, BLOCK]), warp_accumulator_layout(), assert_trivial=True)


@gluon.jit
def invert_heads(KK, log2_decay, beta, inverse_desc, first_row, SPLIT: gl.constexpr, config: gl.constexpr):
    """The inverse of every value head of the group, each stored by TMA while the next one is computed."""
    square: gl.constexpr = accumulator_layout(CHUNK)
    layout: gl.constexpr = warp_accumulator_layout()
    # Two tiles, as the compiler puts a barrier between stores into one. Nobody reads the last block column.
    L_left, L_middle = allocate_parts(CHUNK // 2, SPLIT), allocate_parts(BLOCK, SPLIT)
    D_parts = allocate_parts(BLOCK, SPLIT)
    # What is rounded to bfloat16 in the end, and merged in fp16, loses nothing by products of fp16 in its blocks.
    PRODUCTS: gl.constexpr = not SPLIT and inverse_desc.dtype == gl.bfloat16
    ones = gl.allocate_shared_memory(gl.float32, [CHUNK], vector_layout())
    if config.for_scan:
        blocks = allocate_matrices(1, inverse_desc.dtype)
        inverse = matrix_of(blocks, 0)
    else:
        inverse = gl.allocate_shared_memory(inverse_desc.dtype, [CHUNK, CHUNK], inverse_desc.layout)
        blocks = inverse
    if config.gate_inside_inverse:
        ones.store(gl.full([CHUNK], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    else:
        left, middle = left_and_middle(KK)
        store_parts(left, L_left, SPLIT)
        store_parts(middle, L_middle, SPLIT)
    KK_blocks = own_lower_blocks(KK)
    # The barrier in front of a head's TMA store also tells that every warp has read L and D.
    for group_idx in range(config.head_group):
        head_beta = beta.index(group_idx)
        beta_rows = head_beta.load(gl.SliceLayout(1, layout))[:, None]
        if config.gate_inside_inverse:
            g = log2_decay.index(group_idx)
            # Above the diagonal e^{g_i - g_j} may be infinite: nothing there is read, the blocks on it have zeros.
            left, middle = left_and_middle(KK)
            minus_L = gated_blocks(KK_blocks, g)
            store_gated(left, g, head_beta, L_left, 0, SPLIT)
            store_gated(middle, g, head_beta, L_middle, 32, SPLIT)
            if SPLIT:
                D = invert_diagonal_blocks(minus_L * beta_rows, False)
            else:
                # A_g beta_j comes out where the D beta_j go in, and L without beta.
                D = scale_columns(invert_diagonal_blocks(minus_L * beta_rows, PRODUCTS), beta_rows)
        else:
            D = invert_diagonal_blocks(KK_blocks * -beta_rows, PRODUCTS)
        store_parts(D, D_parts, SPLIT)
        tma_store_wait(0)
        barrier()  # L and D are there, and A of the head before has left shared memory
        if config.gate_inside_inverse and not SPLIT:
            X_0, X_1, X_2, X_3 = merge_columns(D, L_left[0], L_middle[0], D_parts[0])
            inverse.store(join_columns(X_0, X_1, X_2, X_3, square).to(inverse.dtype))
        elif config.gate_inside_inverse:
            merge_blocks(D, (L_left, L_middle), D_parts, ones, head_beta, inverse, -1.0, config.for_scan, SPLIT)
        else:
            merge_blocks(D, (L_left, L_middle), D_parts, head_beta, head_beta, inverse, 1.0, config.for_scan, SPLIT)
        fence_async_shared()
        barrier()
        if config.for_scan:
            store_lower(inverse_desc, first_row + group_idx, blocks)
        else:
            tma_store(inverse_desc, [(first_row + group_idx) * CHUNK, 0], inverse)
    tma_store_wait(0)
