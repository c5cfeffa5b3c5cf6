"""Everything of a chunk that does not depend on the state: cumulative gates, norms, scores, and the inverse A.

Computes (equation numbers of README.md), per chunk of 64 tokens:
    (1)  g      log decay (from A_log and dt_bias where given), floored at -100, cumulative, in powers of two
         norms  1 / sqrt(sum of squares + 1e-6) of the rows of K and Q, where normalise
    (2)  A      (I + StrictLower(diag(beta) K K^T))^-1, or with the gates inside
    (3)  P_g    G o (scale Q K^T), beside the scan only

Programs    one per slot (chunk), query/key head and group of up to 4 of its value heads, the last slots first; 4 warps,
            no roles. Beside the scan fewer, each of which makes one slot and group after the other, the first slots
            first, and raises a flag behind each (chunk_flags)
Buffers     for the roles: inverse [slots, HV, 64, 64] in the input dtype; gates [slots, HV, 4, 64] float32, rows:
            cumulative log2 decay, beta, inverse norms of the keys, of the queries (the last two only where normalise)
            for the scan: inverse [slots, HV, 3, 32, 32] in the input dtype, blocks as in chunk_blocks; factors
            [slots, HV, 4, 64] float32, rows in chunk_gates.store_factors; scores [slots, H, 3, 32, 32] in the input
            dtype: scale Q K^T, not masked, norms in it; beside the scan attention [slots, HV, 3, 32, 32] instead, P_g
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
from typing import Any, NamedTuple

import torch

from tilecrew.device.compat import (
    barrier,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilecrew.device.descriptors import matrix_descriptor, token_descriptor
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout, tile_layout, vector_layout
from tilecrew.device.tiles import let_next_kernel_start, matrix_view
from tilecrew.device.triangular import own_diagonal
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.chunk_blocks import NUM_BLOCKS, block_descriptor
from tilecrew.gated_delta_rule.chunk_flags import (
    FIRST_FLAG,
    NOT_BESIDE,
    Placement,
    allocate_tickets,
    first_item,
    publish,
)
from tilecrew.gated_delta_rule.chunk_gates import inverse_norms, prepare_gates, store_factors, store_norms
from tilecrew.gated_delta_rule.chunk_inverse import has_long_keys, invert_heads
from tilecrew.gated_delta_rule.chunk_scores import store_products
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK, DIM, FACTOR_ROWS, GATE_ROWS
from tilecrew.gated_delta_rule.chunk_walk import find_chunk
from tilecrew.gated_delta_rule.hopper_times import head_group

# From here on a fifth program on every SM, at 96 registers, is worth what it spills; with fewer they are all resident.
MANY_PROGRAMS = 2000


@dataclass(frozen=True)
class PrepareConfig:
    """What the kernel is compiled for.

    head_group             value heads of one program, a power of two
    gate_inside_inverse    A_g / beta_j comes out, not A; for the scan A_g
    for_scan               writes what the scan kernel takes
    beside_scan            writes it while the scan runs, with P_g for each value head instead of scores
    num_sms                of the GPU, where beside_scan
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
    beside_scan: bool
    num_sms: int


class PreparePointers(NamedTuple):
    """Tensors that the kernel reads or writes by pointer; None where the config says that they are absent. gates: what
    Buffers has as gates or factors."""

    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    gates: Any
    output: Any
    cu_seqlens: Any
    tickets: Any


@dataclass(frozen=True)
class Prepared:
    """What the kernel writes, see Buffers above. For the scan: A_g, factors and scores, or, beside it, attention and
    tickets (chunk_flags); else the inverse and gates.

    gate_inside_inverse    which inverse the roles kernel gets, see PrepareConfig
    """

    inverse: torch.Tensor
    gates: torch.Tensor | None = None
    gate_inside_inverse: bool = True
    factors: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    tickets: torch.Tensor | None = None


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
    inverse, scores = (_blocks(arguments, x.shape[2]) for x in (arguments.v, arguments.q))
    return Prepared(inverse, factors=_factors(arguments), scores=scores)


