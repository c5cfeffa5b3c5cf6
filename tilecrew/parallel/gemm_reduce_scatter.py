"""GemmReduceScatter: every rank multiplies by its rows of the weights, and each sums its share of all products."""

import importlib
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm import operators
from tilecrew.grouped_gemm.hooks import Identity
from tilecrew.grouped_gemm.schedule import Problem, pick, supports
from tilecrew.parallel import fusion, host_signal
from tilecrew.parallel.memory import ordinary_tensors
from tilecrew.parallel.signal import Signals
from tilecrew.parallel.tensor import ParallelTensor
from tilecrew.parallel.world import World


class NotifyOwners(Identity):
    """Epilogue: the ranks that own rows of a 128-row block learn when this rank's products of it have landed.

    arrivals     [row blocks] int32, zeros before the call and again afterwards
    epoch        [1] int32: what is told
    signals      Signals with one slot for each row block
    num_rows     rows of each owner
    first_block  the row block that is the GEMM's first
    """

    def __init__(
        self, arrivals: torch.Tensor, epoch: torch.Tensor, signals: Signals, num_rows: int, first_block: int = 0
    ) -> None:
        world = signals.world
        self.arrivals, self.epoch, self.signals = arrivals, epoch, signals
        place = [world.rank, world.size, num_rows, first_block]
        self.place = torch.tensor(place, dtype=torch.int32, device=epoch.device)

    @property
    def landed(self) -> Any:
        return importlib.import_module("tilecrew.parallel.kernel_notify").notify_owners

    @property
    def landed_tensors(self) -> tuple[Any, ...]:
        cells = self.signals.cells
        return self.arrivals, self.epoch, cells.local, cells.offsets, self.place


