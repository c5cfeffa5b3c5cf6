"""The kernels of the expert-parallel layer in an order in which none waits for one that is launched behind it.

compute-sanitizer may run kernels one after the other, even those of several streams. Calls of several ranks would then
never end: each rank's barrier and combine are launched in front of what they wait for on the ranks behind it. Safe are

    dispatch by warps     rows are moved by the GEMM's own blocks
    dispatch by blocks    they wait for nothing, and are launched in front of the GEMM whose gate waits for them
    pull, combine         behind the GEMMs of all ranks
    barrier               of one rank only, which waits for what it has told itself; else the host waits for the device
    making a workspace    its calls have no routes to wait for, and no barriers

so that a call of a single rank is safe as it is.
"""

from unittest import mock

import torch

from tests.moe import gpu_ranks
from tilecrew.moe import fused
from tilecrew.moe.experts import SWIGLU
from tilecrew.parallel import World


def each(worlds, function):
    """function(world) of every rank; ends when the device has."""
    found = []
    for world in worlds:
        with world.use():
            found.append(function(world))
    torch.cuda.synchronize()
    return found


def prepare(worlds, case, dispatch, combine=None):
    return each(worlds, lambda world: gpu_ranks.prepare(world, case, dispatch, combine))


def forward(worlds, case, dispatch, combine=None):
    """Outputs of all ranks, each step by all ranks before any does the next."""
    inputs = prepare(worlds, case, dispatch, combine)

    def share(world):
        own, workspace = inputs[world.rank], world.workspaces[case.sizes]
        return workspace.share_tokens(own.x, own.ids, own.weights)

    with mock.patch.object(World, "barrier"):
        each(worlds, share)
        routings = each(worlds, share)  # now the ids of all ranks are there

    def dispatch_gemm(world):
        own, workspace = inputs[world.rank], world.workspaces[case.sizes]
        rows = None if workspace.gathers else own.x.new_empty(workspace.num_rows, own.x.shape[1])
        hidden = own.x.new_empty(workspace.num_rows, own.w_down.shape[1])
        fused.dispatch_gemm(workspace, routings[world.rank], own.w_gate_up, SWIGLU, rows, hidden)
        return hidden

    hidden = each(worlds, dispatch_gemm)

    def second_gemm(world):
        own, workspace = inputs[world.rank], world.workspaces[case.sizes]
        if workspace.combine == "push":
            fused.launch_gemm_with_destination(workspace, routings[world.rank], hidden[world.rank], own.w_down)
            return
        arguments = (
            hidden[world.rank],
            own.w_down,
            routings[world.rank],
            workspace.results.local[: workspace.num_rows],
        )
        fused.launch_gemm(workspace, *arguments, None, fused.NotifySources(workspace), num_comm_blocks=0)

    def pull(world):
        workspace = world.workspaces[case.sizes]
        if workspace.staged is not None:
            fused.launch_pull(workspace, routings[world.rank], inputs[world.rank].x.shape[0])

    def combine_rows(world):
        own, workspace = inputs[world.rank], world.workspaces[case.sizes]
        out = torch.empty_like(own.x)
        fused.launch_combine(workspace, routings[world.rank], own.weights, None, out)
        return out

    each(worlds, second_gemm)
    each(worlds, pull)
    return each(worlds, combine_rows)


def forward_and_backward(worlds, case, dispatch, combine=None):
    """Output and gradients of the only rank, as the layer launches them."""
    assert len(worlds) == 1
    inputs = prepare(worlds, case, dispatch, combine)
    outs = each(worlds, lambda world: gpu_ranks.forward_with_gradients(world, inputs))
    return outs[0], each(worlds, lambda world: gpu_ranks.backward(world, inputs, outs))[0]
