"""Runs a function in several processes of this host, one rank each: for tests, examples and scripts."""

import contextlib
import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tilecrew.parallel.world import World


class ProcessesError(RuntimeError):
    """Some processes have failed. errors: rank -> its traceback, or how the process ended."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))


def run_processes(
    function: Callable[..., Any],
    num_processes: int,
    *arguments: Any,
    device: str = "cpu",
    timeout_seconds: float = 30.0,
    limit_seconds: float = 300.0,
    first_epoch: int = 0,
) -> list[Any]:
    """function(world, *arguments) in `num_processes` new processes -> what each returned, in the order of ranks.

    Each process starts anew (no fork), so the function and its arguments must be picklable and the caller's script must
    guard its own start by `if __name__ == "__main__"`.

    Args:
        device: "cpu", or "cuda": rank r uses GPU r.
        timeout_seconds: longest wait of a rank for another.
        limit_seconds: processes that have not ended then are killed.
        first_epoch: as for World.from_group.

    Raises ProcessesError when all have ended, where any has raised, died or was killed.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and torch.cuda.device_count() < num_processes:
        raise ValueError(f"num_processes must be at most the {torch.cuda.device_count()} GPUs, got {num_processes}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tilecrew-") as folder:
        options = (num_processes, os.path.join(folder, "store"), device, timeout_seconds, first_epoch)
        processes, pipes = [], []
        for rank in range(num_processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(sender, rank, options, function, arguments), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            outcomes = _outcomes(pipes, time.monotonic() + limit_seconds)
        finally:
            for process in processes:
                process.join(1.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    errors = {}
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            errors[rank] = f"the process ended with code {processes[rank].exitcode} and said nothing"
        elif outcome[0] == "error":
            errors[rank] = outcome[1]
    if errors:
        raise ProcessesError(errors)
    return [outcome[1] for outcome in outcomes if outcome is not None]


def _outcomes(pipes: list[Any], deadline: float) -> list[tuple[str, Any] | None]:
    """What each process has sent; None where it ended, or time did, before it sent something."""
    outcomes: list[tuple[str, Any] | None] = [None] * len(pipes)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and time.monotonic() < deadline:
        for ready in connection.wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic())):
            rank = open_pipes.pop(ready)
            with contextlib.suppress(EOFError):
                outcomes[rank] = cast(Any, ready).recv()
    return outcomes


def _run(sender: Any, rank: int, options: tuple, function: Callable[..., Any], arguments: tuple) -> None:
    size, path, device, timeout_seconds, first_epoch = options
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
        )
        with World.from_group(device=device, timeout_seconds=timeout_seconds, first_epoch=first_epoch) as world:
            result = function(world, *arguments)
        sender.send(("result", result))
        dist.destroy_process_group()
    except BaseException:
        sender.send(("error", traceback.format_exc()))
        # Others may hang in calls that wait for this process; its end frees them.
        os._exit(1)
