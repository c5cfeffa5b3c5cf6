"""Which chunks the torch path computes together: groups of bounded size, of sequences of any lengths in lock step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments

# (chunk, value head) pairs in a group: enough to hide the cost of a torch call, and few enough for the group's matrices
# to stay in a cache and not to count in the peak memory.
PAIRS_PER_GROUP = 128


@dataclass(frozen=True)
class Group:
    """Chunks that are computed together, all first chunks (of the longest sequences first) before all second ones.

    steps        per step of the scan, the slice of m that it serves: its chunk j belongs to sequence j of the block
    rows         [m * C] which token (of all B * T) is in which row; padding rows repeat some token
    padding      the rows that hold no token, or None
    kept         the rows that do, or None for all
    kept_rows    rows[kept]
    slots        [m] where in `h` the state before each chunk goes
    """

    steps: list[slice]
    rows: torch.Tensor
    padding: torch.Tensor | None
    kept: torch.Tensor | None
    kept_rows: torch.Tensor
    slots: torch.Tensor

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The rows [m * C, ...] of x [B * T, ...], zeros where no token is, whatever the neighbours hold."""
        gathered = x.index_select(0, self.rows)
        return gathered if self.padding is None else gathered.index_fill_(0, self.padding, 0)

    def scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Writes rows x [m * C, ...] to their tokens in out [B * T, ...]."""
        x = x if self.kept is None else x.index_select(0, self.kept)
        out.index_copy_(0, self.kept_rows, x.to(out.dtype))


class Block(NamedTuple):
    """Sequences that are scanned in lock step, longest first, and their groups in order of time."""

    sequences: list[int]
    groups: list[Group]


def token_bounds(arguments: ForwardArguments) -> list[int]:
    """Sequence n holds the tokens from bounds[n] up to bounds[n + 1] of all B * T tokens."""
    if arguments.cu_seqlens is None:
        batch, num_tokens = arguments.q.shape[:2]
        return [n * num_tokens for n in range(batch + 1)]
    bounds: list[int] = (
        arguments.cu_seqlens if arguments.cu_seqlens_cpu is None else arguments.cu_seqlens_cpu
    ).tolist()
    return bounds


def blocks(arguments: ForwardArguments, bounds: list[int]) -> Iterator[Block]:
    """All sequences with at least one token, in blocks."""
    C = arguments.chunk_size
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if arguments.cu_seqlens is None:
        slot_of = [n * -(-length // C) for n, length in enumerate(lengths)]
    else:
        slot_of = [start // C + n for n, start in enumerate(bounds[:-1])]
    longest_first = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    most_chunks = max(1, PAIRS_PER_GROUP // arguments.v.shape[2])

    for first in range(0, len(longest_first), most_chunks):
        sequences = longest_first[first : first + most_chunks]
        grouped_steps: list[list[list[tuple[int, int]]]] = [[]]
        room = most_chunks
        for c in range(-(-lengths[sequences[0]] // C)):
            step = [(n, c) for n in sequences if lengths[n] > c * C]
            if len(step) > room:
                grouped_steps.append([])
                room = most_chunks
            grouped_steps[-1].append(step)
            room -= len(step)
        yield Block(sequences, [_group(steps, bounds, slot_of, C, arguments.q.device) for steps in grouped_steps])


def _group(
    steps: list[list[tuple[int, int]]], bounds: list[int], slot_of: list[int], C: int, device: torch.device
) -> Group:
    """The indices of the (sequence, chunk) pairs of each step, made on the host: nothing waits for the device."""
    chunks = [pair for step in steps for pair in step]
    ends_of_steps = list(accumulate(len(step) for step in steps))
    starts = torch.tensor([bounds[n] + c * C for n, c in chunks])
    ends = torch.tensor([bounds[n + 1] for n, _ in chunks])
    rows = starts[:, None] + torch.arange(C)
    is_padding = (rows >= ends[:, None]).flatten()
    rows = torch.minimum(rows, ends[:, None] - 1).flatten()
    padded = bool(is_padding.any())
    kept = (~is_padding).nonzero()[:, 0]
    return Group(
        steps=[slice(end - len(step), end) for step, end in zip(steps, ends_of_steps, strict=True)],
        rows=rows.to(device),
        padding=is_padding.nonzero()[:, 0].to(device) if padded else None,
        kept=kept.to(device) if padded else None,
        kept_rows=rows[kept].to(device),
        slots=torch.tensor([slot_of[n] + c for n, c in chunks]).to(device),
    )
