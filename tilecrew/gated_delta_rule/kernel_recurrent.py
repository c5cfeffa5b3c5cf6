"""Decode in plain Triton: one or several tokens of every sequence, the state read once and written once.

Computes, per token, in float32:

    S <- e^(g + gk + gv) S;   u = beta (v - S^T k);   o = scale (S^T q + (k . q) u);   S <- S + k u^T

which is the recurrence with o = scale S^T q of the new S written out, so that both sums over K run over the same S at
once.

Programs: one per (sequence, value head, block of V), block fastest, flattened into grid.x; with cu_seqlens one more
"sequence" of programs, which zeroes the output rows behind the last sequence. Columns of S never meet, so programs
share nothing.

Buffers: the state tile stays in registers from its load to its store. Consecutive threads hold consecutive addresses,
16 bytes each: along V in the layout [K, V], along K in the layout [V, K].

Per program: row of the state (state_indices) -> load S -> per token: load q, k, v, gates; two sums; update; store o ->
store S. A padded sequence (negative index) loads nothing, stores zeros as outputs, and leaves the pool alone.

Where the GPU has programmatic dependent launch, programs take the places of those of the kernel before as these end,
and wait until all have: half a microsecond of each of a model's layers. Of few states each is asked into the L2 cache
before that wait, as a hint that is right whatever the kernel before still writes; nothing else is used that was read
in front of it (docs/notes/decode.md).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilecrew._hardware import hardware_of
from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule.kernel_gates import L2NORM_EPS, floored, log_decay, write_strength
from tilecrew.gated_delta_rule.kernel_strides import leading_strides, offset_of
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments

# States (of a head of a sequence) up to which they are prefetched. More of them fill the GPU, and the bandwidth of its
# memory, by themselves.
PREFETCHED_STATES: tl.constexpr = tl.constexpr(128)


class Tokens(NamedTuple):
    """Pointers to what is read per token or head; None where absent."""

    q: Any
    k: Any
    v: Any
    g: Any
    gk: Any
    gv: Any
    beta: Any
    A_log: Any
    dt_bias: Any


class Strides(NamedTuple):
    """(batch, token, head) strides of each tensor of Tokens, in elements."""

    q: Any
    k: Any
    v: Any
    g: Any
    gk: Any
    gv: Any
    beta: Any


class State(NamedTuple):
    """Where the state comes from and goes to: pointers (or None), and elements between their rows."""

    initial: Any
    final: Any
    indices: Any
    initial_stride: Any
    final_stride: Any


class Config(NamedTuple):
    """Everything a binary is compiled for beside dtypes and which pointers are None."""

    H: int
    HV: int
    K: int
    V: int
    BLOCK_K: int
    BLOCK_V: int
    ONE_TOKEN: bool
    INPLACE: bool
    V_FIRST: bool
    BETA_PER_VALUE: bool
    USE_L2NORM: bool
    USE_BETA_SIGMOID: bool
    ALLOW_NEG_EIGVAL: bool
    STARTS_EARLY: bool


def forward(arguments: RecurrentArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o [B, T, HV, V] in q's dtype, final state or None), see RecurrentArguments. No host synchronisation.

    K and V up to 256; float16, bfloat16 or float32 q, k, v. ValueError where inplace_state has no initial_state.
    """
    o = torch.empty(arguments.v.shape, dtype=arguments.q.dtype, device=arguments.q.device)
    final_state = _final_state(arguments)
    make_launch(arguments, o, final_state).run()
    return o, final_state


