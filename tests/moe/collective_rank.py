"""One rank of the tests of the collective layer.

    python -m tests.moe.collective_rank RANK WORLD_SIZE FILE [gloo | nccl | absence]

Every rank makes the same problem for all ranks' tokens, takes its part, and compares with the loop over all experts.
"""

import datetime
import os
import re
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import tilecrew
from tests.moe.problems import BOUNDS, Problem, assert_rows_close
from tilecrew.moe import SharedExperts, expert_range, interleave_gate_up, reference

LEAVES = ("x", "topk_weights", "gate", "up", "down")
SHARED = ("shared_gate", "shared_up", "shared_down", "output_gate")


class Rank:
    """This rank's part of a problem: its tokens, and leaves for its experts and the shared ones."""

    def __init__(self, group, lengths, top_k, num_experts, hidden, intermediate, **options):
        self.group, self.rank = group, dist.get_rank(group)
        if dist.get_backend(group) == "nccl":
            options["device"] = "cuda"
            if options.get("dtype") == torch.float64:
                options["dtype"] = torch.float32  # GPUs have no grouped GEMM of float64
        self.problem = Problem(sum(lengths), top_k, num_experts, hidden, intermediate, **options)
        first = sum(lengths[: self.rank])
        self.tokens = slice(first, first + lengths[self.rank])
        own = expert_range(self.rank, num_experts, dist.get_world_size(group))
        self.experts = slice(own.start, own.stop)
        p = self.problem
        parts = (p.x[self.tokens], p.topk_weights[self.tokens], *(w[self.experts] for w in (p.gate, p.up, p.down)))
        parts += tuple(getattr(p, name) for name in SHARED)
        self.leaves = {name: part.clone().requires_grad_() for name, part in zip(LEAVES + SHARED, parts, strict=True)}

    def run(self, with_shared=False, layout="interleaved", **options):
        def joined(gate, up):
            return interleave_gate_up(gate, up) if layout == "interleaved" else torch.cat((gate, up), -1)

        x, weights, gate, up, down, *shared = self.leaves.values()
        if with_shared:
            options["shared"] = SharedExperts(joined(shared[0], shared[1]), shared[2], shared[3])
        ids = self.problem.topk_ids[self.tokens]
        return tilecrew.moe_forward(
            x, ids, weights, joined(gate, up), down, world=self.group, gate_up_layout=layout, **options
        )

    def expected(self, d_out, with_shared):
        """Output of this rank's tokens, and gradients of its leaves, by the loop over all experts and tokens."""
        p = self.problem
        wide = {name: getattr(p, name).double().requires_grad_() for name in LEAVES + SHARED}
        out = reference.moe(wide["x"], p.topk_ids, *(wide[name] for name in LEAVES[1:]))
        gradients = list(torch.autograd.grad(out, [wide[name] for name in LEAVES], d_out.double()))
        out = out.detach()[self.tokens]
        gradients = [g[part] for g, part in zip(gradients, [self.tokens] * 2 + [self.experts] * 3, strict=True)]
        if with_shared:
            x = wide["x"].detach()[self.tokens].requires_grad_()
            shared = reference.shared_experts(x, *(wide[name] for name in SHARED))
            more = torch.autograd.grad(shared, [x, *(wide[name] for name in SHARED)], d_out.double()[self.tokens])
            out = out + shared.detach()
            gradients = [gradients[0] + more[0], *gradients[1:], *more[1:]]
        return out, gradients


