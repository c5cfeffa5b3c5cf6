"""The chunk form in torch, sequence by sequence: a sequence has the same bits in every batch.

What torch's batched products and vectorised functions round to may depend on how many matrices or elements they are
given, and on the place of an element among them. Here they are given one sequence at a time, copied to tensors of its
own: so the same work is done on the same shapes, strides and alignments, whatever else is in the batch.
"""

import itertools
from dataclasses import replace

import torch

from tilecrew.gated_delta_rule import chunked
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.chunk_groups import token_bounds


def forward(arguments: ForwardArguments) -> ForwardResult:
    """As chunked.forward, for at least one sequence."""
    bounds, v, C = token_bounds(arguments), arguments.v, arguments.chunk_size
    is_packed = arguments.cu_seqlens is not None
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    num_rows = 1 if is_packed else v.shape[0]
    slots = arguments.num_slots // num_rows, v.shape[2], arguments.q.shape[3], v.shape[3]
    h = v.new_zeros(num_rows, *slots) if arguments.output_h else None
    final_states: list[torch.Tensor] = []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        result = chunked.forward(_sequence(arguments, n, start, end))
        o.flatten(0, 1)[start:end] = result.o[0]
        if h is not None and result.h is not None:
            first = start // C + n if is_packed else n * slots[0]
            h.flatten(0, 1)[first : first + result.h.shape[1]] = result.h[0]
        if result.final_state is not None:
            final_states.append(result.final_state)
    return ForwardResult(o, torch.cat(final_states) if final_states else None, h)


def _sequence(arguments: ForwardArguments, n: int, start: int, end: int) -> ForwardArguments:
    """Sequence n as a problem of its own, which shares no memory."""

    def tokens(x: torch.Tensor) -> torch.Tensor:
        part = x[:, start:end] if arguments.cu_seqlens is not None else x[n : n + 1]
        return part.clone(memory_format=torch.contiguous_format)

    state = arguments.initial_state
    return replace(
        arguments,
        q=tokens(arguments.q),
        k=tokens(arguments.k),
        v=tokens(arguments.v),
        g=tokens(arguments.g),
        beta=tokens(arguments.beta),
        initial_state=None if state is None else state[n : n + 1].clone(memory_format=torch.contiguous_format),
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    )
