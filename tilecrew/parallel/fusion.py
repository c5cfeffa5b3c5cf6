"""What the fused operators share: checks of their sizes, communication blocks, kernels loaded before anybody waits.

On a GPU, CUDA loads a kernel when it is launched first, and may hold that back until running kernels have ended. One
that waits for a rank that loads would then wait for ever. Operators therefore launch each of their kernels once when
they are made, on arguments with which nothing waits.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tilecrew._shapes import require_dtype, require_tensor
from tilecrew.grouped_gemm.checks import ALIGNMENT, check_addresses
from tilecrew.parallel.control import control_length
from tilecrew.parallel.world import World, check_num_comm_blocks

GPU_DTYPES = (torch.bfloat16, torch.float16)
CPU_DTYPES = (*GPU_DTYPES, torch.float32, torch.float64)
MOST_COMM_BLOCKS = 8
ROW_BLOCK = 128
# What a block has on its way from a rank at a time: 32 and 16 KB.
PULL_PIECE = {"ROWS": 16, "COLUMNS": 1024, "num_warps": 16}
SUM_PIECE = {"ROWS": 8, "COLUMNS": 1024, "num_warps": 16}


class Segment(NamedTuple):
    """Rows that one launch of a GEMM multiplies, of the rows of all ranks. offs: [1] int32, their number."""

    first_row: int
    num_rows: int
    offs: torch.Tensor

    @property
    def first_block(self) -> int:
        return self.first_row // ROW_BLOCK

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


def segments(first_rank: int, size: int, num_rows: int, device: torch.device) -> list[Segment]:
    """The rows of all ranks, those of first_rank first, then those of the ranks behind it in the ring.

    All in one segment, in their order, where a row block would have rows of two ranks.
    """
    total, first = size * num_rows, first_rank * num_rows
    bounds = [(first, total), (0, first)] if first % ROW_BLOCK == 0 and first > 0 else [(0, total)]
    return [
        Segment(begin, end - begin, torch.full((1,), end - begin, dtype=torch.int32, device=device))
        for begin, end in bounds
    ]


def exchange_kernels() -> Any:
    """The module of device code, loaded by who launches it."""
    return importlib.import_module("tilecrew.parallel.kernel_exchange")


def check_weights(world: World, w: torch.Tensor) -> None:
    """Raises TypeError or ValueError where w is no [K, N] matrix that the operators take."""
    require_tensor("w", w)
    require_dtype("w", w, GPU_DTYPES if world.device.type == "cuda" else CPU_DTYPES)
    if w.dim() != 2 or w.shape[0] % 8 or w.shape[1] % 8 or 0 in w.shape:
        raise ValueError(f"w must be [K, N], both positive multiples of 8, got shape {tuple(w.shape)}")
    if 1 not in w.stride():
        raise ValueError(f"w must be contiguous in K or in N, got strides {w.stride()}")
    _check_alignment("w", w if w.stride(1) == 1 else w.T)
    if w.device != world.device:
        raise ValueError(f"w must be on the device of the world, {world.device}, got {w.device}")
    if w.requires_grad and torch.is_grad_enabled():
        raise ValueError("w must not require a gradient: the operator has none")


def check_input(world: World, x: torch.Tensor, w: torch.Tensor, num_rows: int) -> None:
    """Raises TypeError or ValueError where x is not [num_rows, K] beside w [K, N]."""
    require_tensor("x", x)
    require_dtype("x", x, (w.dtype,), because=", the dtype of w")
    expected = (num_rows, w.shape[0])
    if x.shape != expected:
        raise ValueError(f"x must have shape {expected}, got {tuple(x.shape)}")
    if x.device != world.device:
        raise ValueError(f"x must be on the device of the world, {world.device}, got {x.device}")
    if x.stride(1) != 1:
        raise ValueError(f"x must be contiguous in its last dimension, got strides {x.stride()}")
    _check_alignment("x", x)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x must not require a gradient: the operator has none")


def output(out: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A new output, or the checked one of the caller. Raises TypeError or ValueError where that does not fit."""
    if out is None:
        return x.new_empty(shape)
    require_tensor("out", out)
    require_dtype("out", out, (x.dtype,), because=", the dtype of x")
    if out.shape != shape or not out.is_contiguous() or out.device != x.device:
        raise ValueError(
            f"out must be contiguous, of shape {shape}, on {x.device}, got {tuple(out.shape)} with strides "
            f"{out.stride()} on {out.device}"
        )
    _check_alignment("out", out)
    return out


def _check_alignment(name: str, matrix: torch.Tensor) -> None:
    """Raises ValueError where rows of a matrix do not start at multiples of 16 bytes, as TMA needs."""
    check_addresses(**{name: matrix})
    stride = matrix.stride(0) if matrix.shape[0] > 1 else 0
    if stride < 0 or stride * matrix.element_size() % ALIGNMENT:
        raise ValueError(f"{name} must have rows {ALIGNMENT} bytes or a multiple apart, got strides {matrix.stride()}")


def check_rows(world: World, num_rows: int) -> None:
    """Raises TypeError or ValueError where num_rows, of each rank, is no count that fits kernels."""
    if isinstance(num_rows, bool) or not isinstance(num_rows, int):
        raise TypeError(f"num_rows must be an integer, got {type(num_rows).__name__}")
    most = (2**31 - 1024) // world.size
    if not 1 <= num_rows <= most:
        raise ValueError(f"num_rows must be from 1 to {most} for {world.size} ranks, got {num_rows}")


def comm_blocks(world: World, asked: int | None) -> int:
    """Blocks that communicate: the number asked for, checked, or a quarter of the SMs up to 8; 0 on the CPU."""
    if world.device.type != "cuda":
        if asked is not None:
            raise ValueError(f"num_comm_blocks must be None on the CPU, which has no blocks, got {asked}")
        return 0
    number = max(1, min(MOST_COMM_BLOCKS, world.num_sms // 4)) if asked is None else asked
    check_num_comm_blocks(number, world.num_sms)
    return number


def scratch_control(world: World) -> torch.Tensor:
    """A control block in which nothing waits, for launches that only load a kernel."""
    return torch.zeros(control_length(world.size), dtype=torch.int32, device=world.device)


@contextlib.contextmanager
def beside_current_stream(world: World) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Two halves that run side by side: what is launched in the context given runs on the side stream of the world, all
    else on the current one. Both are behind what that has been given before, and what comes later is behind both.

    with beside_current_stream(world) as side:
        with side:
            communicate()
        multiply()
    """
    stream, side = torch.cuda.current_stream(world.device), world.side_stream
    side.wait_stream(stream)
    try:
        yield torch.cuda.stream(side)
    finally:
        stream.wait_stream(side)  # where a launch has failed too: memory of the other half goes back to the stream


def follow_caller(world: World) -> None:
    """The rank's own stream goes on behind what the caller's stream has been given."""
    if world.stream is not None:
        caller = torch.cuda.current_stream(world.device)
        if caller != world.stream:
            world.stream.wait_stream(caller)
