"""AllGatherGemm: every rank multiplies the rows of all ranks by its own weights, and they arrive while it does."""

import importlib

import torch

from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm.hooks import BandGate
from tilecrew.grouped_gemm.schedule import Problem, pick
from tilecrew.parallel import fusion
from tilecrew.parallel.memory import ordinary_tensors
from tilecrew.parallel.signal import Signals
from tilecrew.parallel.tensor import ParallelTensor
from tilecrew.parallel.world import World


class AllGatherGemm:
    """out = concatenation of x of all ranks, in their order, @ w: the first half of a tensor-parallel layer.

    Making one is collective, and so is every call. Protocol of a call, on every rank:

        barrier                     nobody still reads the shards of the call before
        x -> own shard; barrier     the shards of all ranks are there
        communication blocks        pull rows of all ranks, 16 at a time, own ones first and then the ring, into one
                                    matrix; counter of the 128-row block += rows that have landed (release, scope gpu)
        GEMM, beside them           its gate (BandGate) holds a tile back until the row blocks of its band are complete.
                                    It takes the rows of ranks in the same order, in two launches, where a rank's rows
                                    are whole row blocks

    The grid of the GEMM leaves the communication blocks their SMs, so that those run whoever starts first. On the CPU
    the same is done by torch: each rank tells the others by a slot that its shard is there, and multiplies the rows of
    a rank when that rank has told.

    Args:
        world: this rank's World.
        w: [K, N], this rank's columns; K and N multiples of 8, K the same on all ranks; bfloat16 or float16 (on the
            CPU also float32 and float64), contiguous in K or N. Kept and read at each call.
        num_rows: rows of each rank's x, at least 1; the same on all ranks.
        num_comm_blocks: blocks that pull; at least 1 and less than the rank's multiprocessors. None: a quarter of
            them, at most 8. On the CPU None.

    Raises TypeError or ValueError for a bad argument, where no grouped GEMM with gates runs on the GPU, and on every
    rank where ranks differ.
    """

    @ordinary_tensors()
    def __init__(self, world: World, w: torch.Tensor, num_rows: int, *, num_comm_blocks: int | None = None) -> None:
        fusion.check_weights(world, w)
        fusion.check_rows(world, num_rows)
        self.num_comm_blocks = fusion.comm_blocks(world, num_comm_blocks)
        self.world, self.w, self.num_rows = world, w, num_rows
        num_inner, num_columns = w.shape
        self._is_gpu = world.device.type == "cuda"
        total = world.size * num_rows
        dtype = str(w.dtype).removeprefix("torch.")
        if self._is_gpu:
            self._segments = fusion.segments(world.rank, world.size, num_rows, world.device)
            self._schedules = [
                pick(
                    Problem(segment.num_rows, 1, num_inner, num_columns, dtype, has_gate=True),
                    hardware_of(world.device),
                )
                for segment in self._segments
            ]
        self.shards = ParallelTensor((num_rows, num_inner), w.dtype, world)
        with world.use():
            self._gathered = torch.zeros(total, num_inner, dtype=w.dtype, device=world.device)
            if self._is_gpu:
                self._make_gpu_parts(total)
        if not self._is_gpu:
            self._epoch = 0
            self._signals = Signals(world, 1)
        world.quiesce()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [num_rows, K] in the dtype of w, on the world's device. Returns [W * num_rows, N]; out, contiguous, is
        written and returned where it is given.

        On a GPU the result is on the rank's stream (in an emulated world its own, which `World.synchronize` waits
        for). Where a wait has failed it is NaN, and `World.synchronize` raises WaitError; on the CPU the call does.
        """
        fusion.check_input(self.world, x, self.w, self.num_rows)
        if not self._is_gpu:
            return self._on_cpu(x, out)
        fusion.follow_caller(self.world)
        with self.world.use():
            out = fusion.output(out, x, (self.world.size * self.num_rows, self.w.shape[1]))
            self._counters.zero_()
            self.world.barrier()
            self.shards.local.copy_(x)
            self.world.barrier()
            with fusion.beside_current_stream(self.world) as side:
                with side:
                    self._pull(self.world.control.local, self.world.size)
                self._multiply(out)
        return out

    def destroy(self) -> None:
        """Collective; see ParallelTensor.destroy."""
        self.shards.destroy()
        if not self._is_gpu:
            self._signals.destroy()

    def _make_gpu_parts(self, total: int) -> None:
        device = self.world.device
        self._counters = torch.zeros(-(-total // fusion.ROW_BLOCK), dtype=torch.int32, device=device)
        # Launches that load the kernels: nothing to pull, and nothing to wait for.
        out = self.w.new_empty(total, self.w.shape[1])
        self._counters.zero_()
        self.shards.local.copy_(torch.zeros_like(self.shards.local))
        with fusion.beside_current_stream(self.world) as side:
            with side:
                self._pull(fusion.scratch_control(self.world), 0)
            self._counters.fill_(fusion.ROW_BLOCK)
            self._multiply(out)
        torch.cuda.synchronize(device)

    def _pull(self, control: torch.Tensor, size: int) -> None:
        fusion.exchange_kernels().pull_kernel[(self.num_comm_blocks,)](
            self.shards.local,
            self.shards.offsets,
            self._gathered,
            self._counters,
            control,
            self.world.rank,
            size,
            self.num_rows,
            self.w.shape[0],
            **fusion.PULL_PIECE,
        )

    def _multiply(self, out: torch.Tensor) -> None:
        kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
        num_sms = self.world.num_sms - self.num_comm_blocks
        for segment, schedule in zip(self._segments, self._schedules, strict=True):
            counters, rows = self._counters[segment.first_block :], segment.rows
            gate = BandGate(counters, segment.offs, self.world.timeout_seconds)
            num_programs = min(schedule.num_programs, num_sms)
            x, hooks = self._gathered[rows], kernel.hooks_of(gate, None)
            kernel.launch(x, self.w[None], segment.offs, out[rows], schedule.tiles, num_programs, hooks).run()

    def _on_cpu(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        world, rows = self.world, self.num_rows
        out = fusion.output(out, x, (world.size * rows, self.w.shape[1]))
        world.barrier()
        self.shards.local.copy_(x)
        self._epoch += 1
        for peer in range(world.size):
            self._signals.put(0, peer, self._epoch)
        for step in range(world.size):
            peer = (world.rank + step) % world.size
            self._signals.wait(0, peer, self._epoch)
            landed = slice(peer * rows, (peer + 1) * rows)
            self._gathered[landed].copy_(self.shards.peer(peer))
            torch.mm(self._gathered[landed], self.w, out=out[landed])
        return out
