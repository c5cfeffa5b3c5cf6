"""GemmReduceScatter: every rank multiplies by its rows of the weights, and each sums its share of all products."""

import torch

from tilecrew.grouped_gemm import operators
from tilecrew.parallel import fusion, host_signal
from tilecrew.parallel.signal import Signals
from tilecrew.parallel.tensor import ParallelTensor
from tilecrew.parallel.world import World


class GemmReduceScatter:
    """Rank r's out = sum over ranks of x @ w, rows r * num_rows to (r + 1) * num_rows: the second half of a
    tensor-parallel layer, whose x and w are split along K.

    Making one is collective, and so is every call. Protocol of a call, on every rank:

        barrier                 nobody still reads the products of the call before
        GEMM                    product, rounded to the dtype of x -> the rank's part of a parallel tensor
        notify                  behind it: epoch + 1 -> slot of this rank on every rank (release, scope sys)
        communication blocks    wait for the slots of all ranks (acquire), then sum this rank's rows over ranks 0, 1,
                                ... in float32 and round once

    The order of the sum does not depend on who comes first: results are the same bits every time.

    Args:
        world: this rank's World.
        w: [K, N], this rank's rows of the weights; N the same on all ranks; else as for AllGatherGemm.
        num_rows: rows of each rank's result, at least 1; the same on all ranks.
        num_comm_blocks: blocks that wait and sum; as for AllGatherGemm.

    Raises as AllGatherGemm does; GPUs may be of any kind that grouped_gemm supports.
    """

    def __init__(self, world: World, w: torch.Tensor, num_rows: int, *, num_comm_blocks: int | None = None) -> None:
        fusion.check_weights(world, w)
        fusion.check_rows(world, num_rows)
        self.num_comm_blocks = fusion.comm_blocks(world, num_comm_blocks)
        self.world, self.w, self.num_rows = world, w, num_rows
        self._is_gpu = world.device.type == "cuda"
        total = world.size * num_rows
        self.partials = ParallelTensor((total, w.shape[1]), w.dtype, world)
        self._signals = Signals(world, 1)
        self._offs = torch.full((1,), total, dtype=torch.int32, device=world.device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=world.device)
        if self._is_gpu:
            with world.use():
                self._load()
        world.quiesce()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [W * num_rows, K] in the dtype of w, on the world's device. Returns [num_rows, N].

        Streams and failed waits as for AllGatherGemm.
        """
        world = self.world
        fusion.check_input(world, x, self.w, world.size * self.num_rows)
        if not self._is_gpu:
            return self._on_cpu(x)
        fusion.follow_caller(world)
        with world.use():
            out = x.new_empty(self.num_rows, self.w.shape[1])
            world.barrier()
            operators.run(x, self.w[None], self._offs, self.partials.local, None)
            self._notify(world.size)
            self._reduce(out, world.control.local, world.size)
        return out

    def destroy(self) -> None:
        """Collective; see ParallelTensor.destroy."""
        self.partials.destroy()
        self._signals.destroy()

    def _load(self) -> None:
        """Launches that load the kernels: nobody is told, and nothing is waited for."""
        x = self.w.new_zeros(self.world.size * self.num_rows, self.w.shape[0])
        operators.run(x, self.w[None], self._offs, self.partials.local, None)
        self._notify(0)
        self._reduce(x.new_empty(self.num_rows, self.w.shape[1]), fusion.scratch_control(self.world), 0)
        self._epoch.zero_()
        torch.cuda.synchronize(self.world.device)

    def _notify(self, size: int) -> None:
        cells = self._signals.cells
        host_signal.kernels().notify_kernel[(1,)](
            self._epoch, cells.local, cells.offsets, self.world.rank, size, num_warps=1
        )

    def _reduce(self, out: torch.Tensor, control: torch.Tensor, size: int) -> None:
        world = self.world
        fusion.exchange_kernels().reduce_kernel[(self.num_comm_blocks,)](
            (self.partials.local, self.partials.offsets, out),
            self._epoch,
            self._signals.cells.local,
            control,
            world.control.offsets,
            world.rank,
            size,
            self.num_rows,
            self.w.shape[1],
            host_signal.nanoseconds(world),
            **fusion.PIECE,
        )

    def _on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        world = self.world
        world.barrier()
        torch.mm(x, self.w, out=self.partials.local)
        self._epoch += 1
        epoch = int(self._epoch)
        for peer in range(world.size):
            self._signals.put(0, peer, epoch)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(self.num_rows, self.w.shape[1], dtype=wide)
        own = slice(world.rank * self.num_rows, (world.rank + 1) * self.num_rows)
        for peer in range(world.size):
            self._signals.wait(0, peer, epoch)
            total += self.partials.peer(peer)[own]
        return total.to(x.dtype)
