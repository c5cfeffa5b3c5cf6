"""Measures one case of `tilecrew bench moe`: on emulated ranks of one device, or as one rank of several processes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilecrew.benchmark.moe_cases import (
    ALL_TO_ALL,
    GRAPH,
    LAYER,
    ONE_RANK,
    SHAPES,
    Case,
    Row,
    loads_of,
    ratios_of,
    routes_of_experts,
    tokens_of,
    weights_of,
)
from tilecrew.benchmark.moe_parts import PARTS, Rank
from tilecrew.benchmark.moe_torch import all_to_all_layer, one_rank_layer, require_right
from tilecrew.benchmark.processes import Processes, graph_of, reason_of, slowest_in_turn
from tilecrew.benchmark.timing import in_turn
from tilecrew.moe.workspace import MoESizes
from tilecrew.parallel.world import World, on_every_rank

Forms = dict[str, Any]  # dispatch, combine and num_comm_blocks, as MoEWorkspace takes them


def sizes_of(case: Case, dtype: torch.dtype) -> MoESizes:
    """What the workspaces of a case are made for."""
    shape = SHAPES[case.shape]
    return MoESizes(case.num_tokens, shape.top_k, shape.num_experts, shape.hidden_size, shape.intermediate_size, dtype)


def measure_emulated(case: Case, device: torch.device, forms: Forms, seconds: float) -> Row:
    """All ranks on one device, beside all their tokens on one rank of torch's functions. seconds: spent on timing, at
    most, but at least three rounds. On a GPU calls are CUDA graphs that run in turns."""
    shape, dtype = SHAPES[case.shape], _dtype(device)
    w_all = weights_of(shape, device, dtype)
    tokens = [tokens_of(shape, case.routing, case.num_tokens, device, dtype) for _ in range(case.num_ranks)]
    worlds = World.emulated(case.num_ranks, device=device)
    sizes = sizes_of(case, dtype)
    ranks: list[Rank] = on_every_rank(worlds, lambda world: Rank(world, tokens[world.rank], w_all, sizes, **forms))
    _synchronize(device)

    def call_all(name: str) -> None:
        on_every_rank(worlds, lambda world: getattr(ranks[world.rank], name)())

    calls, failures = dict[str, Callable[[], Any]](), dict[str, str]()
    call_all("route")
    for name in ("layer", *PARTS):
        try:
            for rank in ranks:
                rank.spoil(name)
            _synchronize(device)
            call_all(name)
            for rank in ranks:
                rank.check(name)
                if name == "layer":
                    rank.layer_out = rank.out.clone()
            calls[name] = _captured(lambda name=name: call_all(name), device, worlds)  # type: ignore[misc]
            for rank in ranks:
                rank.check(name)
        except Exception as error:  # the other parts are still of use
            failures[name] = reason_of(error)
    x, ids, weights = (torch.cat(parts) for parts in zip(*tokens, strict=True))
    try:
        require_right(one_rank_layer(x, ids, weights, *w_all), (x, ids, weights), w_all)
        calls[ONE_RANK] = _captured(lambda: one_rank_layer(x, ids, weights, *w_all), device)
    except Exception as error:
        failures[ONE_RANK] = reason_of(error)
    milliseconds = in_turn(calls, device, seconds)
    try:
        for world in worlds:
            world.synchronize()
        on_every_rank(worlds, World.close)
    except Exception as error:
        failures["waits"] = reason_of(error)
    flops = case.num_ranks * case.flops
    return _row(case, ranks[0], routes_of_experts([ids], shape.num_experts), flops, milliseconds, failures)


def measure_process(case: Case, processes: Processes, forms: Forms, seconds: float) -> Row:
    """This rank of a case, a GPU each (or a process on the CPU), beside the same layer over all-to-all; collective. A
    round's time is that of its slowest rank. Parts, and the layer once more, are CUDA graphs on GPUs."""
    world, shape = processes.world, SHAPES[case.shape]
    device, dtype = world.device, _dtype(world.device)
    torch.manual_seed(0)  # all ranks have the weights of all experts while results are checked
    w_all = weights_of(shape, device, dtype)
    torch.manual_seed(1 + world.rank)
    tokens = tokens_of(shape, case.routing, case.num_tokens, device, dtype)
    rank = Rank(world, tokens, w_all, sizes_of(case, dtype), **forms)
    calls, failures = dict[str, Callable[[], Any]](), dict[str, str]()
    rank.route()
    world.synchronize()
    for name in ("layer", *rank.process_parts):
        _prepare_part(name, rank, processes, calls, failures)

    def all_to_all() -> torch.Tensor:
        return all_to_all_layer(tokens, rank.w_gate_up, rank.w_down, shape.num_experts)

    reason = processes.attempt(lambda: require_right(all_to_all(), tokens, w_all))
    if reason:
        failures[ALL_TO_ALL] = reason
    else:
        calls[ALL_TO_ALL] = all_to_all
    milliseconds = slowest_in_turn(calls, processes, seconds)
    routes = sum(processes.gather(routes_of_experts([tokens[1]], shape.num_experts)))
    row = _row(case, rank, routes, case.flops, milliseconds, failures)
    calls.clear()  # graphs keep memory of the workspace's sizes
    rank.workspace.destroy()
    return row


def _prepare_part(
    name: str, rank: Rank, processes: Processes, calls: dict[str, Callable[[], Any]], failures: dict[str, str]
) -> None:
    """Runs and checks a part on all ranks, then captures it and checks a replay; whatever one rank lacks, all do."""
    device, call = rank.world.device, getattr(rank, name)

    def run_and_check() -> None:
        rank.spoil(name)
        processes.world.barrier()
        call()
        rank.check(name)

    reason = processes.attempt(run_and_check)
    if name == "layer" and not reason:
        rank.layer_out = rank.out.clone()
        calls[LAYER] = call
    if not reason and (device.type == "cuda" or name != "layer"):
        graphs: list[Callable[[], Any]] = []
        reason = processes.attempt(lambda: graphs.append(graph_of(call, device)))
        if not reason:

            def replay_and_check() -> None:
                graphs[0]()
                rank.check(name)

            reason = processes.attempt(replay_and_check)
        if not reason:
            calls[GRAPH if name == "layer" else name] = graphs[0]
            return
    if reason:
        failures[GRAPH if LAYER in calls and name == "layer" else name] = reason


def _captured(call: Callable[[], Any], device: torch.device, worlds: Iterable[World] = ()) -> Callable[[], Any]:
    """Called, captured and replayed once; nothing is under way then."""
    call()
    run = graph_of(call, device, worlds)
    run()
    _synchronize(device)
    return run


def _row(
    case: Case, rank: Rank, routes: torch.Tensor, flops: int, milliseconds: dict[str, float], failures: dict[str, str]
) -> Row:
    layers = [name for name in (LAYER, GRAPH, ONE_RANK, ALL_TO_ALL) if name in milliseconds]
    gathers = rank.workspace.gathers
    bounds, ratios = ratios_of(milliseconds, gathers)
    seconds = None if gathers else rank.workspace.predicted_seconds
    return Row(
        case,
        *loads_of(routes, case.num_ranks),
        "gather" if gathers else rank.workspace.dispatch,
        rank.workspace.combine,
        rank.workspace.num_comm_blocks,
        None if seconds is None else 1e3 * seconds,
        milliseconds,
        {name: 1e-9 * flops / milliseconds[name] for name in layers},
        bounds,
        ratios,
        failures,
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
