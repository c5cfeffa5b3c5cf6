"""The table of pieces (pieces.py), written on the device: packed lengths are known there only. Plain Triton.

Programs    one per 128 rows of the table, a row a lane
Output      pieces [P, 3] int32, rows (sequence, first chunk, chunk behind the last), as ChunkWalk.create takes them.
            An unused row is (some sequence, -1, -1): no chunks, and the end of no sequence
"""

import torch
import triton
import triton.language as tl

from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.pieces import CHUNK_SIZE, PiecePlan

BLOCK = 128


def allocate(arguments: ForwardArguments, plan: PiecePlan) -> torch.Tensor:
    """The table [P, 3] int32, not yet written."""
    return torch.empty(plan.num_rows, 3, dtype=torch.int32, device=arguments.q.device)


def launch(arguments: ForwardArguments, plan: PiecePlan, table: torch.Tensor) -> Launch:
    """The launch of this kernel."""
    args = (
        table,
        arguments.cu_seqlens,
        plan.num_rows,
        plan.num_sequences,
        plan.num_tokens,
        plan.rows_per_sequence or 1,
        plan.chunks_per_piece,
        plan.num_sequences.bit_length(),
        CHUNK_SIZE,
        BLOCK,
    )
    return Launch(pieces_kernel, triton.cdiv(plan.num_rows, BLOCK), args, {"num_warps": 4})


SIZES = ["num_rows", "num_sequences", "num_tokens", "rows_per_sequence", "chunks_per_piece", "num_steps"]


@triton.jit(do_not_specialize=SIZES)
def pieces_kernel(
    table,
    cu_seqlens,
    num_rows,
    num_sequences,
    num_tokens,
    rows_per_sequence,
    chunks_per_piece,
    num_steps,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = row < num_rows
    if cu_seqlens is not None:
        # Binary search for the last sequence whose first row is at most `row`; once found, more steps change nothing.
        tokens_per_piece = chunks_per_piece * CHUNK
        sequence = tl.zeros([BLOCK_ROWS], tl.int32)
        end = sequence + num_sequences
        for _ in range(num_steps):
            middle = (sequence + end) // 2
            first_row = tl.load(cu_seqlens + middle, mask=valid, other=0).to(tl.int32) // tokens_per_piece + middle
            sequence, end = tl.where(first_row <= row, middle, sequence), tl.where(first_row <= row, end, middle)
        start = tl.load(cu_seqlens + sequence, mask=valid, other=0).to(tl.int32)
        length = tl.load(cu_seqlens + sequence + 1, mask=valid, other=0).to(tl.int32) - start
        piece = row - (start // tokens_per_piece + sequence)
    else:
        sequence = row // rows_per_sequence
        piece = row % rows_per_sequence
        length = num_tokens
    num_chunks = (length + CHUNK - 1) // CHUNK
    first = piece * chunks_per_piece
    end_chunk = tl.minimum(first + chunks_per_piece, num_chunks)
    is_used = (piece == 0) | (first < num_chunks)
    tl.store(table + row * 3, sequence, mask=valid)
    tl.store(table + row * 3 + 1, tl.where(is_used, first, -1), mask=valid)
    tl.store(table + row * 3 + 2, tl.where(is_used, end_chunk, -1), mask=valid)