def make_launch(arguments: RecurrentArguments, o: torch.Tensor, final_state: torch.Tensor | None) -> Launch:
    """The launch that fills o and final_state."""
    config, num_warps = make_config(arguments)
    has_tail = arguments.cu_seqlens is not None
    num_programs = (arguments.num_sequences + has_tail) * config.HV * -(-config.V // config.BLOCK_V)
    args = (*_kernel_arguments(arguments, o, final_state), config)
    options = {"num_warps": num_warps, "num_stages": 1}
    if config.STARTS_EARLY:
        options["launch_pdl"] = True
    return Launch(recurrent_kernel, num_programs, args, options)


def make_config(arguments: RecurrentArguments) -> tuple[Config, int]:
    """What the kernel is compiled for, and its warps."""
    num_heads, key_dim = arguments.q.shape[2:]
    num_tokens, num_value_heads, value_dim = arguments.v.shape[1:]
    block_k = triton.next_power_of_2(key_dim)
    block_v, num_warps = pick_tile(block_k, value_dim, arguments.state_v_first)
    config = Config(
        H=num_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        ONE_TOKEN=arguments.cu_seqlens is None and num_tokens == 1,
        INPLACE=arguments.inplace_state,
        V_FIRST=arguments.state_v_first,
        BETA_PER_VALUE=arguments.beta is not None and arguments.beta.ndim == 4,
        USE_L2NORM=arguments.use_qk_l2norm,
        USE_BETA_SIGMOID=arguments.use_beta_sigmoid,
        ALLOW_NEG_EIGVAL=arguments.allow_neg_eigval,
        STARTS_EARLY=hardware_of(arguments.q.device).has_dependent_launch,
    )
    return config, num_warps


def pick_tile(block_k: int, value_dim: int, state_v_first: bool) -> tuple[int, int]:
    """A program's block of V and its warps: 64 floats of state a thread. The same for every number of sequences, so
    that one has the same bits in every batch.

    [K, V]: 32 values make 128 contiguous bytes of each row. Of 16 an SM would draw less, and of 64 one sequence of 32
    heads would not occupy a large GPU (docs/notes/decode.md).
    [V, K]: whole rows are contiguous whatever the block; sums over K stay within a warp up to K = 128.
    """
    block_v = min(16 if state_v_first else 32, triton.next_power_of_2(value_dim))
    return block_v, max(1, block_k * block_v // (32 * 64))


def _kernel_arguments(arguments: RecurrentArguments, o: torch.Tensor, final_state: torch.Tensor | None) -> tuple:
    """The arguments of recurrent_kernel up to its config."""
    initial_state = arguments.initial_state
    tokens = Tokens(
        arguments.q,
        arguments.k,
        arguments.v,
        arguments.g,
        arguments.gk,
        arguments.gv,
        arguments.beta,
        arguments.A_log,
        arguments.dt_bias,
    )
    state = State(
        initial=initial_state,
        final=final_state,
        indices=arguments.state_indices,
        initial_stride=0 if initial_state is None else initial_state.stride(0),
        final_stride=0 if final_state is None else final_state.stride(0),
    )
    strides = Strides(*(leading_strides(x) for x in tokens[: len(Strides._fields)]))
    return (
        o,
        tokens,
        strides,
        state,
        arguments.cu_seqlens,
        float(arguments.scale),
        arguments.num_sequences,
        arguments.q.shape[1],
        0 if initial_state is None else initial_state.shape[0],
    )


def _final_state(arguments: RecurrentArguments) -> torch.Tensor | None:
    if arguments.inplace_state:
        if arguments.initial_state is None:
            raise ValueError("inplace_state needs an initial_state to write the final state to")
        return arguments.initial_state
    if not arguments.output_final_state:
        return None
    dtype = torch.float32 if arguments.initial_state is None else arguments.initial_state.dtype
    return torch.empty(arguments.num_sequences, *arguments.state_shape, dtype=dtype, device=arguments.q.device)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "num_rows"])
