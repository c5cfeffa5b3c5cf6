"""How sequences are cut into pieces: the plan, in ints that the host knows. The table itself is made on the device.

A piece has `chunks_per_piece` chunks, the last of a sequence what is left; a sequence without tokens has one piece
without chunks, because its final state is still to be written. Pieces of a sequence are consecutive rows of the table,
and like slots (ForwardArguments.num_slots) they need neither a prefix sum nor lengths on the host. With R tokens to a
piece, the first row of sequence n is

    batch     n * max(1, ceil(T / R)): all rows are in use
    packed    cu_seqlens[n] // R + n: rows never coincide, because max(1, ceil(L / R)) <= (s + L) // R - s // R + 1 for
              a sequence of L tokens that starts at token s; rows in between stay unused

Example, R = 128: lengths 300, 0, 100 give cu_seqlens 0, 300, 300, 400 and first rows 0, 3, 4 of 6; row 5 is unused.
"""

from dataclasses import dataclass

CHUNK_SIZE = 64


@dataclass(frozen=True)
class PiecePlan:
    """Sizes of a cut. rows_per_sequence: of each batch row, or None in a packed batch."""

    num_sequences: int
    num_tokens: int
    chunks_per_piece: int
    rows_per_sequence: int | None

    @property
    def num_rows(self) -> int:
        """Rows of the table: pieces in a batch, a bound of their number in a packed batch."""
        if self.rows_per_sequence is not None:
            return self.num_sequences * self.rows_per_sequence
        if self.num_sequences == 0:
            return 0
        return self.num_tokens // self.tokens_per_piece + self.num_sequences

    @property
    def tokens_per_piece(self) -> int:
        return self.chunks_per_piece * CHUNK_SIZE

    def num_states_ctas(self, num_value_heads: int, has_initial_state: bool) -> int:
        """CTAs of kernel_states that have work: h of every piece but the last of a sequence, and M of those, but for
        the first of a sequence without an initial state. At most as many in a packed batch."""
        inner = self.num_rows - self.num_sequences
        first = 0 if has_initial_state else min(inner, self.num_sequences)
        return num_value_heads * (2 * inner - first)

    def num_scan_ctas(self, num_value_heads: int, block_v: int, value_dim: int = 128) -> int:
        """CTAs of kernel_forward_scan over the pieces."""
        return self.num_rows * num_value_heads * (value_dim // block_v)


def plan_pieces(num_sequences: int, num_tokens: int, chunks_per_piece: int, is_packed: bool) -> PiecePlan:
    """num_tokens: T of the tensors, so of each sequence in a batch and of all of them in a packed batch."""
    if chunks_per_piece < 1:
        raise ValueError(f"chunks_per_piece must be at least 1, got {chunks_per_piece}")
    rows = None if is_packed else max(1, -(-num_tokens // (chunks_per_piece * CHUNK_SIZE)))
    return PiecePlan(num_sequences, num_tokens, chunks_per_piece, rows)
