"""The two fused products of the layer: rows arrive while the first is computed, results leave while the second is.

    dispatch_gemm    tokens of all ranks -> rows -> grouped GEMM behind a gate; or the GEMM gathers tokens
    gemm_combine     grouped GEMM that stores rows where their tokens are, or tells all ranks of them -> sums of tokens

On a GPU a first GEMM whose rows nobody else needs gathers them: its load role reads tokens where they are. Or rows are
moved by communication blocks, which run beside the GEMM on a stream of their own, and whose multiprocessors its grid
leaves them; or by a warp of each of the GEMM's blocks. The second GEMM pushes its rows: it
stores each where its token is. Or else communication blocks beside it pull those of other ranks. Blocks that combine
follow, on all multiprocessors of the rank. On the CPU torch pulls, through the same gate, epilogue, slots and parallel
tensors.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew._launches import launch
from tilecrew.grouped_gemm import operators
from tilecrew.grouped_gemm.hooks import BandGate, Epilogue, Gate, Identity
from tilecrew.grouped_gemm.schedule import pick
from tilecrew.moe.routing import ROW_BLOCK, Routing
from tilecrew.moe.schedule import MOVER_COLUMNS, MOVER_SLOTS, combine_options, num_gemm_blocks, with_mover
from tilecrew.moe.workspace import MoEWorkspace, dispatch_kernels
from tilecrew.parallel import fusion, host_signal


class NotifySources(Identity):
    """Epilogue: all ranks learn when a 128-row block of this rank's results is complete."""

    def __init__(self, workspace: MoEWorkspace) -> None:
        self.workspace = workspace

    @property
    def landed(self) -> Any:
        return importlib.import_module("tilecrew.moe.kernel_gemm_combine").notify_sources

    @property
    def landed_tensors(self) -> tuple[Any, ...]:
        ws = self.workspace
        return ws.arrivals, ws.epoch, ws.slots.cells.local, ws.slots.cells.offsets, ws.place

    def landed_reference(self, num_rows_of_blocks: list[int]) -> None:
        ws = self.workspace
        for block in range(len(num_rows_of_blocks)):
            for peer in range(ws.world.size):
                ws.slots.put(block, peer, int(ws.epoch))


