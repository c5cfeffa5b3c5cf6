"""The parts of the expert-parallel layer as calls of one rank, and checks of what each has computed."""

import dataclasses
import importlib

import torch

import tilecrew
from tilecrew._hardware import hardware_of
from tilecrew.benchmark.moe_torch import require_right
from tilecrew.grouped_gemm import operators
from tilecrew.grouped_gemm.hooks import Epilogue
from tilecrew.grouped_gemm.schedule import pick
from tilecrew.moe import expert_range, fused
from tilecrew.moe.experts import SWIGLU
from tilecrew.moe.routing import Routing
from tilecrew.moe.workspace import MoESizes, MoEWorkspace
from tilecrew.parallel.world import World

# In the order in which each finds what it needs; the layer goes before, since their results are compared with its own.
PARTS = ("copy", "dispatch_gemm", "first_gemm", "second_gemm", "gemm_combine", "combine")
# Between processes also what their link takes.
PROCESS_PARTS = (*PARTS, "transfer")
# And where tokens of other GPUs are brought.
BRINGING_PARTS = ("tables", "bring")


class Rank:
    """One rank's tokens, experts and workspace. Making one is collective.

    route            collective: shares the tokens of all ranks, builds the tables
    layer            collective: `tilecrew.moe_forward` as a whole
    copy             rows of all ranks' tokens, moved by communication blocks, and nothing beside
    tables           the tables of all ranks' routes
    bring            tokens of other GPUs, and nothing beside
    dispatch_gemm    the first product, with dispatch beside it; or it gathers, behind the tokens of other GPUs where
                     these are brought, and behind the tables beside which they come
    first_gemm       the same product alone
    second_gemm      the second product alone
    gemm_combine     collective: the second product, with combine beside it
    transfer         what the copy engines take for as many bytes as results come from each other rank, all at once
    combine          alone: what follows the second product when results are where their tokens are
    """

    def __init__(
        self,
        world: World,
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        w_all: tuple[torch.Tensor, torch.Tensor],
        sizes: MoESizes,
        *,
        dispatch: str | None,
        combine: str | None,
        num_comm_blocks: int | None,
    ) -> None:
        own = expert_range(world.rank, sizes.num_experts, world.size)
        self.world, self.tokens, self.w_all = world, tokens, w_all
        self.w_gate_up, self.w_down = (w[own.start : own.stop] for w in w_all)
        self.workspace = MoEWorkspace(world, sizes, dispatch=dispatch, combine=combine, num_comm_blocks=num_comm_blocks)
        num_rows, x = self.workspace.num_rows, tokens[0]
        self.rows = x.new_empty(num_rows, sizes.hidden_size)
        self.hidden = x.new_empty(num_rows, sizes.intermediate_size)
        self.results = x.new_empty(num_rows, sizes.hidden_size)
        self.combined = torch.empty_like(x)
        self.out = self.layer_out = self.combined
        self.transferred = x.new_empty(sizes.capacity, sizes.hidden_size)
        self.routing: Routing
        self.tables_again: Routing
        self.routes_of_peers: dict[int, int] = {}

    @property
    def brings(self) -> bool:
        """Whether tokens of other GPUs are brought before the first product; the same on all ranks."""
        return self.workspace.gathers and self.world.stream is None and self.world.size > 1

    @property
    def process_parts(self) -> tuple[str, ...]:
        """What is measured between processes."""
        return (*PROCESS_PARTS, *BRINGING_PARTS) if self.brings else PROCESS_PARTS

    def route(self) -> None:
        self.routing = self.workspace.share_tokens(*self.tokens)

    def layer(self) -> None:
        sizes = self.workspace.sizes
        self.out = tilecrew.moe_forward(
            *self.tokens,
            self.w_gate_up,
            self.w_down,
            world=self.world,
            capacity=sizes.capacity,
            num_experts=sizes.num_experts,
        )

    def copy(self) -> None:
        self.workspace.counters.zero_()
        if self.workspace.is_gpu:
            fused.launch_dispatch(self.workspace, self.routing, self.rows)
        else:
            fused._dispatch_on_cpu(self.workspace, self.routing, self.rows)

    def dispatch_gemm(self) -> None:
        routing = self.routing
        if self.brings:
            self.workspace.bring_tokens(self.tokens[0].shape[0])
            routing = self.workspace.make_tables()  # not kept: in a graph they are the graph's
        if not self.workspace.gathers:
            self.workspace.counters.zero_()
        rows = None if self.workspace.gathers else self.rows
        fused.dispatch_gemm(self.workspace, routing, self.w_gate_up, SWIGLU, rows, self.hidden)

    def tables(self) -> None:
        self.tables_again = self.workspace.make_tables()

    def bring(self) -> None:
        if self.workspace.near is not None:
            self.workspace.bring_tokens(self.tokens[0].shape[0])
            torch.cuda.current_stream().wait_stream(self.world.side_stream)

    def first_gemm(self) -> None:
        self._gemm(self.rows, self.w_gate_up, self.hidden, SWIGLU)

    def second_gemm(self) -> None:
        self._gemm(self.hidden, self.w_down, self.results, None)

    def gemm_combine(self) -> None:
        self.workspace.epoch.add_(1)
        weights, num_tokens = self.tokens[2], self.tokens[0].shape[0]
        self.out = fused.gemm_combine(self.workspace, self.routing, self.hidden, self.w_down, weights, None, num_tokens)

    def combine(self) -> None:
        self.out = self.combined
        if self.workspace.is_gpu:
            fused.launch_combine(self.workspace, self.routing, self.tokens[2], None, self.out)
        else:
            fused._combine_on_cpu(self.workspace, self.routing, self.tokens[2], None, self.out)

    def transfer(self) -> None:
        sizes = self.workspace.sizes
        if not self.routes_of_peers:  # waits for the device, so not while a graph is captured, nor before
            own = self.routing.combine_indices[:, 0]
            others = [rank for rank in range(self.world.size) if rank != self.world.rank]
            self.routes_of_peers = {rank: int((own == rank).sum()) for rank in others}
        for peer, num_routes in self.routes_of_peers.items():
            there = self.workspace.tokens.peer(peer)
            for first in range(0, num_routes, sizes.capacity):
                length = min(sizes.capacity, num_routes - first)
                self.transferred[:length].copy_(there[:length], non_blocking=True)

    def spoil(self, name: str) -> None:
        """Before a part is checked: what it writes becomes NaN, so that nothing old is taken for its result."""
        written = {
            "copy": [self.rows],
            "dispatch_gemm": [self.hidden] if self.workspace.gathers else [self.rows, self.hidden],
            "first_gemm": [self.hidden],
            "combine": [self.combined],
        }
        near = self.workspace.near
        if near is not None and name in ("bring", "dispatch_gemm"):
            near.fill_(float("nan"))
        for tensor in written.get(name, []):
            tensor.fill_(float("nan"))

    def check(self, name: str) -> None:
        """Raises AssertionError where what the layer or a part has just computed is wrong. Waits for the device."""
        self.world.synchronize()
        if name == "layer":
            require_right(self.out, self.tokens, self.w_all)
        elif name in ("copy", "dispatch_gemm"):
            self._check_rows()  # dispatch_gemm: those of copy, where it has none
        elif name == "tables":
            self._check_tables()
        elif name == "bring":
            self._check_near()
        if name in ("dispatch_gemm", "first_gemm") and not bool(self.hidden[: self._num_rows()].isfinite().all()):
            raise AssertionError("not all rows have been multiplied")
        if name == "dispatch_gemm" and self.workspace.gathers:
            again = torch.empty_like(self.hidden)
            self._gemm(self.rows, self.w_gate_up, again, SWIGLU)
            if not torch.equal(again[: self._num_rows()], self.hidden[: self._num_rows()]):
                raise AssertionError("products of gathered rows are not those of the rows")
        if name in ("gemm_combine", "combine") and not torch.equal(self.out, self.layer_out):
            raise AssertionError("sums are not those of the layer")

    def _num_rows(self) -> int:
        return int(self.routing.offs[-1]) if self.routing.offs.numel() else 0

    def _check_rows(self) -> None:
        num_rows = self._num_rows()
        source, token = self.routing.pull_dispatch_indices[:num_rows].long().unbind(1)
        for peer in range(self.world.size):
            places = (source == peer).nonzero().flatten()
            if not torch.equal(self.rows[places], self.workspace.tokens.peer(peer)[token[places]]):
                raise AssertionError(f"rows are not those of the tokens of rank {peer}")
        if self.rows[:num_rows][source < 0].any():
            raise AssertionError("padding is not zero")

    def _check_tables(self) -> None:
        for field in dataclasses.fields(Routing):
            first, again = (getattr(tables, field.name) for tables in (self.routing, self.tables_again))
            if not (torch.equal(first, again) if isinstance(first, torch.Tensor) else first == again):
                raise AssertionError(f"{field.name} of the tables is not what it was")

    def _check_near(self) -> None:
        source, token = self.routing.pull_dispatch_indices[: self._num_rows()].long().unbind(1)
        for peer in range(self.world.size):
            needed = token[source == peer].unique()
            there = self.workspace.tokens.peer(peer)
            if not torch.equal(self.workspace.tokens_of(peer)[needed], there[needed]):
                raise AssertionError(f"tokens of rank {peer} have not been brought")

    def _gemm(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None) -> None:
        if x.shape[0] == 0:
            return
        if not self.workspace.is_gpu:
            operators.run(x, w, self.routing.offs, out, None, None, epilogue)
            return
        kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
        schedule = pick(operators.problem_of(x, w, None, epilogue), hardware_of(x.device))
        num_programs = min(schedule.num_programs, self.world.num_sms)
        hooks = kernel.hooks_of(None, epilogue)
        kernel.launch(x, w, self.routing.offs, out, schedule.tiles, num_programs, hooks, writes_tail=False).run()
