"""The chunked forward in plain Triton, for every GPU that Triton compiles for: host side, and the second of its two
kernels.

Computes stages (4) to (7) of README.md, from A_g, P_g and the decays of `kernel_portable_prepare`, per chunk:

    (4) U = K S,  W = V - gamma * U          (5) V_d = A_g W,  V' = e^(g_C - g) * V_d
    (6) O = scale * gamma * (Q S) + P_g V_d  (7) S <- gamma_C S + K^T V'

Programs: one per (sequence, value head, block of V), block fastest, flattened into grid.x; with cu_seqlens one more
"sequence" of programs, which zeroes the output rows behind the last sequence. Columns of S never meet, so programs
share nothing, and each walks its sequence from chunk to chunk.

Buffers: S [K, BLOCK_V] stays in registers in float32 for the whole sequence; operands of products are rounded to q's
dtype.

Per chunk: store h -> load k, v, q, A_g, P_g, decays -> (4) -> (5) -> (6), store o -> (7). After the last: store the
final state.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.kernel_portable_prepare import (
    Config,
    Inputs,
    Strides,
    Workspace,
    load_tile,
    prepare_kernel,
    scaled_rows,
)
from tilecrew.gated_delta_rule.kernel_strides import leading_strides
from tilecrew.gated_delta_rule.schedule import Schedule


class States(NamedTuple):
    """Pointers to the initial and the final state [N, HV, K, V] ([N, HV, V, K]) in float32 and to h; None where
    absent."""

    initial: Any
    final: Any
    h: Any


def forward(arguments: ForwardArguments, schedule: Schedule) -> ForwardResult:
    """o, final state and h, see ForwardResult. No host synchronisation. K and V up to 256, float16, bfloat16 or
    float32."""
    result = empty_result(arguments)
    for launch in make_launches(arguments, schedule, result):
        launch.run()
    return result


def make_launches(arguments: ForwardArguments, schedule: Schedule, result: ForwardResult) -> list[Launch]:
    """The launches that fill the result, in order."""
    config, tuning = make_config(arguments, schedule)
    shared = (*_shared_arguments(arguments), config)
    num_slots, num_value_heads, chunk_size = arguments.num_slots, config.HV, config.C
    dtype, device = arguments.q.dtype, arguments.q.device
    square = (num_slots, num_value_heads, chunk_size, chunk_size)
    workspace = Workspace(
        A_g=torch.empty(square, dtype=dtype, device=device),
        P_g=torch.empty(square, dtype=dtype, device=device),
        rows=torch.empty(num_slots, num_value_heads, 4, chunk_size, dtype=torch.float32, device=device),
    )
    states = States(arguments.initial_state, result.final_state, result.h)
    has_tail = arguments.cu_seqlens is not None
    num_programs = (arguments.num_sequences + has_tail) * num_value_heads * -(-config.V // config.BLOCK_V)
    return [
        Launch(
            prepare_kernel,
            num_slots * num_value_heads,
            (workspace, result.h, *shared),
            {"num_warps": NUM_WARPS, "num_stages": 1},
        ),
        Launch(
            forward_kernel,
            num_programs,
            (result.o, workspace, states, *shared),
            {"num_warps": NUM_WARPS, "num_stages": tuning.num_stages},
        ),
    ]


@dataclass(frozen=True)
class Tuning:
    """The widest block of V, and how many chunks the forward kernel has in flight."""

    max_block_v: int
    num_stages: int


# Of both kernels. With eight and narrow tiles Triton 3.6 reads past its shared memory on sm_90 (memcheck shows it).
NUM_WARPS = 4

# (bytes of an element, BLOCK_K) -> Tuning, which keeps most of S and of the operands in registers (a float32 operand
# takes two, one per TF32 part). The schedule names narrower blocks where shared memory is small.
TUNING = {
    (2, 16): Tuning(64, 2),
    (2, 32): Tuning(64, 2),
    (2, 64): Tuning(64, 2),
    (2, 128): Tuning(64, 2),
    (2, 256): Tuning(64, 1),
    (4, 16): Tuning(32, 1),
    (4, 32): Tuning(32, 1),
    (4, 64): Tuning(32, 1),
    (4, 128): Tuning(16, 1),
    (4, 256): Tuning(16, 1),
}


def make_config(arguments: ForwardArguments, schedule: Schedule) -> tuple[Config, Tuning]:
    """What the kernels are compiled for, and how they are launched."""
    num_heads, key_dim = arguments.q.shape[2:]
    num_value_heads, value_dim = arguments.v.shape[2:]
    block_k = max(16, triton.next_power_of_2(key_dim))
    num_bytes = arguments.q.element_size()
    tuning = TUNING[num_bytes, block_k]
    block_v = min(schedule.block_v, tuning.max_block_v)
    config = Config(
        H=num_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        C=arguments.chunk_size,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        BLOCK_SLICE=min(block_k, 128 // num_bytes),
        V_FIRST=arguments.state_v_first,
        USE_L2NORM=arguments.use_qk_l2norm,
        USE_BETA_SIGMOID=arguments.use_beta_sigmoid,
        ALLOW_NEG_EIGVAL=arguments.allow_neg_eigval,
        PRECISION="ieee" if torch.version.hip is not None else "tf32x3",
        NUM_STAGES=tuning.num_stages,
    )
    return config, tuning


def _shared_arguments(arguments: ForwardArguments) -> tuple:
    """The arguments that both kernels take before their config."""
    inputs = Inputs(
        arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta, arguments.A_log, arguments.dt_bias
    )
    strides = Strides(*(leading_strides(x) for x in inputs[: len(Strides._fields)]))
    num_tokens = arguments.q.shape[1]
    return inputs, strides, arguments.cu_seqlens, float(arguments.scale), arguments.num_sequences, num_tokens


def empty_result(arguments: ForwardArguments) -> ForwardResult:
    """Uninitialised tensors for what the arguments ask for."""
    batch, _, num_value_heads, value_dim = arguments.v.shape
    key_dim, device = arguments.q.shape[-1], arguments.q.device
    final_state = h = None
    if arguments.output_final_state:
        tile = (value_dim, key_dim) if arguments.state_v_first else (key_dim, value_dim)
        shape = (arguments.num_sequences, num_value_heads, *tile)
        final_state = torch.empty(shape, dtype=torch.float32, device=device)
    if arguments.output_h:
        slots_per_row = arguments.num_slots // batch if batch else 0
        shape = (batch, slots_per_row, num_value_heads, key_dim, value_dim)
        h = torch.empty(shape, dtype=arguments.q.dtype, device=device)
    o = torch.empty(arguments.v.shape, dtype=arguments.q.dtype, device=device)
    return ForwardResult(o=o, final_state=final_state, h=h)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def forward_kernel(
    o, workspace, states, inputs, strides, cu_seqlens, scale, num_sequences, num_tokens, config: tl.constexpr
):
    """One sequence, value head and block of V: every chunk, then the final state."""
    C: tl.constexpr = config.C
    BLOCK_V: tl.constexpr = config.BLOCK_V
    NUM_V_BLOCKS: tl.constexpr = (config.V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    first_value = (program % NUM_V_BLOCKS) * BLOCK_V
    head = (program // NUM_V_BLOCKS) % config.HV
    sequence = (program // (NUM_V_BLOCKS * config.HV)).to(tl.int64)

    # rows of the flattened batch: batch_row + start ... batch_row + end
    if cu_seqlens is None:
        batch = sequence
        batch_row = sequence * num_tokens
        start = tl.zeros([], tl.int64)
        end = start + num_tokens
        first_slot = sequence * ((num_tokens + C - 1) // C)
    else:
        batch = tl.zeros([], tl.int64)
        batch_row = batch
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1, mask=sequence < num_sequences, other=num_tokens).to(tl.int64)
        first_slot = start // C + sequence
        if sequence == num_sequences:
            for first in range(start, end, C):
                zeros = tl.zeros([C, BLOCK_V], tl.float32)
                store_output(o, zeros, first, end - first, head, first_value, config)
            return

    S = load_state(states, sequence, head, first_value, config)
    num_chunks = (end - start + C - 1) // C
    for chunk in tl.range(0, num_chunks.to(tl.int32), num_stages=config.NUM_STAGES):
        first = start + chunk * C
        slot_head = (first_slot + chunk) * config.HV + head
        if states.h is not None:
            store_h(states.h, S, slot_head, first_value, config)
        S, O = chunk_step(
            S, workspace, inputs, strides, batch, first, end - first, slot_head, head, first_value, scale, config
        )
        store_output(o, O, batch_row + first, end - first, head, first_value, config)
    if states.final is not None:
        tile, exists = state_tile(sequence, head, first_value, config)
        tl.store(states.final + tile, S, mask=exists)


@triton.jit
def chunk_step(
    S, workspace, inputs, strides, batch, first, num_rows, slot_head, head, first_value, scale, config: tl.constexpr
):
    """One chunk: (next state [BLOCK_K, BLOCK_V], O [C, BLOCK_V]), both float32."""
    C: tl.constexpr = config.C
    PRECISION: tl.constexpr = config.PRECISION
    key_head = head // (config.HV // config.H)
    row = tl.arange(0, C)
    square = slot_head * (C * C) + row[:, None] * C + row[None, :]
    rows = workspace.rows + slot_head * (4 * C)
    k = load_tile(inputs.k, strides.k, batch, first, key_head, num_rows, 0, C, config.BLOCK_K, config.K)
    v = load_tile(inputs.v, strides.v, batch, first, head, num_rows, first_value, C, config.BLOCK_V, config.V)
    q = load_tile(inputs.q, strides.q, batch, first, key_head, num_rows, 0, C, config.BLOCK_K, config.K)
    gamma = tl.load(rows + row)[:, None]
    gamma_C = tl.load(rows + C - 1)
    decay_to_end = tl.load(rows + C + row)[:, None]
    if config.USE_L2NORM:
        q = scaled_rows(q, tl.load(rows + 2 * C + row))
        k = scaled_rows(k, tl.load(rows + 3 * C + row))
    S_rounded = S.to(k.dtype)

    # (4) W = V - gamma * (K S)
    W = v.to(tl.float32) - gamma * tl.dot(k, S_rounded, input_precision=PRECISION)
    # (5) V_d = A_g W
    V_d = tl.dot(tl.load(workspace.A_g + square), W.to(k.dtype), input_precision=PRECISION)
    # (6) O = scale * gamma * (Q S) + P_g V_d
    O = scale * gamma * tl.dot(q, S_rounded, input_precision=PRECISION)
    O += tl.dot(tl.load(workspace.P_g + square), V_d.to(k.dtype), input_precision=PRECISION)
    # (7) S <- gamma_C S + K^T V',  V' = e^(g_C - g) * V_d
    V_decayed = decay_to_end * V_d
    S = gamma_C * S + tl.dot(tl.trans(k), V_decayed.to(k.dtype), input_precision=PRECISION)
    return S, O


@triton.jit
def store_output(o, tile, first, num_rows, head, first_value, config: tl.constexpr):
    """o[first : first + C, head, block of V], rows below num_rows; o is contiguous, first counts rows of the whole
    batch."""
    row = tl.arange(0, config.C)[:, None]
    value = first_value + tl.arange(0, config.BLOCK_V)[None, :]
    pointers = o + (first * config.HV + head) * config.V + (row * (config.HV * config.V) + value)
    tl.store(pointers, tile.to(o.dtype.element_ty), mask=(row < num_rows) & (value < config.V))


@triton.jit
def state_tile(sequence, head, first_value, config: tl.constexpr):
    """Offsets of the tile [BLOCK_K, BLOCK_V] of a state in the caller's layout, and which elements exist."""
    key = tl.arange(0, config.BLOCK_K)[:, None]
    value = first_value + tl.arange(0, config.BLOCK_V)[None, :]
    if config.V_FIRST:
        offsets = value * config.K + key
    else:
        offsets = key * config.V + value
    return (sequence * config.HV + head) * (config.K * config.V) + offsets, (key < config.K) & (value < config.V)


@triton.jit
def load_state(states, sequence, head, first_value, config: tl.constexpr):
    """The initial state in float32, zeros without one."""
    BLOCK_K: tl.constexpr = config.BLOCK_K
    BLOCK_V: tl.constexpr = config.BLOCK_V
    if states.initial is None:
        return tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    else:
        tile, exists = state_tile(sequence, head, first_value, config)
        return tl.load(states.initial + tile, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_h(h, S, slot_head, first_value, config: tl.constexpr):
    """h[slot, head] = S in h's dtype; h has the layout [K, V] always."""
    key = tl.arange(0, config.BLOCK_K)[:, None]
    value = first_value + tl.arange(0, config.BLOCK_V)[None, :]
    pointers = h + slot_head * (config.K * config.V) + key * config.V + value
    tl.store(pointers, S.to(h.dtype.element_ty), mask=(key < config.K) & (value < config.V))