def dispatch_gemm(
    workspace: MoEWorkspace,
    routing: Routing,
    w: torch.Tensor,
    epilogue: Epilogue | None,
    rows: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """rows [P, H] <- the tokens that all ranks have shared, and out [P, N] <- epilogue(rows w), w [L, H, N].

    Rows behind the last one of the rank's experts are undefined in both. rows: None where the workspace gathers, behind
    its `bring_tokens`.
    """
    if out.shape[0] == 0:
        return
    if rows is None:
        if workspace.near is not None:
            torch.cuda.current_stream().wait_stream(workspace.world.side_stream)
        launch_gemm_with_source(workspace, routing, w, out, epilogue)
        return
    gate = BandGate(workspace.counters, routing.offs, workspace.world.timeout_seconds)
    if not workspace.is_gpu:
        _dispatch_on_cpu(workspace, routing, rows)
        operators.run(rows, w, routing.offs, out, None, gate, epilogue)
        return
    if workspace.dispatch == "warps":
        launch_gemm_with_movers(workspace, routing, rows, w, out, gate, epilogue)
        return
    with fusion.beside_current_stream(workspace.world) as side:
        with side:
            launch_dispatch(workspace, routing, rows)
        launch_gemm(workspace, rows, w, routing, out, gate, epilogue, workspace.num_comm_blocks)


def gemm_combine(
    workspace: MoEWorkspace,
    routing: Routing,
    rows: torch.Tensor,
    w: torch.Tensor,
    weights: torch.Tensor | None,
    base: torch.Tensor | None,
    num_tokens: int,
) -> torch.Tensor:
    """Results of all ranks' rows w, w [L, K, H], summed over each token's routes -> [T, H].

    weights [T, K] wide, or None: one; base [T, H], or None: added.
    """
    out = workspace.tokens.local.new_empty(num_tokens, workspace.sizes.hidden_size)
    if workspace.returned is not None:
        if rows.shape[0] > 0:
            launch_gemm_with_destination(workspace, routing, rows, w)
        if workspace.world.size > 1:
            workspace.barrier()
        launch_combine(workspace, routing, weights, base, out)
        return out
    results = workspace.results.local[: rows.shape[0]]
    if not workspace.is_gpu:
        if rows.shape[0] > 0:
            operators.run(rows, w, routing.offs, results, None, None, NotifySources(workspace))
        return _combine_on_cpu(workspace, routing, weights, base, out)
    notify = NotifySources(workspace) if workspace.world.size > 1 else None
    if workspace.staged is None:
        if rows.shape[0] > 0:
            launch_gemm(workspace, rows, w, routing, results, None, notify, num_comm_blocks=0)
    else:
        with fusion.beside_current_stream(workspace.world) as side:
            with side:
                launch_pull(workspace, routing, num_tokens)
            if rows.shape[0] > 0:
                launch_gemm(workspace, rows, w, routing, results, None, notify, workspace.num_comm_blocks)
    launch_combine(workspace, routing, weights, base, out)
    return out


def pull_values(workspace: MoEWorkspace, routing: Routing, num_tokens: int) -> torch.Tensor:
    """[T, K] `row_values` of the rows that this rank's routes have gone to, 0 for none. Behind a gemm_combine, whose
    waits order what is read."""
    length = num_tokens * workspace.sizes.top_k
    indices = routing.combine_indices[:length]
    out = workspace.row_values.local.new_zeros(length)
    if not workspace.is_gpu:
        for peer in range(workspace.world.size):
            routes = (indices[:, 0] == peer).nonzero().flatten()
            out[routes] = workspace.row_values.peer(peer)[indices[routes, 1]]
    elif length > 0:
        values, control = workspace.row_values, workspace.world.control
        tensors = (values.local, values.offsets, indices, control.local, out)
        arguments, num_programs = (*tensors, length), -(-length // 1024)
        workspace.launches.run(
            ("values", length),
            tensors,
            lambda: launch(dispatch_kernels().values_kernel, num_programs, arguments, {"BLOCK": 1024}),
        )
    return out.view(num_tokens, workspace.sizes.top_k)


def launch_dispatch(workspace: MoEWorkspace, routing: Routing, rows: torch.Tensor) -> None:
    """Communication blocks that bring rows and count them."""
    tokens = workspace.tokens
    tensors = (
        tokens.local,
        tokens.offsets,
        rows,
        routing.pull_dispatch_indices,
        routing.offs,
        workspace.counters,
        workspace.world.control.local,
    )
    num_blocks, arguments = workspace.num_comm_blocks, (tensors, routing.offs.shape[0], rows.shape[1])
    workspace.launches.run(
        ("dispatch", num_blocks),
        tensors,
        lambda: launch(dispatch_kernels().dispatch_kernel, num_blocks, arguments, workspace.ring),
    )


def launch_gemm(
    workspace: MoEWorkspace,
    rows: torch.Tensor,
    w: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    gate: Gate | None,
    epilogue: Epilogue | None,
    num_comm_blocks: int,
) -> None:
    """The grouped GEMM, with a grid that leaves the communication blocks beside it their multiprocessors."""
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
    world, hooks = workspace.world, kernel.hooks_of(gate, epilogue)

    def make() -> Any:
        schedule = pick(operators.problem_of(rows, w, gate, epilogue), hardware_of(world.device))
        num_programs = min(schedule.num_programs, num_gemm_blocks(world.num_sms, num_comm_blocks))
        return kernel.launch(rows, w, routing.offs, out, schedule.tiles, num_programs, hooks, writes_tail=False)

    _run_gemm(workspace, num_comm_blocks, (rows, w, routing.offs, out), hooks, make)


def launch_gemm_with_movers(
    workspace: MoEWorkspace,
    routing: Routing,
    rows: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    gate: Gate,
    epilogue: Epilogue | None,
) -> None:
    """The grouped GEMM behind its gate, with a warp in every block that brings rows. All blocks are resident at once:
    one has the shared memory of a multiprocessor, and there are no more of them than the rank may fill."""
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
    world, tokens = workspace.world, workspace.tokens
    hooks = kernel.hooks_of(gate, epilogue)._replace(
        mover=importlib.import_module("tilecrew.moe.crew_mover").move_rows,
        mover_tensors=(
            tokens.local,
            tokens.offsets,
            routing.pull_dispatch_indices,
            routing.offs,
            workspace.mover_sizes,
            rows,
            workspace.counters,
            world.control.local,
        ),
        mover_slots=MOVER_SLOTS,
        mover_columns=MOVER_COLUMNS,
    )

    def make() -> Any:
        problem = with_mover(operators.problem_of(rows, w, gate, epilogue))
        schedule = pick(problem, hardware_of(world.device), "hopper")
        num_programs = min(schedule.num_programs, num_gemm_blocks(world.num_sms, 0))
        return kernel.launch(rows, w, routing.offs, out, schedule.tiles, num_programs, hooks, writes_tail=False)

    _run_gemm(workspace, 0, (rows, w, routing.offs, out), hooks, make)


def launch_gemm_with_source(
    workspace: MoEWorkspace, routing: Routing, w: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None
) -> None:
    """The grouped GEMM whose rows are tokens, read where they are."""
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
    world, tokens = workspace.world, workspace.tokens.local
    hooks = kernel.hooks_of(None, epilogue)._replace(
        source=dispatch_kernels().place_of_token,
        source_tensors=(routing.pull_dispatch_indices, workspace.token_places, workspace.route_sizes),
    )

    def make() -> Any:
        problem = operators.problem_of(tokens, w, None, epilogue)
        problem = dataclasses.replace(problem, num_rows=out.shape[0], gathers=True)
        schedule = pick(problem, hardware_of(world.device), "hopper")
        num_programs = min(schedule.num_programs, num_gemm_blocks(world.num_sms, 0))
        return kernel.launch(tokens, w, routing.offs, out, schedule.tiles, num_programs, hooks, writes_tail=False)

    _run_gemm(workspace, 0, (tokens, w, routing.offs, out), hooks, make)


def _run_gemm(
    workspace: MoEWorkspace,
    num_comm_blocks: int,
    tensors: tuple[torch.Tensor, ...],
    hooks: Any,
    make: Callable[[], Any],
) -> None:
    """make() or its like; tensors: rows, w, offs, out. Integers among the hooks' arguments are the workspace's."""
    rows, w, _, out = tensors
    key = (
        num_comm_blocks,
        rows.shape,
        w.shape,
        w.stride(),
        out.shape,
        hooks.gate,
        hooks.epilogue,
        hooks.landed,
        hooks.mover,
        hooks.source,
        hooks.destination,
    )
    of_roles = (hooks.landed_tensors, hooks.mover_tensors, hooks.source_tensors, hooks.destination_tensors)
    groups = (hooks.gate_tensors, hooks.epilogue_tensors, *of_roles)
    of_hooks = [value for group in groups for value in group if isinstance(value, torch.Tensor)]
    workspace.launches.run(key, [*tensors, *of_hooks], make)


def launch_gemm_with_destination(
    workspace: MoEWorkspace, routing: Routing, rows: torch.Tensor, w: torch.Tensor
) -> None:
    """The grouped GEMM whose rows go to `returned` of the ranks whose tokens they belong to."""
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
    world, returned = workspace.world, workspace.returned
    hooks = kernel.Hooks(
        destination=importlib.import_module("tilecrew.moe.kernel_gemm_combine").place_of_route,
        destination_tensors=(routing.row_routes, returned.local, returned.offsets, workspace.route_sizes),
    )

    def make() -> Any:
        problem = dataclasses.replace(operators.problem_of(rows, w, None, None), scatters=True)
        schedule = pick(problem, hardware_of(world.device), "hopper")
        num_programs = min(schedule.num_programs, num_gemm_blocks(world.num_sms, 0))
        out = returned.local
        return kernel.launch(rows, w, routing.offs, out, schedule.tiles, num_programs, hooks, writes_tail=False)

    _run_gemm(workspace, 0, (rows, w, routing.offs, returned.local), hooks, make)


def launch_pull(workspace: MoEWorkspace, routing: Routing, num_tokens: int) -> None:
    """Communication blocks that wait for row blocks of other ranks and bring them, in the order in which they land."""
    kernels = importlib.import_module("tilecrew.moe.kernel_gemm_combine")
    world, results = workspace.world, workspace.results
    tensors = (results.local, results.offsets, workspace.staged, routing.pull_combine_indices)
    flags = (workspace.epoch, workspace.slots.cells.local, world.control.local, world.control.offsets)
    num_blocks, num_routes = workspace.num_comm_blocks, num_tokens * workspace.sizes.top_k
    numbers = (world.rank, world.size, num_routes, workspace.sizes.hidden_size, host_signal.nanoseconds(world))
    workspace.launches.run(
        ("pull", num_blocks, num_routes),
        (*tensors, *flags),
        lambda: launch(kernels.pull_kernel, num_blocks, (tensors, flags, *numbers), workspace.ring),
    )


def launch_combine(
    workspace: MoEWorkspace,
    routing: Routing,
    weights: torch.Tensor | None,
    base: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Blocks that sum, where nothing else brings the rows behind waits for row blocks of all ranks: no more than the
    rank has multiprocessors, because GEMMs of other emulated ranks need theirs while these wait for them."""
    kernels = importlib.import_module("tilecrew.moe.kernel_gemm_combine")
    world, results, returned = workspace.world, workspace.results, workspace.returned
    # By the capacity: a kernel for each number of tokens would have to be loaded while others wait.
    options: dict[str, Any] = combine_options(workspace.sizes.capacity, workspace.sizes.top_k, world.num_sms)
    num_groups = -(-out.shape[0] // options["TOKENS"])
    num_programs = max(1, min(num_groups, world.num_sms))
    if returned is not None:
        where, y, other, epoch, slots = "returned", returned.local, returned.local, None, None
    else:
        y, epoch, slots = results.local, workspace.epoch, workspace.slots.cells.local
        # Behind the pull, and on a rank alone, every row is here.
        is_here = workspace.staged is not None or world.size == 1
        where = "staged" if is_here else "peers"
        other = workspace.staged if workspace.staged is not None else results.local if is_here else results.offsets
    tensors = (y, other, routing.combine_indices, weights, base, out)
    flags = (epoch, slots, world.control.local, world.control.offsets)
    numbers = (world.rank, world.size, *out.shape, host_signal.nanoseconds(world))
    options |= {"TOP_K": workspace.sizes.top_k, "WHERE": where}
    workspace.launches.run(
        ("combine", out.shape),
        (*tensors, *flags),
        lambda: launch(kernels.combine_kernel, num_programs, (tensors, flags, *numbers), options),
    )


def _dispatch_on_cpu(workspace: MoEWorkspace, routing: Routing, rows: torch.Tensor) -> None:
    num_rows = int(routing.offs[-1])
    source, token = routing.pull_dispatch_indices[:num_rows].to(torch.int64).unbind(1)
    for peer in range(workspace.world.size):
        places = (source == peer).nonzero().flatten()
        rows[places] = workspace.tokens.peer(peer)[token[places]]
    rows[:num_rows][source < 0] = 0
    workspace.counters[: num_rows // ROW_BLOCK] = ROW_BLOCK


def _combine_on_cpu(
    workspace: MoEWorkspace,
    routing: Routing,
    weights: torch.Tensor | None,
    base: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    num_tokens, top_k = out.shape[0], workspace.sizes.top_k
    indices = routing.combine_indices[: num_tokens * top_k].to(torch.int64)
    needed = torch.stack((indices[:, 0], indices[:, 1] // ROW_BLOCK), 1)[indices[:, 0] >= 0]
    for writer, block in needed.unique(dim=0).tolist():
        workspace.slots.wait(block, writer, int(workspace.epoch))
    table = indices.view(num_tokens, top_k, 2)
    total = torch.zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
    for k in range(top_k):
        for peer in range(workspace.world.size):
            tokens = (table[:, k, 0] == peer).nonzero().flatten()
            values = workspace.results.peer(peer)[table[tokens, k, 1]].to(total.dtype)
            total[tokens] += values if weights is None else values * weights[tokens, k, None]
    if base is not None:
        total += base
    return out.copy_(total)
