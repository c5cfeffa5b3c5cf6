"""Where the parts of a parallel tensor live: one process for all ranks, memory that processes share, GPUs of a host.

A provider allocates on all ranks at once. `allocate` is collective: every rank calls it in the same order with the same
signature; where signatures differ ValueError is raised on every rank (in an emulated world: on the rank that differs
and, from then on, on all). Every part has been given to `initialize` before any rank gets to see any.
"""

import contextlib
import datetime
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT = 256  # bytes; every part begins at a multiple
# Hosts of GPUs meet behind compiling, which may take one rank minutes longer than another: no wait between kernels.
LONGEST_COMPILING = 900.0

Initialize = Callable[[torch.Tensor], None]  # of a part, uint8


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """What is allocated inside may be updated in place everywhere: tensors made under torch.inference_mode may be only
    under it. Whether gradients are enabled stays as it is, although leaving inference mode enables them."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


class Emulated:
    """n ranks as tensors of one process on one device. Ranks may run after each other or in threads."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._lock = threading.Lock()
        self._calls = [0] * size
        self._allocations: dict[int, tuple[str, list[torch.Tensor]]] = {}
        self._disagreement: str | None = None

    def check(self) -> None:
        if self._disagreement is not None:
            raise ValueError(self._disagreement)

    def allocate(self, rank: int, signature: str, num_bytes: int, initialize: Initialize) -> list[torch.Tensor]:
        with self._lock:
            self.check()
            call = self._calls[rank]
            self._calls[rank] += 1
            if call not in self._allocations:
                parts = [torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
                for part in parts:
                    initialize(part)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # ranks have streams of their own
                self._allocations[call] = (signature, parts)
            first, parts = self._allocations[call]
            if min(self._calls) > call:
                del self._allocations[call]  # every rank has its references
            if first != signature:
                self._disagreement = disagreement([first if r != rank else signature for r in range(self.size)])
                self.check()
            return list(parts)

    def agree(self, rank: int, signature: str) -> None:
        self.allocate(rank, signature, 0, lambda part: None)

    def meet(self) -> None:
        """Ranks of one process need not wait for each other before memory goes: references keep it."""

    def close(self) -> None:
        self._allocations.clear()


class Processes:
    """One rank a process. control: a gloo group of all, over which the hosts talk while nothing is measured."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        ranks = dist.get_process_group_ranks(self.group)
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        self.control = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def check(self) -> None:
        return None

    def agree(self, rank: int, signature: str) -> None:
        signatures = self.gather(signature)
        if len(set(signatures)) > 1:
            raise ValueError(disagreement(signatures))

    def meet(self) -> None:
        dist.barrier(group=self.control)

    def close(self) -> None:
        if self.control is not None:
            dist.destroy_process_group(self.control)
            self.control = None


class SharedMemory(Processes):
    """CPU processes of one host: all parts of a tensor in one file without a name, which every process maps."""

    def allocate(self, rank: int, signature: str, num_bytes: int, initialize: Initialize) -> list[torch.Tensor]:
        self.agree(rank, signature)
        stride = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        path = None
        if rank == 0:
            descriptor, path = tempfile.mkstemp(prefix="tilecrew-", dir=folder)
            os.truncate(descriptor, stride * self.size)
            os.close(descriptor)
        try:
            path = self.gather(path)[0]
            whole = torch.from_file(path, shared=True, size=stride * self.size, dtype=torch.uint8)
            parts = [whole[r * stride : r * stride + num_bytes] for r in range(self.size)]
            initialize(parts[rank])
            self.meet()  # all have mapped it
        finally:
            if rank == 0 and path is not None:
                os.unlink(path)  # the memory stays as long as somebody maps it, also where one is killed
        return parts


class SymmetricMemory(Processes):
    """One GPU a process, on one host: torch's symmetric memory. Multicast and torch's own signal pads are not used."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float, device: torch.device) -> None:
        super().__init__(group, max(timeout_seconds, LONGEST_COMPILING))
        self.device = device

    def allocate(self, rank: int, signature: str, num_bytes: int, initialize: Initialize) -> list[torch.Tensor]:
        self.agree(rank, signature)
        if self.size == 1:
            only = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            initialize(only)
            torch.cuda.synchronize(self.device)
            return [only]
        import torch.distributed._symmetric_memory as symmetric_memory

        # Where several ranks share the switch's multicast unit, or have none, torch must not ask for it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        length = max(num_bytes, ALIGNMENT)
        own = symmetric_memory.empty(length, dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(own, self.group)
        own.zero_()
        initialize(own[:num_bytes])
        torch.cuda.synchronize(self.device)
        view: Callable[..., torch.Tensor] = getattr(handle, "get_remote_tensor", handle.get_buffer)
        parts = [own if r == rank else view(r, (length,), torch.uint8) for r in range(self.size)]
        # How the own part is addressed shows how those of peers are.
        problem = None
        if view(rank, (length,), torch.uint8).data_ptr() != own.data_ptr():
            problem = "torch's symmetric memory gives views at another place than the tensor"
        problems = [found for found in self.gather(problem) if found]  # all have written theirs, too
        if problems:
            raise RuntimeError(problems[0])
        for peer, part in enumerate(parts):
            if peer != rank:
                # torch's views of peers keep nothing alive; the handle keeps them mapped.
                part.untyped_storage()._owner = (own, handle)  # type: ignore[attr-defined]
        return [part[:num_bytes] for part in parts]


def disagreement(signatures: list[str]) -> str:
    """One message for all ranks."""
    return "ranks disagree: " + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(signatures))