def allocate_beside(arguments: ForwardArguments) -> Prepared:
    """Workspace for the scan kernel that runs at the same time."""
    num_heads, num_value_heads = arguments.q.shape[2], arguments.v.shape[2]
    inverse, attention = (_blocks(arguments, num_value_heads) for _ in range(2))
    num_flags = arguments.num_slots * (num_value_heads // head_group(num_heads, num_value_heads))
    tickets = allocate_tickets(arguments.v, num_flags)
    return Prepared(inverse, factors=_factors(arguments), attention=attention, tickets=tickets)


def _blocks(arguments: ForwardArguments, num_heads: int) -> torch.Tensor:
    """A lower triangular matrix of each slot and head, see chunk_blocks."""
    return arguments.v.new_empty(arguments.num_slots, num_heads, NUM_BLOCKS.value, 32, 32)


def _factors(arguments: ForwardArguments) -> torch.Tensor:
    return arguments.v.new_empty(arguments.num_slots, arguments.v.shape[2], 4, 64, dtype=torch.float32)


def run_gated(arguments: ForwardArguments, o: torch.Tensor) -> Prepared:
    """A_g, factors and scores on the current stream. o: as in `launch`."""
    prepared = allocate_gated(arguments)
    launch(arguments, prepared, o).run()
    return prepared


def launch(
    arguments: ForwardArguments, prepared: Prepared, o: torch.Tensor, placement: Placement = NOT_BESIDE
) -> Launch:
    """The launch of this kernel. o: the output, whose rows behind the last sequence become zeros; placement: of its
    programs beside the scan, for `allocate_beside`."""
    q, k, g = arguments.q, arguments.k, arguments.g
    num_heads, num_value_heads = q.shape[2], arguments.v.shape[2]
    for_scan, beside_scan = prepared.factors is not None, prepared.attention is not None
    group = head_group(num_heads, num_value_heads)
    config = PrepareConfig(
        num_heads=num_heads,
        value_heads_per_head=num_value_heads // num_heads,
        head_group=group,
        normalise=arguments.use_qk_l2norm,
        gate_inside_inverse=prepared.gate_inside_inverse,
        split=prepared.gate_inside_inverse and not for_scan,
        for_scan=for_scan,
        compute_gate=arguments.A_log is not None,
        has_gate_bias=arguments.dt_bias is not None,
        sigmoid_beta=arguments.use_beta_sigmoid,
        beta_factor=2.0 if arguments.allow_neg_eigval else 1.0,
        varlen=arguments.cu_seqlens is not None,
        beside_scan=beside_scan,
        num_sms=placement.num_sms,
    )
    num_programs = arguments.num_slots * (num_value_heads // group)
    scores = prepared.attention if beside_scan else prepared.scores
    pointers = PreparePointers(
        g=g,
        beta=arguments.beta,
        A_log=arguments.A_log,
        dt_bias=arguments.dt_bias,
        gates=prepared.factors if for_scan else prepared.gates,
        output=o,
        cu_seqlens=arguments.cu_seqlens,
        tickets=prepared.tickets,
    )
    args = (
        token_descriptor(k, 128),
        token_descriptor(q, 128),
        block_descriptor(prepared.inverse) if for_scan else matrix_descriptor(prepared.inverse, 64, 64),
        block_descriptor(scores) if for_scan else None,
        pointers,
        (*g.stride(), *arguments.beta.stride()),
        arguments.num_sequences,
        arguments.scale,
        placement.num_staying,
        placement.num_scan_sms,
        config,
    )
    options = {"num_warps": 4}
    if beside_scan:
        num_programs = placement.num_programs
    elif num_programs >= MANY_PROGRAMS:
        options["maxnreg"] = 96
    return Launch(prepare_kernel, num_programs, args, options)


@gluon.jit(do_not_specialize=["num_sequences", "num_staying", "num_scan_sms"])
def prepare_kernel(
    k_desc,
    q_desc,
    inverse_desc,
    scores_desc,
    pointers,
    gate_strides,
    num_sequences,
    scale,
    num_staying,
    num_scan_sms,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    if config.for_scan:  # which is launched to start early
        let_next_kernel_start()
    descs = (k_desc, q_desc, inverse_desc, scores_desc)
    numbers = (gate_strides, num_sequences, scale)
    NUM_GROUPS: gl.constexpr = config.num_heads * config.value_heads_per_head // config.head_group
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    phase = gl.to_tensor(0)
    if config.beside_scan:
        barrier()  # the mbarrier is there
        num_items = inverse_desc.shape[0] // config.head_group
        item = first_item(pointers.tickets, num_staying, config.num_sms - num_scan_sms, num_items)
        while item < num_items:
            slot, group = item // NUM_GROUPS, item % NUM_GROUPS
            if not config.varlen:  # the first chunks of all sequences first
                slot = slot % num_sequences * gl.cdiv(k_desc.shape[1], CHUNK) + slot // num_sequences
            phase = prepare_slot(slot, group, descs, pointers, numbers, landed, phase, config)
            publish(pointers.tickets + FIRST_FLAG + slot * NUM_GROUPS + group)
            item += num_staying
    else:
        program = gl.program_id(0)
        # The last slots first: what is made last is in the L2 cache still when the scan begins, and that is first
        # chunks.
        slot = (gl.num_programs(0) - 1 - program) // NUM_GROUPS
        prepare_slot(slot, program % NUM_GROUPS, descs, pointers, numbers, landed, phase, config)
    landed._keep_alive()  # else the compiler gives its memory to others, see aot.overlaid_barriers


@gluon.jit
def prepare_slot(slot, group, descs, pointers, numbers, landed, phase, config: gl.constexpr):
    """-> the phase of `landed` that comes next."""
    gate_strides, num_sequences, scale = numbers
    value_head = group * config.head_group
    num_tokens = descs[0].shape[1]
    batch, token, length = find_chunk(slot, num_tokens, pointers.cu_seqlens, num_sequences, config.varlen)
    if config.varlen:
        end = gl.load(pointers.cu_seqlens + num_sequences)
        zero_tail(pointers.output, slot, num_tokens, end, value_head, config)
    if length > 0:
        place = (batch, token, length, value_head, slot)
        prepare_chunk(descs, pointers, gate_strides, place, scale, landed, phase, config)
        phase ^= 1
    return phase


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
def prepare_chunk(descs, pointers, gate_strides, place, scale, landed, phase, config: gl.constexpr):
    k_desc, q_desc, inverse_desc, scores_desc = descs
    batch, token, length, value_head, slot = place
    NUM_VALUE_HEADS: gl.constexpr = config.num_heads * config.value_heads_per_head
    LOAD_QUERY: gl.constexpr = config.normalise or config.for_scan
    head = value_head // config.value_heads_per_head
    dtype: gl.constexpr = k_desc.dtype
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
    gates = pointers.gates + (slot * NUM_VALUE_HEADS + value_head).to(gl.int64) * (ROWS * CHUNK)
    gate_tensors = (pointers.g, pointers.beta, pointers.A_log, pointers.dt_bias)
    prepare_gates(gate_tensors, gate_strides, (batch, token, length, value_head), (log2_decay, beta), gates, config)
    mbarrier.wait(landed, phase)
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
        scores = store_products(P, norms, log2_decay, scores_desc, (length, value_head, slot), scale, config)
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
    if config.for_scan:
        # The compiler does not know that TMA reads the tile meanwhile, and would give its memory to others.
        scores._keep_alive()