def recurrent_kernel(
    o, tokens, strides, state, cu_seqlens, scale, num_sequences, num_tokens, num_rows, config: tl.constexpr
):
    BLOCK_V: tl.constexpr = config.BLOCK_V
    NUM_V_BLOCKS: tl.constexpr = (config.V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    if config.STARTS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if state.initial is not None:
            prefetch_state(state, program, num_sequences, num_rows, config)
        tl.extra.cuda.gdc_wait()
    head = (program // NUM_V_BLOCKS) % config.HV
    sequence = (program // (NUM_V_BLOCKS * config.HV)).to(tl.int64)
    first_value = (program % NUM_V_BLOCKS) * BLOCK_V

    row = sequence
    if state.indices is not None:
        row = tl.load(state.indices + sequence, mask=sequence < num_sequences, other=-1).to(tl.int64)
    is_live = (row >= 0) & (sequence < num_sequences)

    state_tile = load_state(state, row, head, first_value, is_live, config)

    if config.ONE_TOKEN:
        # Straight-line code: the loads of the token are in flight together with those of the state.
        state_tile, value = token_step(state_tile, tokens, strides, sequence, 0, head, first_value, scale, config)
        if state.indices is not None:
            state_tile = tl.where(is_live, state_tile, 0.0)
            value = tl.where(is_live, value, 0.0)
        store_output(o, value, sequence, head, first_value, config)
    else:
        if cu_seqlens is None:
            batch = sequence
            batch_row = sequence * num_tokens
            first = tl.zeros([], tl.int64)
            last = first + num_tokens
        else:
            batch = tl.zeros([], tl.int64)
            batch_row = batch
            first = tl.load(cu_seqlens + sequence).to(tl.int64)
            last = tl.load(cu_seqlens + sequence + 1, mask=sequence < num_sequences, other=num_tokens).to(tl.int64)
        live_end = tl.where(is_live, last, first)
        for token in range(first, live_end):
            state_tile, value = token_step(state_tile, tokens, strides, batch, token, head, first_value, scale, config)
            store_output(o, value, batch_row + token, head, first_value, config)
        for token in range(live_end, last):
            value = tl.zeros([BLOCK_V], tl.float32)
            store_output(o, value, batch_row + token, head, first_value, config)

    if state.final is not None:
        if config.INPLACE:
            store_state(state, state_tile, row, head, first_value, is_live, config)
        else:
            # The tile of padding is zeros.
            store_state(state, state_tile, sequence, head, first_value, sequence < num_sequences, config)


@triton.jit
def token_step(state_tile, tokens, strides, batch, token, head, first_value, scale, config: tl.constexpr):
    """One token: (next state, o [BLOCK_V] in float32)."""
    BLOCK_K: tl.constexpr = config.BLOCK_K
    key_head = head // (config.HV // config.H)
    q = load_row(tokens.q, strides.q, batch, token, key_head, 0, BLOCK_K, config.K)
    k = load_row(tokens.k, strides.k, batch, token, key_head, 0, BLOCK_K, config.K)
    v = load_row(tokens.v, strides.v, batch, token, head, first_value, config.BLOCK_V, config.V)
    if config.USE_L2NORM:
        q *= tl.rsqrt(tl.sum(q * q) + L2NORM_EPS)
        k *= tl.rsqrt(tl.sum(k * k) + L2NORM_EPS)

    if tokens.g is not None:
        g = tl.load(tokens.g + offset_of(strides.g, batch, token, head))
        state_tile *= tl.exp(log_decay(g, head, tokens.A_log, tokens.dt_bias))
    if tokens.gk is not None:
        gk = load_row(tokens.gk, strides.gk, batch, token, head, 0, BLOCK_K, config.K)
        state_tile *= along_k(tl.exp(floored(gk)), config)
    if tokens.gv is not None:
        gv = load_row(tokens.gv, strides.gv, batch, token, head, first_value, config.BLOCK_V, config.V)
        state_tile *= along_v(tl.exp(floored(gv)), config)

    # u = beta (v - S^T k)
    update = v - tl.sum(state_tile * along_k(k, config), axis=1 if config.V_FIRST else 0)
    if tokens.beta is not None:
        if config.BETA_PER_VALUE:
            beta = load_row(tokens.beta, strides.beta, batch, token, head, first_value, config.BLOCK_V, config.V)
        else:
            beta = tl.load(tokens.beta + offset_of(strides.beta, batch, token, head))
        update *= write_strength(beta, config.USE_BETA_SIGMOID, config.ALLOW_NEG_EIGVAL)
    # o = scale (S^T q + (k . q) u)
    read = tl.sum(state_tile * along_k(q, config), axis=1 if config.V_FIRST else 0)
    value = scale * (read + tl.sum(k * q) * update)
    # S <- S + k u^T
    state_tile += along_k(k, config) * along_v(update, config)
    return state_tile, value


@triton.jit
def along_k(x, config: tl.constexpr):
    """[BLOCK_K] as a factor of the state tile."""
    if config.V_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def along_v(x, config: tl.constexpr):
    """[BLOCK_V] as a factor of the state tile."""
    if config.V_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def load_row(x, stride, batch, token, head, first, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """x[batch, token, head, first : first + BLOCK] in float32, zeros past SIZE."""
    offsets = first + tl.arange(0, BLOCK)
    pointers = x + offset_of(stride, batch, token, head) + offsets
    if SIZE % BLOCK == 0:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=offsets < SIZE, other=0.0).to(tl.float32)


@triton.jit
def store_output(o, value, row, head, first_value, config: tl.constexpr):
    """Stores o[row, head, first_value : first_value + BLOCK_V]; o is contiguous, row (int64) counts tokens over the
    batch."""
    BLOCK_V: tl.constexpr = config.BLOCK_V
    offsets = first_value + tl.arange(0, BLOCK_V)
    pointers = o + (row * config.HV + head) * config.V + offsets
    tl.store(pointers, value.to(o.dtype.element_ty), mask=offsets < config.V)


@triton.jit
def state_offsets(head, first_value, config: tl.constexpr):
    """Elements between the start of a row of the state and this program's tile, and which of them exist."""
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    BLOCK_K: tl.constexpr = config.BLOCK_K
    BLOCK_V: tl.constexpr = config.BLOCK_V
    key = tl.arange(0, BLOCK_K)
    value = first_value + tl.arange(0, BLOCK_V)
    if config.V_FIRST:
        offsets = value[:, None] * K + key[None, :]
    else:
        offsets = key[:, None] * V + value[None, :]
    exists = along_k(key < K, config) & along_v(value < V, config)
    return head.to(tl.int64) * (K * V) + offsets, exists


@triton.jit
def load_state(state, row, head, first_value, is_live, config: tl.constexpr):
    """The tile of one row in float32; zeros where there is no initial state and for a row that is not live."""
    offsets, exists = state_offsets(head, first_value, config)
    if state.initial is None:
        return tl.zeros_like(offsets).to(tl.float32)
    else:
        pointers = state.initial + row * state.initial_stride + offsets
        return tl.load(pointers, mask=exists & is_live, other=0.0).to(tl.float32)


@triton.jit
def prefetch_state(state, program, num_sequences, num_rows, config: tl.constexpr):
    """Asks for the state with the number of this program, in the order of (sequence, head), to be brought into the L2
    cache; for none where there are many.

    Its row may be one that the kernel before is about to replace, so it is not kept, not even in the L1 cache, and has
    to be one of num_rows.
    """
    SIZE: tl.constexpr = config.K * config.V
    num_states = num_sequences * config.HV
    if (program < num_states) & (num_states <= PREFETCHED_STATES):
        row = program // config.HV
        if state.indices is not None:
            row = tl.load(state.indices + row, cache_modifier=".cg").to(tl.int32)
        if (row >= 0) & (row < num_rows):
            address = state.initial + row.to(tl.int64) * state.initial_stride + (program % config.HV) * SIZE
            # One thread asks for all of it. The instruction wants multiples of 16 bytes.
            PTX: tl.constexpr = (
                "{ .reg .pred first; .reg .b32 thread; .reg .b64 start; mov.u32 thread, %tid.x; "
                "setp.eq.u32 first, thread, 0; and.b64 start, $1, -16; "
                "@first cp.async.bulk.prefetch.L2.global [start], $2; mov.u32 $0, 0; }"
            )
            NUM_BYTES: tl.constexpr = SIZE * state.initial.dtype.element_ty.primitive_bitwidth // 8 // 16 * 16
            tl.inline_asm_elementwise(PTX, "=r,l,r", [address, NUM_BYTES], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_state(state, state_tile, row, head, first_value, is_live, config: tl.constexpr):
    offsets, exists = state_offsets(head, first_value, config)
    pointers = state.final + row * state.final_stride + offsets
    tl.store(pointers, state_tile.to(state.final.dtype.element_ty), mask=exists & is_live)
