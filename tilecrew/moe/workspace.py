"""What a rank allocates once so that ranks that address each other's memory can exchange tokens, and its flags."""

import contextlib
import importlib
from typing import Any, NamedTuple

import torch

from tilecrew._hardware import hardware_of
from tilecrew._launches import LaunchMemory, launch
from tilecrew._shapes import require_dtype
from tilecrew.grouped_gemm.schedule import MAX_ROWS, Problem
from tilecrew.moe.routing import ROW_BLOCK, Routing, build_routing, expert_range, max_rows
from tilecrew.moe.schedule import (
    BRING,
    DispatchLoad,
    copies_tokens,
    gathers,
    pick_combine,
    pick_dispatch,
    pulls_beside,
    ring_options,
)
from tilecrew.parallel import fusion
from tilecrew.parallel.control import as_int32
from tilecrew.parallel.memory import ordinary_tensors
from tilecrew.parallel.signal import Signals
from tilecrew.parallel.tensor import ParallelTensor
from tilecrew.parallel.world import World


class MoESizes(NamedTuple):
    """What must be the same on all ranks. capacity: the most tokens of a rank; num_experts: of all ranks."""

    capacity: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"capacity {self.capacity}, K = {self.top_k}, E = {self.num_experts}, H = {self.hidden_size}, "
            f"I = {self.intermediate_size}, {self.dtype}"
        )