def check(group, lengths, *sizes, with_shared=False, layout="interleaved", num_chunks=2, **options):
    part = Rank(group, lengths, *sizes, **options)
    bound = 4 * BOUNDS[part.problem.x.dtype]
    d_out = torch.randn(part.problem.x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    d_out = d_out.to(part.problem.x)
    wanted, wanted_gradients = part.expected(d_out, with_shared)
    settings = {"with_shared": with_shared, "layout": layout, "num_chunks": num_chunks}
    out = part.run(**settings)
    assert_rows_close(out, wanted, bound)
    assert torch.equal(part.run(**settings), out)
    with torch.no_grad():
        assert torch.equal(part.run(**settings), out)
    leaves = [leaf for name, leaf in part.leaves.items() if with_shared or name in LEAVES]
    gradients = torch.autograd.grad(out, leaves, d_out[part.tokens])
    for name, actual, expected in zip(part.leaves, gradients, wanted_gradients, strict=False):
        size = float(expected.norm())
        assert float((actual.double() - expected).norm()) <= 3 * bound * size + 1e-12, name
    return out


def lengths_of(group, *pattern):
    world_size = dist.get_world_size(group)
    return [pattern[rank % len(pattern)] for rank in range(world_size)]


def values(group):
    """Tokens per rank, with none on some; experts that do not divide, fewer than ranks; kinds of routing; chunks."""
    for num_chunks in (1, 2, 5):
        check(group, lengths_of(group, 9, 0, 17), 3, 7, 16, 24, num_chunks=num_chunks, dtype=torch.float64)
    for kind in ("one expert", "some missing", "all missing", "ends empty"):
        check(group, lengths_of(group, 5, 12), 2, 8, 16, 8, kind=kind, dtype=torch.float64, with_shared=True)
    check(group, lengths_of(group, 4, 3), 2, 2, 16, 8, dtype=torch.float64)
    check(group, lengths_of(group, 4, 3), 1, 1, 16, 8, dtype=torch.float64)
    check(group, lengths_of(group, 0), 2, 5, 16, 8, with_shared=True)
    check(group, lengths_of(group, 33, 0, 64), 6, 64, 40, 16)
    check(group, lengths_of(group, 33, 1), 4, 10, 40, 16, dtype=torch.bfloat16, with_shared=True, layout="halves")


def one_bit_pattern_for_any_number_of_chunks(group):
    runs = [check(group, lengths_of(group, 20, 3), 3, 9, 16, 8, num_chunks=n) for n in (1, 2, 3, 64)]
    assert all(torch.equal(runs[0], run) for run in runs)
    if dist.get_world_size(group) == 1:
        p = Rank(group, [20], 3, 9, 16, 8).problem
        alone = tilecrew.moe_forward(p.x, p.topk_ids, p.topk_weights, p.w_gate_up, p.down)
        assert torch.equal(runs[0], alone)


def module(group):
    lengths = lengths_of(group, 7, 0, 3)
    part = Rank(group, lengths, 2, 5, 16, 8)
    p = part.problem
    layer = tilecrew.ExpertParallelMoE(5, 16, 8, world=group, capacity=8, device=p.x.device)
    layer.load_experts(p.gate, p.up, p.down)
    arguments = (p.x[part.tokens], p.topk_ids[part.tokens], p.topk_weights[part.tokens])
    out = layer(*arguments)
    wanted, _ = part.expected(torch.zeros_like(p.x), False)
    assert_rows_close(out, wanted, 4 * BOUNDS[torch.float32])
    out.sum().backward()
    assert layer.w_down.grad.shape == layer.w_down.shape


def must_raise(group, error_here, error_there, message, culprit, **changes):
    """The last rank calls with changes; every rank must raise, and the next call must work."""
    part = Rank(group, lengths_of(group, 4, 2), 2, 5, 16, 8)
    p = part.problem
    arguments = {
        "x": p.x[part.tokens],
        "topk_ids": p.topk_ids[part.tokens],
        "topk_weights": p.topk_weights[part.tokens],
        "w_gate_up": p.w_gate_up[part.experts],
        "w_down": p.down[part.experts],
        "world": group,
    }
    is_culprit = part.rank == culprit
    with pytest.raises(error_here if is_culprit else error_there, match=re.escape(message)):
        tilecrew.moe_forward(**{**arguments, **(changes if is_culprit else {})})


def errors(group):
    last = dist.get_world_size(group) - 1
    tokens = lengths_of(group, 4, 2)[last]
    F, V, T = torch.zeros, ValueError, TypeError
    ids = F(tokens, 2, dtype=torch.int64)
    num_local = len(expert_range(last, 5, last + 1))
    must_raise(group, T, V, "x must be a torch.Tensor, got list", last, x=[1.0])
    must_raise(group, T, V, "topk_ids must be int32 or int64, got float32", last, topk_ids=F(tokens, 2))
    must_raise(group, V, V, "num_chunks must be an int from 1 to 64, got 0", last, num_chunks=0)
    must_raise(group, V, V, f"topk_ids of rank {last} must be -1", last, topk_ids=ids + 5)
    if tokens > 1 and last > 0:
        must_raise(group, V, V, "capacity must be alike on all ranks, got None on rank 0 and 1", last, capacity=1)
    part = {"x": F(tokens, 24), "w_gate_up": F(num_local, 24, 16), "w_down": F(num_local, 8, 24)}
    if last > 0:
        must_raise(
            group, V, V, f"x must be alike on all ranks, got H = 16 on rank 0 and H = 24 on rank {last}", last, **part
        )
        half = {
            "x": F(tokens, 16).half(),
            "w_gate_up": F(num_local, 16, 16).half(),
            "w_down": F(num_local, 8, 16).half(),
        }
        must_raise(group, V, V, "x must be alike on all ranks, got dtype torch.float32 on rank 0", last, **half)
        wide = {"topk_ids": F(tokens, 3, dtype=torch.int64), "topk_weights": F(tokens, 3)}
        must_raise(group, V, V, "topk_ids must be alike on all ranks, got K = 2 on rank 0 and K = 3", last, **wide)
        must_raise(group, V, V, "gate_up_layout must be alike on all ranks", last, gate_up_layout="halves")
        must_raise(group, V, V, "num_chunks must be alike on all ranks", last, num_chunks=3)
        training = {"x": F(tokens, 16, requires_grad=True)}
        must_raise(group, V, V, "the inputs must be alike on all ranks, got requires_grad False", last, **training)
        more = {"w_gate_up": F(num_local + 3, 16, 16), "w_down": F(num_local + 3, 8, 16)}
        must_raise(group, V, V, "of E = 8 experts", last, **more)
    capacities = Rank(group, lengths_of(group, 4, 2), 2, 5, 16, 8)
    with pytest.raises(ValueError, match="x of rank 0 has 4 tokens, more than its capacity of 3"):
        capacities.run(capacity=3)
    check(group, lengths_of(group, 4, 2), 2, 5, 16, 8)  # the group is still in order


def gradients_that_some_ranks_do_not_need(group):
    """x requires a gradient on rank 0 only, as on a rank without tokens; the experts' weights on all."""
    part = Rank(group, lengths_of(group, 4, 2), 2, 5, 16, 8)
    if part.rank > 0:
        part.leaves["x"] = part.leaves["x"].detach()
    out = part.run()
    d_out = torch.ones_like(part.problem.x)
    _, wanted = part.expected(d_out, False)
    out.backward(d_out[part.tokens])
    if part.rank == 0:
        torch.testing.assert_close(part.leaves["x"].grad.double(), wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(part.leaves["down"].grad.double(), wanted[4], rtol=1e-4, atol=1e-5)
    # An output of shared experts that is there already is added, and gets the gradient of the sum.
    shared = torch.randn_like(part.leaves["x"]).requires_grad_()
    x, weights, gate, up, down, *_ = part.leaves.values()
    ids, w_gate_up = part.problem.topk_ids[part.tokens], interleave_gate_up(gate, up)
    summed = tilecrew.moe_forward(x, ids, weights, w_gate_up, down, world=group, shared=shared)
    torch.testing.assert_close(summed, out + shared)
    assert torch.equal(torch.autograd.grad(summed, shared, d_out[part.tokens])[0], d_out[part.tokens])
    out = part.run()
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="works once"):
        out.sum().backward()


CASES = (values, one_bit_pattern_for_any_number_of_chunks, module, errors, gradients_that_some_ranks_do_not_need)


def absent_rank(group):
    """The last rank never calls: the others' wait ends with the group's timeout, as an error."""
    part = Rank(group, lengths_of(group, 4, 2), 2, 5, 16, 8)
    if part.rank < dist.get_world_size(group) - 1:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            part.run()
        assert time.monotonic() - start < 30
    else:
        time.sleep(8)


def main(rank, world_size, file, backend="gloo"):
    torch.set_num_threads(1)
    is_absence = backend == "absence"
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "gloo" if is_absence else backend,
        init_method=f"file://{file}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=datetime.timedelta(seconds=3 if is_absence else 60),
    )
    if is_absence:
        absent_rank(dist.group.WORLD)
        os._exit(0)  # the group is broken: nothing of it can be closed in order
    for case in CASES:
        # Errors are told alike by every backend, and some of them are of values that are on the host.
        if case is not errors or backend == "gloo":
            case(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
