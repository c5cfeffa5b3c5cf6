"""What ranks of a World do in tests of the expert-parallel layer, for new processes and for emulated ranks alike.

Every rank makes the same problem for all ranks' tokens, takes its part, and compares with the loop over all experts.
"""

import torch

import tilecrew
from tests.moe.problems import BOUNDS, Problem, assert_rows_close
from tilecrew.moe import SharedExperts, expert_range, interleave_gate_up, reference
from tilecrew.moe.workspace import MoESizes, MoEWorkspace

LEAVES = ("x", "topk_weights", "gate", "up", "down")
SHARED = ("shared_gate", "shared_up", "shared_down", "output_gate")


class Case:
    """A problem of all ranks. lengths: tokens of each rank; place: what routes are like, beside the kinds of problems:
    "local" and "remote" keep all or no routes on their rank, "rank 0" and "not rank 0" send all or none there,
    "duplicates" gives a token one expert twice."""

    def __init__(
        self,
        lengths,
        top_k,
        num_experts,
        hidden,
        intermediate,
        *,
        place=None,
        layout="interleaved",
        shared=False,
        **options,
    ):
        self.lengths, self.layout, self.shared = list(lengths), layout, shared
        self.problem = Problem(sum(lengths), top_k, num_experts, hidden, intermediate, **options)
        self.capacity = max(*lengths, 1)
        if place is not None:
            self._place(place)

    def _place(self, place):
        size, ids = len(self.lengths), self.problem.topk_ids
        E = self.problem.num_experts
        for rank in range(size):
            part = ids[self.tokens(rank)]
            own = expert_range(rank, E, size)
            if place == "duplicates":
                part[:, -1] = part[:, 0]
                continue
            if place in ("rank 0", "not rank 0"):
                own = expert_range(0, E, size)
            inside = place in ("local", "rank 0")
            allowed = [e for e in range(E) if (e in own) == inside]
            part.copy_(torch.tensor(allowed, device=ids.device)[part % len(allowed)] if allowed else part * 0 - 1)

    def tokens(self, rank):
        first = sum(self.lengths[:rank])
        return slice(first, first + self.lengths[rank])

    def experts(self, rank):
        own = expert_range(rank, self.problem.num_experts, len(self.lengths))
        return slice(own.start, own.stop)

    @property
    def sizes(self):
        p = self.problem
        return MoESizes(self.capacity, p.topk_ids.shape[1], p.num_experts, p.x.shape[1], p.gate.shape[2], p.x.dtype)

    def leaves(self, rank, requires_grad=True):
        p = self.problem
        parts = [t[self.tokens(rank)] for t in (p.x, p.topk_weights)]
        parts += [w[self.experts(rank)] for w in (p.gate, p.up, p.down)]
        parts += [getattr(p, name) for name in SHARED]
        return [part.detach().clone().requires_grad_(requires_grad) for part in parts]

    def run(self, world, leaves):
        def joined(gate, up):
            return interleave_gate_up(gate, up) if self.layout == "interleaved" else torch.cat((gate, up), -1)

        x, weights, gate, up, down, *shared = leaves
        return tilecrew.moe_forward(
            x,
            self.problem.topk_ids[self.tokens(world.rank)],
            weights,
            joined(gate, up),
            down,
            world=world,
            capacity=self.capacity,
            num_experts=self.problem.num_experts,
            gate_up_layout=self.layout,
            shared=SharedExperts(joined(shared[0], shared[1]), shared[2], shared[3]) if self.shared else None,
        )

    def d_out(self):
        generator = torch.Generator().manual_seed(5)
        x = self.problem.x
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)

    def expected(self):
        """Output of all tokens, and gradients of all leaves, by the loop in float64; those of shared experts, which
        each rank has for its own tokens, as a list over ranks."""
        p = self.problem
        wide = {name: getattr(p, name).double().requires_grad_() for name in LEAVES}
        out = reference.moe(wide["x"], p.topk_ids, *(wide[name] for name in LEAVES[1:]))
        d_out = self.d_out().double()
        gradients = list(torch.autograd.grad(out, list(wide.values()), d_out))
        out, d_shared = out.detach(), []
        for rank in range(len(self.lengths) if self.shared else 0):
            tokens = self.tokens(rank)
            leaves = [t.double().detach().requires_grad_() for t in (p.x[tokens], *(getattr(p, n) for n in SHARED))]
            more = reference.shared_experts(*leaves)
            d_x, *d_rest = torch.autograd.grad(more, leaves, d_out[tokens])
            out[tokens] += more.detach()
            gradients[0][tokens] += d_x
            d_shared.append(d_rest)
        return out, gradients, d_shared


def with_nan_weights(case):
    """The case with NaN for the weights of its routes of -1, which there must be."""
    is_missing = case.problem.topk_ids < 0
    assert is_missing.any()
    case.problem.topk_weights[is_missing] = float("nan")
    return case


