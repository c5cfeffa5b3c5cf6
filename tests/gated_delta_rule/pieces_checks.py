"""What the pieces of a sequence should be and do, in plain Python and torch."""

from collections.abc import Callable
from dataclasses import replace

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult


def bounds_of(arguments: ForwardArguments) -> list[tuple[int, int]]:
    """(first token, token behind the last) of every sequence, in its batch row."""
    if arguments.cu_seqlens is None:
        return [(0, arguments.q.shape[1])] * arguments.num_sequences
    bounds = arguments.cu_seqlens.tolist()
    return list(zip(bounds, bounds[1:], strict=False))


def expected_table(arguments: ForwardArguments, chunks_per_piece: int) -> dict[int, tuple[int, int, int]]:
    """Row -> (sequence, first chunk, chunk behind the last); rows that are missing are no piece."""
    table = {}
    row = 0
    for n, (start, end) in enumerate(bounds_of(arguments)):
        num_chunks = -(-(end - start) // 64)
        if arguments.cu_seqlens is not None:
            assert start // (chunks_per_piece * 64) + n >= row, "rows of the sequence before"
            row = start // (chunks_per_piece * 64) + n
        for first in range(0, max(num_chunks, 1), chunks_per_piece):
            table[row] = (n, first, min(first + chunks_per_piece, num_chunks))
            row += 1
    return table


def assert_is_table(actual: torch.Tensor, arguments: ForwardArguments, chunks_per_piece: int) -> None:
    """Every piece stands in its row, and other rows have no chunks and end no sequence."""
    expected = expected_table(arguments, chunks_per_piece)
    assert not expected or max(expected) < actual.shape[0]
    for row, (sequence, first, end) in enumerate(actual.tolist()):
        if row in expected:
            assert (sequence, first, end) == expected[row]
        else:
            assert 0 <= sequence < arguments.num_sequences
            assert first == end == -1


def piece_arguments(arguments: ForwardArguments, piece: tuple[int, int, int]) -> ForwardArguments:
    """The tokens of one piece as a problem of its own, from zeros, with keys first in states."""
    sequence, first, end = piece
    start, stop = bounds_of(arguments)[sequence]
    row = 0 if arguments.cu_seqlens is not None else sequence
    tokens = slice(start + first * 64, min(start + end * 64, stop))
    names = ("q", "k", "v", "g", "beta")
    inputs = {name: getattr(arguments, name)[row : row + 1, tokens] for name in names}
    return replace(
        arguments,
        **inputs,
        cu_seqlens=None,
        initial_state=None,
        state_v_first=False,
        output_final_state=True,
        output_h=False,
    )


def transition_arguments(piece: ForwardArguments) -> ForwardArguments:
    """A piece whose final state is its transition: no values, from the identity."""
    identity = torch.eye(128, dtype=piece.g.dtype, device=piece.g.device).expand(1, piece.v.shape[2], -1, -1)
    return replace(piece, v=torch.zeros_like(piece.v), initial_state=identity.contiguous())


def states_before(
    arguments: ForwardArguments, chunks_per_piece: int, forward: Callable[[ForwardArguments], ForwardResult]
) -> dict[int, torch.Tensor]:
    """Row -> the state before the piece, [1, HV, K, V], where `forward` goes from piece to piece."""
    states = {}
    num_value_heads = arguments.v.shape[2]
    for row, (sequence, first, end) in expected_table(arguments, chunks_per_piece).items():
        if first == 0 and arguments.initial_state is None:
            state = arguments.g.new_zeros(1, num_value_heads, 128, 128)
        elif first == 0:
            state = arguments.initial_state[sequence : sequence + 1]
            state = (state.mT if arguments.state_v_first else state).contiguous()
        states[row] = state
        piece = piece_arguments(arguments, (sequence, first, end))
        state = forward(replace(piece, initial_state=state)).final_state
    return states
