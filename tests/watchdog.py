"""Ends a test process whose ranks hang, and says how far each of them is.

A kernel that spins may hold the host up in any call of CUDA. What is read for the report is therefore made beforehand:
a stream of its own, pinned memory for copies of all flags, and an event. The report goes to the true stderr, which is
only seen where pytest does not capture file descriptors (--capture=sys).
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time

import torch

from tilecrew.parallel.control import ABORT, EPOCH, barrier_offset, record_offset

EXIT_CODE = 70
READ_SECONDS = 5.0
_SHOWN = 24  # flags of a tensor that a line shows


class Flags:
    """Copies of the flags of ranks in host memory. tensors: (rank, name, tensor)."""

    def __init__(self, worlds):
        self.worlds, self.tensors = worlds, []
        for world in worlds:
            self.tensors.append((world.rank, "control", world.control.local))
            for sizes, workspace in world.workspaces.items():
                named = [("epoch", workspace.epoch), ("counters", workspace.counters)]
                if workspace.slots is not None:
                    named += [("arrivals", workspace.arrivals), ("slots", workspace.slots.cells.local)]
                self.tensors += [(world.rank, f"{name} of {sizes}", tensor) for name, tensor in named]
        self.is_gpu = worlds[0].device.type == "cuda"
        self.copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=self.is_gpu) for _, _, t in self.tensors]
        if self.is_gpu:
            self.stream, self.event = torch.cuda.Stream(worlds[0].device, priority=-1), torch.cuda.Event()
            torch.cuda.synchronize()
            self._start()
            self.event.synchronize()

    def _start(self):
        with torch.cuda.device(self.worlds[0].device), torch.cuda.stream(self.stream):
            for copy, (_, _, tensor) in zip(self.copies, self.tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self.event.record()

    def lines(self):
        """What the flags are now, one line each."""
        if self.is_gpu:
            self._start()
            end = time.monotonic() + READ_SECONDS
            while not self.event.query():
                if time.monotonic() > end:
                    return ["the flags cannot be read: copies do not end either"]
                time.sleep(0.01)
        else:
            for copy, (_, _, tensor) in zip(self.copies, self.tensors, strict=True):
                copy.copy_(tensor)
        found = []
        for (rank, name, _), copy in zip(self.tensors, self.copies, strict=True):
            if name == "control":
                found.append(f"rank {rank}: {self._control(copy)}")
            else:
                values = copy.flatten().tolist()
                more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
                found.append(f"rank {rank}: {name}: {values[:_SHOWN]}{more}")
        return found

    def _control(self, control):
        size = self.worlds[0].size
        slots = [int(control[barrier_offset(size, writer)]) for writer in range(size)]
        records = {}
        for rank in range(size):
            first = record_offset(rank)
            if control[first]:
                records[rank] = control[first + 1 : first + 5].tolist()
        return (
            f"abort {int(control[ABORT])}, barriers passed {int(control[EPOCH])}, barrier slots {slots}, failed waits "
            f"(slot, writer, expected, seen) {records}"
        )


def report(flags, seconds, what):
    """Writes all that is known to the true stderr."""
    out = sys.__stderr__
    print(f"\nwatchdog: {what} has not ended after {seconds} s. What the host does:", file=out, flush=True)
    faulthandler.dump_traceback(file=out, all_threads=True)
    try:
        print("\n".join(flags.lines()), file=out, flush=True)
    except RuntimeError as error:  # of CUDA
        print(f"the flags cannot be read: {error}", file=out, flush=True)


@contextlib.contextmanager
def watch(worlds, what, seconds=30.0, end=os._exit):
    """Where the block takes longer, reports and ends the process. The worlds' workspaces have been made."""
    flags = Flags(list(worlds))
    is_over = threading.Event()

    def wait():
        if is_over.wait(seconds):
            return
        # Where even reading hangs in CUDA, this ends the process.
        last = threading.Timer(3 * READ_SECONDS, end, (EXIT_CODE,))
        last.daemon = True
        last.start()
        report(flags, seconds, what)
        last.cancel()
        end(EXIT_CODE)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