def make_workspace(world, case):
    if case.sizes not in world.workspaces:
        MoEWorkspace(world, case.sizes)


def forward(world, case):
    with torch.no_grad():
        return case.run(world, case.leaves(world.rank, requires_grad=False))


def forward_and_backward(world, case):
    """The output, and the gradients of the leaves that the case uses."""
    leaves = case.leaves(world.rank)
    out = case.run(world, leaves)
    used = leaves if case.shared else leaves[: len(LEAVES)]
    gradients = torch.autograd.grad(out, used, case.d_out()[case.tokens(world.rank)])
    return out.detach(), gradients


def bound_of(case):
    return 4 * BOUNDS[case.problem.x.dtype]


def check_forward(case, rank, out, wanted):
    assert out.dtype == case.problem.x.dtype
    assert_rows_close(out, wanted[0][case.tokens(rank)], bound_of(case))


def check_gradients(case, rank, gradients, wanted):
    _, d_all, d_shared = wanted
    parts = [d[case.tokens(rank)] for d in d_all[:2]] + [d[case.experts(rank)] for d in d_all[2:]]
    parts += d_shared[rank] if case.shared else []
    # Few tokens' inner products may cancel; what all ranks have is their measure then.
    wholes = [*d_all, *(sum(d.norm() for d in ds) for ds in zip(*d_shared, strict=True))]
    for name, actual, part, whole in zip(LEAVES + SHARED, gradients, parts, wholes, strict=False):
        error, size = (actual.double() - part).norm(), max(part.norm(), whole.norm() / len(case.lengths))
        assert error <= 2 * bound_of(case) * size + 1e-30, f"rank {rank}, {name}: {float(error / size):.2e}"


def check(world, case):
    """Values without and with gradients, and the same bits in a second run."""
    wanted = case.expected()
    first = forward(world, case)
    check_forward(case, world.rank, first, wanted)
    assert torch.equal(forward(world, case), first)
    out, gradients = forward_and_backward(world, case)
    check_forward(case, world.rank, out, wanted)
    check_gradients(case, world.rank, gradients, wanted)
    again = forward_and_backward(world, case)[1]
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    if not case.shared and case.problem.topk_ids.lt(0).all():
        assert not first.any()


def cases(size, dtype=torch.float32, device="cpu"):
    """The regression matrix: name -> Case, for a number of ranks."""
    options = {"dtype": dtype, "device": device}

    def lengths(*values):
        return [values[rank % len(values)] for rank in range(size)]

    return {
        "uniform": Case(lengths(17, 33, 5), 2, 5, 64, 64, **options),
        "one expert, one route": Case(lengths(3, 129), 1, 1, 136, 64, **options),
        "no tokens on some ranks": Case(lengths(0, 40), 2, 4, 64, 32, **options),
        "no tokens at all": Case(lengths(0), 2, 4, 64, 32, **options),
        "one token": Case(lengths(1), 6, 64, 136, 24, **options),
        "about a row block": Case(lengths(127, 128, 129), 2, 2, 64, 64, **options),
        "more ranks than experts": Case(lengths(30), 2, 2, 64, 32, layout="halves", **options),
        "512 experts, 10 routes": Case(lengths(9, 0, 20), 10, 512, 40, 8, **options),
        "hot expert": Case(lengths(60, 10), 2, 6, 64, 32, kind="one expert", **options),
        "first and last expert empty": Case(lengths(50), 2, 8, 64, 32, kind="ends empty", **options),
        "all local": Case(lengths(31), 2, 8, 64, 32, place="local", **options),
        "all remote": Case(lengths(31), 2, 8, 64, 32, place="remote", **options),
        "all to rank 0": Case(lengths(31), 2, 8, 64, 32, place="rank 0", **options),
        "rank 0 receives nothing": Case(lengths(31), 2, 8, 64, 32, place="not rank 0", **options),
        "duplicates": Case(lengths(31, 7), 3, 6, 64, 32, place="duplicates", layout="halves", **options),
        "some missing": Case(lengths(40, 41), 3, 7, 64, 32, kind="some missing", **options),
        "all missing": Case(lengths(21), 3, 7, 64, 32, kind="all missing", **options),
        "shared experts": Case(lengths(60, 40), 2, 5, 64, 32, shared=True, **options),
        "shared experts, halves": Case(lengths(60, 40), 2, 5, 64, 32, shared=True, layout="halves", **options),
    }


# Of the matrix: full row blocks and one row more or less, ranks and experts without rows, few columns, missing routes.
FEW_NAMES = (
    "no tokens on some ranks",
    "about a row block",
    "one token",
    "more ranks than experts",
    "512 experts, 10 routes",
    "some missing",
)
