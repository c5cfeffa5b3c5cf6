"""The state before every piece of a sequence, from what each piece does to it (kernel_states). Plain Triton.

Computes, for the pieces p of a sequence in order:
    S_in[first] = the initial state, or zeros;  S_in[p + 1] = h[p] + M[p] S_in[p]
transposed, as the pieces' ends are stored: S^T [values, K] times M^T from the right. Columns of S do not depend on each
other, so blocks of values are programs of their own; what is sequential is short: one product of [BLOCK_V, 128] and
[128, 128] a piece, of numbers that wait for it in shared memory.

Programs    (sequence, value head, block of values), the last the fastest: neighbours share M in the L2 cache
Precision   float32 by three products of TF32 parts (tf32x3); an M rounded once to TF32 would cost as much as all
            other roundings of the forward
Output      states [P, HV, K, V] float32 ([P, HV, V, K] where V comes first); rows of no piece stay unwritten

M of a first piece is not read without an initial state: nobody computes it.
"""

import torch
import triton
import triton.language as tl

from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.pieces import PiecePlan

DIM = 128  # K and V
BLOCK_V = 16
NUM_WARPS = 8
NUM_STAGES = 3


def allocate(arguments: ForwardArguments, plan: PiecePlan) -> torch.Tensor:
    """States before the pieces, in the layout of initial_state: K = V, so the shape says nothing of it."""
    v = arguments.v
    return v.new_empty(plan.num_rows, v.shape[2], DIM, DIM, dtype=torch.float32)


def launch(
    arguments: ForwardArguments,
    plan: PiecePlan,
    ends: torch.Tensor,
    states: torch.Tensor,
    block_v: int = BLOCK_V,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> Launch:
    """The launch of this kernel. ends: by kernel_states; states: the output."""
    num_value_heads = arguments.v.shape[2]
    args = (
        states,
        ends,
        arguments.initial_state,
        arguments.cu_seqlens,
        plan.rows_per_sequence or 1,
        plan.tokens_per_piece,
        num_value_heads,
        arguments.state_v_first,
        DIM,
        block_v,
        num_stages,
    )
    num_programs = plan.num_sequences * num_value_heads * (DIM // block_v)
    return Launch(combine_kernel, num_programs, args, {"num_warps": num_warps})


@triton.jit(do_not_specialize=["rows_per_sequence", "tokens_per_piece"])
def combine_kernel(
    states,
    ends,
    initial_state,
    cu_seqlens,
    rows_per_sequence,
    tokens_per_piece,
    HV: tl.constexpr,
    V_FIRST: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    NUM_BLOCKS: tl.constexpr = D // BLOCK
    program = tl.program_id(0)
    head = (program // NUM_BLOCKS) % HV
    sequence = program // (NUM_BLOCKS * HV)
    first_row = sequence * rows_per_sequence
    num_pieces = rows_per_sequence
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + sequence).to(tl.int32)
        length = tl.load(cu_seqlens + sequence + 1).to(tl.int32) - start
        first_row = start // tokens_per_piece + sequence
        num_pieces = tl.maximum((length + tokens_per_piece - 1) // tokens_per_piece, 1)
    value = (program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    key = tl.arange(0, D)
    transposed = value[:, None] * D + key[None, :]  # of S^T, h^T
    offsets = transposed if V_FIRST else key[None, :] * D + value[:, None]  # of the states in memory
    square = key[:, None] * D + key[None, :]  # of M^T
    STATE: tl.constexpr = D * D
    states += (first_row * HV + head).to(tl.int64) * STATE
    if initial_state is not None:
        S = tl.load(initial_state + (sequence * HV + head).to(tl.int64) * STATE + offsets)
    else:
        S = tl.zeros([BLOCK, D], tl.float32)
    tl.store(states + offsets, S)
    first = 0
    if initial_state is None:
        first = 1
        if num_pieces > 1:
            S = tl.load(ends + (first_row * HV + head).to(tl.int64) * (2 * STATE) + transposed)
            states += HV * STATE
            tl.store(states + offsets, S)
    for piece in tl.range(first, num_pieces - 1, num_stages=STAGES):
        end = ends + ((first_row + piece) * HV + head).to(tl.int64) * (2 * STATE)
        h = tl.load(end + transposed)
        M = tl.load(end + STATE + square)
        S = tl.dot(S, M, h, input_precision="tf32x3")
        states += HV * STATE
        tl.store(states + offsets, S)