class GemmReduceScatter:
    """Rank r's out = sum over ranks of x @ w, rows r * num_rows to (r + 1) * num_rows: the second half of a
    tensor-parallel layer, whose x and w are split along K.

    Making one is collective, and so is every call. Protocol of a call, on every rank:

        barrier                 nobody still reads the products of the call before; epoch + 1
        GEMM                    product, rounded to the dtype of x -> the rank's part of a parallel tensor; its epilogue
                                (NotifyOwners) writes the epoch to the slot of each complete 128-row block, on the ranks
                                that own its rows (release, scope sys). Rows of the next rank first, own ones last: two
                                launches, where a rank's rows are whole row blocks
        communication blocks    beside it: take pieces of this rank's rows in turn, wait for their row blocks' slots of
                                all ranks (acquire), then sum over ranks 0, 1, ... in float32 and round once. Behind the
                                GEMM blocks on its SMs do the same with what is left

    The order of the sum does not depend on who comes first: results are the same bits every time. The grid of the GEMM
    leaves the communication blocks their SMs. On GPUs whose grouped GEMM has no notifications a kernel behind it tells
    all row blocks at once, and the sum follows on the same stream; on the CPU torch does the same.

    Args:
        world: this rank's World.
        w: [K, N], this rank's rows of the weights; N the same on all ranks; else as for AllGatherGemm.
        num_rows: rows of each rank's result, at least 1; the same on all ranks.
        num_comm_blocks: blocks that wait and sum; as for AllGatherGemm.

    is_fused tells whether the epilogue notifies.

    Raises TypeError or ValueError for a bad argument, and on every rank where ranks differ.
    """

    @ordinary_tensors()
    def __init__(self, world: World, w: torch.Tensor, num_rows: int, *, num_comm_blocks: int | None = None) -> None:
        fusion.check_weights(world, w)
        fusion.check_rows(world, num_rows)
        self.num_comm_blocks = fusion.comm_blocks(world, num_comm_blocks)
        self.world, self.w, self.num_rows = world, w, num_rows
        self._is_gpu = world.device.type == "cuda"
        total = world.size * num_rows
        num_blocks = -(-total // fusion.ROW_BLOCK)
        self.partials = ParallelTensor((total, w.shape[1]), w.dtype, world)
        self._signals = Signals(world, num_blocks)
        with world.use():
            self._offs = torch.full((1,), total, dtype=torch.int32, device=world.device)
            self._epoch = torch.zeros(1, dtype=torch.int32, device=world.device)
            self._tickets = torch.zeros(1, dtype=torch.int32, device=world.device)
            self.is_fused = self._pick(total) is not None
            arrivals = torch.zeros(num_blocks, dtype=torch.int32, device=world.device)
            self._segments = fusion.segments((world.rank + 1) % world.size, world.size, num_rows, world.device)
            self._epilogues = [
                NotifyOwners(arrivals, self._epoch, self._signals, num_rows, segment.first_block)
                for segment in self._segments
            ]
            if self._is_gpu:
                self._load()
        world.quiesce()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [W * num_rows, K] in the dtype of w, on the world's device. Returns [num_rows, N]; out, contiguous, is
        written and returned where it is given.

        Streams and failed waits as for AllGatherGemm.
        """
        world = self.world
        fusion.check_input(world, x, self.w, world.size * self.num_rows)
        if not self._is_gpu:
            return self._on_cpu(x, out)
        fusion.follow_caller(world)
        with world.use():
            out = fusion.output(out, x, (self.num_rows, self.w.shape[1]))
            world.barrier()
            self._epoch.add_(1)
            self._tickets.zero_()
            if not self.is_fused:
                operators.run(x, self.w[None], self._offs, self.partials.local, None)
                self._notify(world.size)
                self._reduce(out, world.control.local, world.size, world.num_sms)
            else:
                with fusion.beside_current_stream(world) as side:
                    with side:
                        self._reduce(out, world.control.local, world.size, self.num_comm_blocks)
                    self._multiply(x)
                    self._reduce(out, world.control.local, world.size, world.num_sms - self.num_comm_blocks)
        return out

    def destroy(self) -> None:
        """Collective; see ParallelTensor.destroy."""
        self.partials.destroy()
        self._signals.destroy()

    def _pick(self, total: int) -> Any:
        """The schedule of a grouped GEMM with notifications; None where there is none on this device."""
        num_inner, num_columns = self.w.shape
        dtype = str(self.w.dtype).removeprefix("torch.")
        problem = Problem(total, 1, num_inner, num_columns, dtype, notifies=True)
        hardware = hardware_of(self.world.device)
        names = [name for name in ("hopper", "mma_sync") if supports(name, problem, hardware) is None]
        return pick(problem, hardware, names[0]) if names else None

    def _load(self) -> None:
        """Launches that load the kernels: nothing waits. Slots get epoch 0, which they hold."""
        x = self.w.new_zeros(self.world.size * self.num_rows, self.w.shape[0])
        self._epoch.add_(1)
        self._epoch.zero_()
        if not self.is_fused:
            operators.run(x, self.w[None], self._offs, self.partials.local, None)
            self._notify(0)
        else:
            self._multiply(x)
        out = x.new_empty(self.num_rows, self.w.shape[1])
        self._reduce(out, fusion.scratch_control(self.world), 0, self.num_comm_blocks)
        torch.cuda.synchronize(self.world.device)

    def _multiply(self, x: torch.Tensor) -> None:
        kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
        num_sms = self.world.num_sms - self.num_comm_blocks
        for segment, epilogue in zip(self._segments, self._epilogues, strict=True):
            schedule, rows = self._pick(segment.num_rows), segment.rows
            assert schedule is not None
            launch = kernel.launch(
                x[rows],
                self.w[None],
                segment.offs,
                self.partials.local[rows],
                schedule.tiles,
                min(schedule.num_programs, num_sms),
                kernel.hooks_of(None, epilogue),
            )
            launch.run()

    def _notify(self, size: int) -> None:
        cells, rank = self._signals.cells, self.world.rank
        host_signal.kernels().notify_kernel[(1,)](
            self._epoch, cells.local, cells.offsets, rank, size, self._signals.num_slots, num_warps=1
        )

    def _reduce(self, out: torch.Tensor, control: torch.Tensor, size: int, num_blocks: int) -> None:
        world = self.world
        fusion.exchange_kernels().reduce_kernel[(num_blocks,)](
            (self.partials.local, self.partials.offsets, out),
            (self._tickets, self._epoch, self._signals.cells.local, control, world.control.offsets),
            world.rank,
            size,
            self.num_rows,
            self.w.shape[1],
            host_signal.nanoseconds(world),
            **fusion.SUM_PIECE,
        )

    def _on_cpu(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        world = self.world
        out = fusion.output(out, x, (self.num_rows, self.w.shape[1]))
        world.barrier()
        torch.mm(x, self.w, out=self.partials.local)
        self._epoch += 1
        epoch = int(self._epoch)
        for peer in range(world.size):
            for slot in range(self._signals.num_slots):
                self._signals.put(slot, peer, epoch)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(self.num_rows, self.w.shape[1], dtype=wide)
        own = slice(world.rank * self.num_rows, (world.rank + 1) * self.num_rows)
        blocks = range(own.start // fusion.ROW_BLOCK, (own.stop - 1) // fusion.ROW_BLOCK + 1)
        for peer in range(world.size):
            for block in blocks:
                self._signals.wait(block, peer, epoch)
            total += self.partials.peer(peer)[own]
        return out.copy_(total)
