"""Exact context parallelism inside one GPU: sequences cut into pieces that run at the same time.

With few sequences and heads most SMs have nothing to do while others walk long sequences. So every piece is first asked
what it does to the state (kernel_states), the state before each piece follows from that (kernel_combine), and then
kernel_forward_scan walks all pieces at once, each from its own state:

    plan = context_parallel.plan(arguments, chunks_per_piece)
    pieces = context_parallel.table(arguments, plan)
    states = context_parallel.input_states(arguments, prepared, plan, pieces)
    kernel_forward_scan.launch(replace(arguments, initial_state=states), prepared, result, block_v, pieces).run()

Nothing is copied to the host and every size follows from shapes, so all of it can be captured in a CUDA graph.
"""

from typing import Any

import torch

from tilecrew.gated_delta_rule import kernel_combine, kernel_pieces, kernel_states
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.kernel_prepare import Prepared
from tilecrew.gated_delta_rule.pieces import PiecePlan, plan_pieces


def plan(arguments: ForwardArguments, chunks_per_piece: int) -> PiecePlan:
    """The cut of a problem into pieces of that many chunks."""
    is_packed = arguments.cu_seqlens is not None
    return plan_pieces(arguments.num_sequences, arguments.q.shape[1], chunks_per_piece, is_packed)


def table(arguments: ForwardArguments, pieces_plan: PiecePlan) -> torch.Tensor:
    """The pieces [P, 3] int32 as kernels take them, made on the current stream."""
    pieces = kernel_pieces.allocate(arguments, pieces_plan)
    kernel_pieces.launch(arguments, pieces_plan, pieces).run()
    return pieces


def input_states(
    arguments: ForwardArguments,
    prepared: Prepared,
    pieces_plan: PiecePlan,
    pieces: torch.Tensor,
    history_tolerance: float = 0.0,
) -> torch.Tensor:
    """The state before every piece, on the current stream: [P, HV, ...] float32 in the layout of initial_state.

    prepared: by kernel_prepare.run_gated. history_tolerance: above zero, a piece whose gates multiply to less than it
    passes nothing on of the state before it. What is lost is below that share of the state where
    0 <= beta |k|^2 <= 2, as for keys of unit length; 0 is exact.
    """
    states, launches = make_launches(arguments, prepared, pieces_plan, pieces, history_tolerance)
    for launch in launches:
        launch.run()
    return states


def make_launches(
    arguments: ForwardArguments,
    prepared: Prepared,
    pieces_plan: PiecePlan,
    pieces: torch.Tensor,
    history_tolerance: float = 0.0,
) -> tuple[torch.Tensor, list[Any]]:
    """The states and the two launches that fill them, in order."""
    ends = kernel_states.allocate(arguments, pieces_plan.num_rows)
    states = kernel_combine.allocate(arguments, pieces_plan)
    return states, [
        kernel_states.launch(arguments, prepared, pieces, ends, history_tolerance),
        kernel_combine.launch(arguments, pieces_plan, ends, states),
    ]