class MoEWorkspace:
    """Buffers and flags of one rank for mixture-of-experts layers of certain sizes; layers of the same sizes share it.

    Making one is collective: every rank does so, in the same order. It is kept by the world, where `moe_forward` finds
    it, until `destroy`. It may be made with gradients disabled, also under torch.inference_mode, and serves calls with
    and without. P is the most rows that a rank's experts can get: those of all tokens of all ranks, padded.

    tokens           ParallelTensor [capacity, H]: x of each rank, in backward the gradient of its output
    ids, weights     ParallelTensors [capacity, K] int32 and wide: routes of each rank, -1 behind its tokens
    near             [W - 1, capacity, H] or None: tokens of other GPUs, for a first GEMM that gathers; next rank first.
                     None on a rank without experts, which gathers nothing
    returned         ParallelTensor [capacity * K, H] or None: results for this rank's routes, where experts push them
    results          ParallelTensor [P, H] or None: what the experts of each rank have computed, where it is pulled
    staged           [capacity * K, H] or None: results of other ranks for this rank's routes, pulled beside the GEMM
    row_values       ParallelTensor [P] wide: gradients of route weights
    counters         [row blocks] int32: rows of each row block that have landed
    arrivals         [row blocks] int32 or None: elects the tile that completes a row block, where results are pulled
    slots            Signals or None, with a slot for each row block: rank r writes the epoch when its row block is
                     complete
    epoch            [1] int32 on the device of the world, one more for each exchange; may pass 2^32
    launches         of kernels, by what of them is no address
    predicted_seconds    of dispatch and first GEMM at the capacity, by the model of `schedule`; None but for "blocks"

    Args:
        world: this rank's World.
        sizes: MoESizes. In an emulated world on a GPU make the workspaces of all ranks before the first call: a rank
            that still loads kernels would wait for kernels that wait for it.
        dispatch: "warps", "blocks" or "gather", as `schedule` says; None chooses. On the CPU None.
        num_comm_blocks: blocks that pull rows beside a GEMM; at least 1 and less than the rank's multiprocessors.
            None: as `schedule.DispatchLoad` finds enough. On the CPU None.
        combine: "push" or "pull", as `schedule.pick_combine` says; None chooses. On the CPU None.

    Raises TypeError or ValueError for sizes that do not fit, and on every rank where ranks differ in them.
    """

    @ordinary_tensors()
    def __init__(
        self,
        world: World,
        sizes: MoESizes,
        *,
        dispatch: str | None = None,
        num_comm_blocks: int | None = None,
        combine: str | None = None,
    ) -> None:
        self.world, self.sizes = world, sizes
        try:
            load = self._choose(dispatch, num_comm_blocks, combine)
        except (TypeError, ValueError) as error:
            tell(world, f"an error: {error}")
            raise
        self.launches = LaunchMemory()
        self.is_gpu = world.device.type == "cuda"
        is_emulated = world.stream is not None
        world.agree(f"a mixture of experts of {sizes}")
        self._allocate(load, is_emulated)
        self._is_loading = False
        if self.is_gpu:
            self._load()
        world.workspaces[sizes] = self
        world.quiesce()

    def _choose(self, dispatch: str | None, num_comm_blocks: int | None, combine: str | None) -> DispatchLoad:
        """Checks, and the forms of both products."""
        world, sizes = self.world, self.sizes
        check_sizes(world, sizes)
        dtype = str(sizes.dtype).removeprefix("torch.")
        num_experts = len(expert_range(0, sizes.num_experts, world.size))
        problem = Problem(MAX_ROWS, num_experts, sizes.hidden_size, 2 * sizes.intermediate_size, dtype, has_gate=True)
        hardware, is_emulated = hardware_of(world.device), world.stream is not None
        num_rows = -(-world.size * sizes.capacity * sizes.top_k * num_experts // sizes.num_experts)
        share = world.num_sms / hardware.num_sms if hardware.device_type == "cuda" else 1.0
        load = DispatchLoad(problem, num_rows, 1 if is_emulated else world.size, world.num_sms, share)
        self.dispatch = pick_dispatch(dispatch, load, hardware, sizes.capacity)
        self.gathers = gathers(dispatch, problem, hardware)
        second = Problem(MAX_ROWS, num_experts, sizes.intermediate_size, sizes.hidden_size, dtype)
        self.combine = pick_combine(combine, second, hardware)
        self.ring = ring_options(sizes.hidden_size, hardware)
        if num_comm_blocks is None and hardware.device_type == "cuda":
            num_comm_blocks = load.num_comm_blocks
        self.num_comm_blocks = fusion.comm_blocks(world, num_comm_blocks)
        self.predicted_seconds = load.seconds(self.num_comm_blocks) if self.dispatch == "blocks" else None
        return load

    def _allocate(self, load: DispatchLoad, is_emulated: bool) -> None:
        world, sizes = self.world, self.sizes
        num_routes = world.size * sizes.capacity * sizes.top_k
        # Rank 0 has the most experts.
        self.max_rows = max_rows(num_routes, len(expert_range(0, sizes.num_experts, world.size)), ROW_BLOCK)
        self.experts = expert_range(world.rank, sizes.num_experts, world.size)
        self.num_rows = max_rows(num_routes, len(self.experts), ROW_BLOCK)
        num_blocks = self.max_rows // ROW_BLOCK
        routes = (sizes.capacity, sizes.top_k)
        wide = torch.promote_types(sizes.dtype, torch.float32)
        self.tokens = ParallelTensor((sizes.capacity, sizes.hidden_size), sizes.dtype, world)
        self.ids = ParallelTensor(routes, torch.int32, world)
        self.weights = ParallelTensor(routes, wide, world)
        self.row_values = ParallelTensor((self.max_rows,), wide, world)
        # Which of them there are is the combine's form to say.
        self.returned: Any = None
        self.results: Any = None
        self.slots: Any = None
        own_routes = (sizes.capacity * sizes.top_k, sizes.hidden_size)
        if self.combine == "push":
            self.returned = ParallelTensor(own_routes, sizes.dtype, world)
        else:
            self.results = ParallelTensor((self.max_rows, sizes.hidden_size), sizes.dtype, world)
            self.slots = Signals(world, num_blocks, world.first_epoch)
        with world.use():
            device = world.device
            self.counters = torch.zeros(num_blocks, dtype=torch.int32, device=device)
            self.arrivals = None if self.slots is None else torch.zeros_like(self.counters)
            self.epoch = torch.full((1,), as_int32(world.first_epoch), dtype=torch.int32, device=device)
            self.mover_sizes = torch.tensor([len(self.experts), sizes.hidden_size], dtype=torch.int32, device=device)
            self.place = torch.tensor([world.rank, world.size], dtype=torch.int32, device=device)
            self.route_sizes = torch.tensor(own_routes, dtype=torch.int32, device=device)
            self.near = None
            if self.gathers and load.num_ranks > 1 and len(self.experts) > 0:
                shape = (world.size - 1, sizes.capacity, sizes.hidden_size)
                self.near = torch.empty(shape, dtype=sizes.dtype, device=device)
            places = [self.tokens_of(rank).data_ptr() for rank in range(world.size)]
            self.token_places = torch.tensor(places, dtype=torch.int64, device=device)
            self.staged = None
            if self.combine == "pull" and world.size > 1 and pulls_beside(sizes.capacity, is_emulated):
                self.staged = torch.empty(own_routes, dtype=sizes.dtype, device=device)
            self._all_ids = torch.full((world.size, *routes), -1, dtype=torch.int32, device=device)
            self._all_weights = torch.zeros((world.size, *routes), dtype=wide, device=device)

    @classmethod
    def of(cls, world: World, sizes: MoESizes) -> "MoEWorkspace":
        """The world's workspace of these sizes; collective where it is made.

        Raises ValueError where it would have to be made between the calls of emulated ranks on a GPU.
        """
        found = world.workspaces.get(sizes)
        if found is not None:
            return found
        if world.stream is not None and world.size > 1:
            raise ValueError(
                "world must have a workspace on every emulated rank before the first call: "
                f"on_every_rank(worlds, tilecrew.moe.workspace.MoEWorkspace, MoESizes(...)) of {sizes}"
            )
        return cls(world, sizes)

    def share_tokens(
        self, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, *, brings: bool = False
    ) -> Routing:
        """Collective: every rank's x [T, H], ids and wide weights [T, K] are there for all ranks -> this rank's tables.

        Ids outside of -1 to E - 1 become -1. brings: `bring_tokens`, beside the making of the tables.
        """
        self.barrier()
        self.tokens.local[: x.shape[0]].copy_(x)
        if self.is_gpu:
            self._share_routes(topk_ids.contiguous(), weights)
        else:
            wide_ids = topk_ids.to(torch.int64)
            self.ids.local.fill_(-1)
            self.ids.local[: x.shape[0]] = torch.where(
                (wide_ids >= 0) & (wide_ids < self.sizes.num_experts), wide_ids, -1
            )
            self.weights.local[: x.shape[0]].copy_(weights)
            self._next_epoch()
        self.barrier()
        if brings:
            self.bring_tokens(x.shape[0])
        return self.make_tables()

    def make_tables(self) -> Routing:
        """This rank's tables, from the ids that all ranks have shared."""
        self._gather_tables()
        return build_routing(
            self._all_ids, num_experts=self.sizes.num_experts, rank=self.world.rank, row_block=ROW_BLOCK
        )

    def bring_tokens(self, num_tokens: int) -> None:
        """Tokens of all other GPUs that have routes to this rank to `near`, on the side stream.

        num_tokens: of this rank, by which `schedule.copies_tokens` says whether copy engines bring all there are.
        """
        if self.near is None:
            return
        world, sizes, side = self.world, self.sizes, self.world.side_stream
        if copies_tokens(num_tokens, sizes.capacity):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for slot, near in enumerate(self.near):
                    near.copy_(self.tokens.peer((world.rank + 1 + slot) % world.size), non_blocking=True)
            return
        tensors = (self.tokens.local, self.tokens.offsets, self.ids.local, self.ids.offsets)
        numbers = (world.rank, world.size, sizes.capacity, self.experts.start, self.experts.stop, sizes.hidden_size)
        options = {"TOP_K": sizes.top_k, **BRING}
        num_programs = (world.size - 1) * -(-sizes.capacity // BRING["ROWS"])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.launches.run(
                "bring",
                (*tensors, self.near),
                lambda: launch(dispatch_kernels().bring_kernel, num_programs, (tensors, self.near, *numbers), options),
            )

    def tokens_of(self, rank: int) -> torch.Tensor:
        """Where a first GEMM that gathers finds the tokens of a rank."""
        if self.near is None or rank == self.world.rank:
            return self.tokens.peer(rank)
        return self.near[(rank - self.world.rank) % self.world.size - 1]

    def row_weights(self, routing: Routing) -> torch.Tensor:
        """The route weight of each of this rank's rows, [P] wide, 0 for padding; behind its `share_tokens`."""
        if self.num_rows == 0:
            return self._all_weights.new_zeros(0)
        found = self._all_weights.flatten()[routing.row_routes.clamp_min(0)]
        return torch.where(routing.row_routes >= 0, found, 0)

    def share_gradients(self, d_out: torch.Tensor) -> None:
        """Collective: every rank's d_out [T, H] is there for all ranks, in the place of x."""
        self.barrier()  # nobody still reads what the exchange before has left
        self._next_epoch()
        self.tokens.local[: d_out.shape[0]].copy_(d_out)
        self.barrier()

    def destroy(self) -> None:
        """Collective; see ParallelTensor.destroy."""
        self.world.workspaces.pop(self.sizes, None)
        of_results = (self.returned, self.results, self.row_values, self.slots)
        for tensor in (self.tokens, self.ids, self.weights, *of_results):
            if tensor is not None:
                tensor.destroy()

    def _next_epoch(self) -> None:
        self.epoch.add_(1)
        self.counters.zero_()

    def _share_routes(self, topk_ids: torch.Tensor, weights: torch.Tensor) -> None:
        length, num_counters, num_routes = self.ids.local.numel(), self.counters.numel(), topk_ids.numel()
        tensors = (topk_ids, weights, self.ids.local, self.weights.local, self.counters, self.epoch)
        arguments = (*tensors, num_routes, length, self.sizes.num_experts, num_counters)
        num_programs = -(-max(length, num_counters) // 1024)
        self.launches.run(
            ("share", num_routes),
            tensors,
            lambda: launch(dispatch_kernels().share_kernel, num_programs, arguments, {"BLOCK": 1024}),
        )

    def barrier(self) -> None:
        """Collective: what all ranks have done before is there. Nothing while the workspace is loading."""
        if not self._is_loading:
            self.world.barrier()

    def _gather_tables(self) -> None:
        if not self.is_gpu:
            for rank in range(self.world.size):
                self._all_ids[rank].copy_(self.ids.peer(rank))
                self._all_weights[rank].copy_(self.weights.peer(rank))
            return
        length = self.sizes.capacity * self.sizes.top_k
        num_programs = self.world.size * -(-length // 1024)
        ids, weights = self.ids, self.weights
        tensors = (ids.local, ids.offsets, weights.local, weights.offsets, self._all_ids, self._all_weights)
        self.launches.run(
            "tables",
            tensors,
            lambda: launch(dispatch_kernels().tables_kernel, num_programs, (*tensors, length), {"BLOCK": 1024}),
        )
        if self._is_loading:
            self._all_ids.fill_(-1)  # what peers have there now is nobody's route

    def _load(self) -> None:
        """Tokens without routes go forward and backward, for each dtype of ids and weights and both layouts, so that
        CUDA has loaded every kernel before one waits: nobody is told, nothing waited for. Epochs begin behind it."""
        from tilecrew.moe.expert_parallel import load

        self._is_loading = True
        with self.world.use(), torch.enable_grad():
            load(self)
            self.epoch.fill_(as_int32(self.world.first_epoch))
        torch.cuda.synchronize(self.world.device)
        self._is_loading = False


def dispatch_kernels() -> Any:
    """The module of device code, loaded by who launches it."""
    return importlib.import_module("tilecrew.moe.kernel_dispatch_gemm")


def tell(world: World, what: str) -> None:
    """The other processes, which wait for this one to agree, learn that it has raised."""
    if isinstance(world, World) and world.size > 1 and world.stream is None:
        with contextlib.suppress(ValueError):
            world.agree(what)


def check_sizes(world: World, sizes: MoESizes) -> None:
    """Raises TypeError or ValueError for sizes that no workspace can have."""
    if not isinstance(world, World):
        raise TypeError(f"world must be a tilecrew.parallel.World, got {type(world).__name__}")
    for name, multiple in (("capacity", 1), ("top_k", 1), ("num_experts", 1), ("hidden_size", 8)):
        _check_count(name, getattr(sizes, name), multiple)
    _check_count("intermediate_size", sizes.intermediate_size, 8)
    if sizes.top_k > sizes.num_experts:
        raise ValueError(f"top_k must be at most num_experts = {sizes.num_experts}, got {sizes.top_k}")
    dtypes = fusion.GPU_DTYPES if world.device.type == "cuda" else fusion.CPU_DTYPES
    require_dtype("x", torch.empty(0, dtype=sizes.dtype), dtypes, because=" where ranks address each other's memory")
    num_routes = world.size * sizes.capacity * sizes.top_k
    most = max_rows(num_routes, len(expert_range(0, sizes.num_experts, world.size)), ROW_BLOCK)
    if most > MAX_ROWS:
        raise ValueError(
            f"capacity must be such that the rows of a rank, at most those of all ranks, are at most {MAX_ROWS}; "
            f"got {sizes.capacity} tokens a rank, {world.size} ranks and K = {sizes.top_k}"
        )


def _check_count(name: str, value: object, multiple: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < multiple or value % multiple:
        kind = f"a positive multiple of {multiple}" if multiple > 1 else "at least 1"
        raise ValueError(f"{name} must be {kind}, got {value}")
