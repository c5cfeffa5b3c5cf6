"""Calls of the expert-parallel layer on a GPU, by emulated ranks or by processes: inputs first, then calls.

While a kernel waits for another rank, nothing may be compiled or loaded in its process: everything that a test runs
between the calls of two ranks is prepared, and has run, before.
"""

import torch

import tilecrew
from tests.moe.world_cases import assert_rows_close, bound_of
from tilecrew.moe import SharedExperts, fused, interleave_gate_up
from tilecrew.moe.experts import SWIGLU, compute_shared
from tilecrew.moe.schedule import DispatchLoad
from tilecrew.moe.workspace import MoEWorkspace

TIMEOUT_SECONDS = 5.0  # of waits in worlds of tests


class Inputs:
    """One rank's leaves, with weights as the layer takes them."""

    def __init__(self, case, rank):
        p = case.problem
        self.case, self.rank = case, rank
        tokens, experts = case.tokens(rank), case.experts(rank)
        self.ids = p.topk_ids[tokens].clone()
        self.w_gate_up = joined(case, p.gate[experts], p.up[experts])
        self.x, self.weights, self.w_down = p.x[tokens].clone(), p.topk_weights[tokens].clone(), p.down[experts].clone()
        self.d_out = case.d_out()[tokens].clone()
        self.shared = None
        if case.shared:
            w_gate_up = joined(case, p.shared_gate, p.shared_up)
            self.shared = SharedExperts(w_gate_up, p.shared_down.clone(), p.output_gate.clone())

    @property
    def leaves(self):
        return [self.x, self.weights, self.w_gate_up, self.w_down, *(self.shared or ())]

    def forward(self, world):
        case = self.case
        return tilecrew.moe_forward(
            self.x,
            self.ids,
            self.weights,
            self.w_gate_up,
            self.w_down,
            world=world,
            capacity=case.capacity,
            num_experts=case.problem.num_experts,
            gate_up_layout=case.layout,
            shared=self.shared,
        )

    def load_shared(self):
        """Runs the shared experts alone, forward and backward; x gets gradients from two sides, as in the layer."""
        leaves = [leaf.detach().requires_grad_() for leaf in (self.x, *self.shared)]
        with torch.no_grad():
            compute_shared(self.x, self.shared, self.case.layout)
        out = compute_shared(leaves[0], SharedExperts(*leaves[1:]), self.case.layout) + leaves[0]
        torch.autograd.grad(out, leaves, self.d_out)


def joined(case, gate, up):
    if case.layout == "interleaved":
        return interleave_gate_up(gate, up).contiguous()
    return torch.cat((gate, up), -1)


def prepare(world, case, dispatch=None, combine=None, num_comm_blocks=None):
    """This rank's workspace, made where there is none, and inputs."""
    if case.sizes not in world.workspaces:
        MoEWorkspace(world, case.sizes, dispatch=dispatch, combine=combine, num_comm_blocks=num_comm_blocks)
    inputs = Inputs(case, world.rank)
    if case.shared:
        inputs.load_shared()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return inputs


def far_load(size):
    """DispatchLoad for emulated ranks as if each had a GPU."""
    return lambda problem, num_rows, num_ranks, num_sms, share: DispatchLoad(problem, num_rows, size, num_sms, share)


def forward(world, inputs):
    with torch.no_grad():
        return inputs[world.rank].forward(world)


def forward_with_gradients(world, inputs):
    own = inputs[world.rank]
    for leaf in own.leaves:
        leaf.requires_grad_()
    return own.forward(world)


def backward(world, inputs, outs):
    own = inputs[world.rank]
    return torch.autograd.grad(outs[world.rank], own.leaves, own.d_out)


def steps(worlds, case, inputs):
    """A call without gradients in steps that each rank does before any does the next, name -> function(world); the
    last gives the result. What follows a step's waits for other ranks is complete when the next one starts, so only
    the barriers and the combine wait."""
    kept = {}

    def share(world):
        own, workspace = inputs[world.rank], world.workspaces[case.sizes]
        routing = workspace.share_tokens(own.x, own.ids, own.weights, brings=workspace.gathers)
        kept[world.rank] = workspace, own, routing

    def dispatch(world):
        workspace, own, routing = kept[world.rank]
        rows = None if workspace.gathers else own.x.new_empty(workspace.num_rows, own.x.shape[1])
        hidden = own.x.new_empty(workspace.num_rows, own.w_down.shape[1])
        fused.dispatch_gemm(workspace, routing, own.w_gate_up, SWIGLU, rows, hidden)
        kept[world.rank] = workspace, own, routing, hidden

    def combine(world):
        workspace, own, routing, hidden = kept[world.rank]
        return fused.gemm_combine(workspace, routing, hidden, own.w_down, own.weights, None, own.x.shape[0])

    return {
        "barrier": type(worlds[0]).barrier,
        "share tokens, tables": share,
        "dispatch and first GEMM": dispatch,
        "second GEMM and combine": combine,
    }


def check_forward(case, outs, wanted):
    for rank, out in enumerate(outs):
        assert_rows_close(out, wanted[0][case.tokens(rank)], bound_of(case))


def check_gradients(case, rank, gradients, wanted):
    d_x, d_weights, d_gate, d_up, d_down = wanted[1]
    tokens, experts = case.tokens(rank), case.experts(rank)
    wholes = [d_x, d_weights, joined(case, d_gate, d_up), d_down]
    parts = [d_x[tokens], d_weights[tokens], wholes[2][experts], d_down[experts]]
    names = ["x", "weights", "w_gate_up", "w_down"]
    if case.shared:  # each rank has gradients of its own tokens
        of_ranks = [(joined(case, gate, up), *others) for gate, up, *others in wanted[2]]
        parts += of_ranks[rank]
        wholes += [sum(gradient.norm() for gradient in found) for found in zip(*of_ranks, strict=True)]
        names += ["shared w_gate_up", "shared w_down", "output_gate"]
    for name, actual, part, whole in zip(names, gradients, parts, wholes, strict=True):
        error, size = (actual.double() - part).norm(), max(part.norm(), whole.norm() / len(case.lengths))
        assert error <= 2 * bound_of(case) * size + 1e-30, f"rank {rank}, {name}: {float(error / size):.2e}"
