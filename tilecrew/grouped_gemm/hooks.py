"""Hooks of a grouped GEMM: what waits in front of a tile (Gate), what happens to its accumulator, and who is told when
it has landed (both Epilogue).

A hook is an *instance* of a small class. Its device half is a `gluon.jit` function, the class attribute `apply`,
`landed` or `wait`; its host half says which tensors and constants that function gets, and computes the same in torch. A
compiled kernel is cached under the source of the device function and of all that it calls, not under the name of the
class.
"""

from typing import Any

import torch

from tilecrew._shapes import require_dtype, require_same_device, require_tensor
from tilecrew.grouped_gemm.schedule import max_row_blocks

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gate:
    """Base of gates. The load role calls a gate once for each tile, before it loads the tile's first rows.

    wait(row_block, num_rows, tensors)    device function. row_block: number of the 128-row block, counted over all
        groups, none of which shares a block with another; num_rows: rows of it that belong to its group. It returns
        when these rows of x may be read by TMA.
    tensors    what the device function gets, as pointers
    check(num_rows_of_blocks)    torch twin: raises where rows are missing, for devices on which nothing runs beside the
        call
    check_inputs(x)    raises where its tensors do not fit, before anything is launched
    """

    @property
    def tensors(self) -> tuple[Any, ...]:
        return ()

    def check_inputs(self, x: torch.Tensor) -> None:
        return None

    def check(self, num_rows_of_blocks: list[int]) -> None:
        raise NotImplementedError


class NoGate(Gate):
    """All rows are there: nothing waits, and nothing is compiled."""

    @property
    def wait(self) -> Any:
        from tilecrew.grouped_gemm.kernel_gates import no_gate

        return no_gate

    def check(self, num_rows_of_blocks: list[int]) -> None:
        return None


class CountGate(Gate):
    """Waits until the counter of a row block has reached the number of its rows.

    counters: [number of 128-row blocks, or more] int32, on the device of x. Whoever writes rows of x adds their number
        to the block's counter with release semantics (scope gpu) behind the writes.
    timeout_seconds: a wait that takes longer ends the kernel with a trap, which torch reports as a CUDA error.
    """

    def __init__(self, counters: torch.Tensor, timeout_seconds: float = 10.0) -> None:
        _counters("counters", counters)
        if not 0 < timeout_seconds <= 3600:
            raise ValueError(f"timeout_seconds must be above 0 and at most 3600, got {timeout_seconds}")
        self.counters = counters
        self.timeout_seconds = timeout_seconds

    @property
    def wait(self) -> Any:
        from tilecrew.grouped_gemm.kernel_gates import count_gate

        return count_gate

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.counters, int(self.timeout_seconds * 1e9))

    def check_inputs(self, x: torch.Tensor) -> None:
        require_same_device("counters", self.counters, "x", x)
        num_blocks = -(-x.shape[0] // 128)
        if self.counters.shape[0] < num_blocks:
            raise ValueError(
                f"counters must have an element for each row block, at least {num_blocks} for {x.shape[0]} rows of x, "
                f"got {self.counters.shape[0]}"
            )

    def check(self, num_rows_of_blocks: list[int]) -> None:
        for block, (count, expected) in enumerate(zip(self.counters.tolist(), num_rows_of_blocks, strict=False)):
            if count < expected:
                raise RuntimeError(f"row block {block} has {count} of {expected} rows, and nothing can bring more")


class BandGate(CountGate):
    """Waits for all row blocks of a band of tiles (`schedule.BAND` row blocks, and all their columns).

    The tiles of a band are computed side by side, and those of a column read the same weights. Where each starts as
    soon as its own row block is there, they stay as far apart as these have come, and read one after the other weights
    that have left the L2 cache meanwhile.

    counters, timeout_seconds: as of CountGate. What brings rows of a band must not wait for tiles of this launch.
    offs: as of the call; lengths of all groups but the last must be multiples of 128, on which row blocks of other
    groups would be counted wrongly, and waited for in vain.
    """

    def __init__(self, counters: torch.Tensor, offs: torch.Tensor, timeout_seconds: float = 10.0) -> None:
        super().__init__(counters, timeout_seconds)
        _counters("offs", offs)
        require_same_device("offs", offs, "counters", counters)
        self.offs = offs

    @property
    def wait(self) -> Any:
        from tilecrew.grouped_gemm.kernel_gates import band_gate

        return band_gate

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors, self.offs, self.offs.shape[0])


class Epilogue:
    """Base of epilogues: functions of the float32 accumulator, before it is rounded to the dtype of x, and what follows
    when its tile is in global memory.

    apply(accumulator, group, rows, columns, tensors, constants)    device function -> [R, C // shrink]. accumulator:
        [R, C] float32, C = 64 columns at a time; group: number of the rows' group; rows [R] and columns [C]: indices
        into x and into the columns of w, 0 where there is none; both in the accumulator's layout.
    reference(accumulator, groups)    torch twin: [M, N] accumulator, [M] int64 group of each row -> [M, N // shrink].
        Where gradients are wanted it is what is differentiated.
    tensors      what the device function gets, as pointers, and integers
    constants    integers that it is compiled for
    shrink       accumulator columns for one output column, 1 or 2
    keeps_zero   it makes zeros of zeros, whatever its tensors hold; saves a selection for rows behind the last offset
    check(x, w)  raises where its tensors do not fit

    landed(row_block, column_block, num_rows, num_calls, tensors)    device function, or None. Called by a warp
        of its own, once a tile, when the tile's rows are in global memory, fenced so that one thread's release at gpu
        scope publishes them to ordinary loads and, behind a proxy fence, to TMA. row_block: as gates count it, 128
        rows; column_block: of the tile; num_rows: rows of the row block that belong to its group; num_calls: how often
        it is called for this row block in all, from any number of blocks at once. Not called for rows behind the last
        offset.
    landed_tensors    what `landed` gets, as pointers, and integers
    landed_reference(num_rows_of_blocks)    torch twin, called once when everything is stored, for devices on which
        nothing runs beside the call
    """

    shrink = 1
    keeps_zero = False
    landed: Any = None

    @property
    def landed_tensors(self) -> tuple[Any, ...]:
        return ()

    def landed_reference(self, num_rows_of_blocks: list[int]) -> None:
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Any, ...]:
        return ()

    @property
    def constants(self) -> tuple[int, ...]:
        return ()

    def check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        return None

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Identity(Epilogue):
    """Leaves the accumulator as it is."""

    keeps_zero = True

    @property
    def apply(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import identity

        return identity

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return accumulator


class Bias(Epilogue):
    """Adds bias[group, column]. bias: [E, N], floating point."""

    def __init__(self, bias: torch.Tensor) -> None:
        require_tensor("bias", bias)
        require_dtype("bias", bias, FLOATS)
        self.bias = bias

    @property
    def apply(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import bias

        return bias

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.bias, *self.bias.stride())

    def check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        expected = (w.shape[0], w.shape[2])
        if self.bias.shape != expected:
            raise ValueError(f"bias must have shape [E, N] = {expected}, got {tuple(self.bias.shape)}")
        require_same_device("bias", self.bias, "x", x)

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return accumulator + self.bias.to(accumulator.dtype)[groups]


class SiLU(Epilogue):
    """x * sigmoid(x)."""

    keeps_zero = True

    @property
    def apply(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import silu

        return silu

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(accumulator)


class GELU(Epilogue):
    """torch.nn.functional.gelu. approximate: "none" (the error function) or "tanh"."""

    keeps_zero = True

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    @property
    def apply(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import gelu

        return gelu

    @property
    def constants(self) -> tuple[int, ...]:
        return (int(self.approximate == "tanh"),)

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(accumulator, approximate=self.approximate)


class SwiGLU(Epilogue):
    """silu(gate) * up, over columns of w in which gate and up alternate: the output has N / 2 columns.

    run: how many gate columns stand before as many up columns: 1 (gate, up, gate, up, ...), 8, 16 or 32. 8 suits the
    kernels best, where a thread has both of a pair; with 2 or 4 it would not. `interleave` makes such weights from two.
    """

    shrink = 2
    keeps_zero = True

    def __init__(self, run: int = 1) -> None:
        if run not in (1, 8, 16, 32):
            raise ValueError(f"run must be 1, 8, 16 or 32, got {run!r}")
        self.run = run

    @property
    def apply(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import swiglu

        return swiglu

    @property
    def constants(self) -> tuple[int, ...]:
        return (self.run,)

    def check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        multiple = max(16, 2 * self.run)
        if w.shape[2] % multiple:
            raise ValueError(f"w must have N a multiple of {multiple} for SwiGLU(run={self.run}), got N = {w.shape[2]}")

    def interleave(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[..., N / 2] gate and up -> [..., N], as this epilogue takes them."""
        pairs = [x.unflatten(-1, (-1, self.run)) for x in (gate, up)]
        return torch.stack(pairs, -2).flatten(-3)

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        runs = accumulator.unflatten(-1, (-1, 2, self.run))
        return (torch.nn.functional.silu(runs[..., 0, :]) * runs[..., 1, :]).flatten(-2)


class RouteWeight(Epilogue):
    """Multiplies row m by weight[m]. weight: [M], floating point."""

    def __init__(self, weight: torch.Tensor) -> None:
        require_tensor("weight", weight)
        require_dtype("weight", weight, FLOATS)
        self.weight = weight

    @property
    def apply(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import route_weight

        return route_weight

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.weight, *self.weight.stride())

    def check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        if self.weight.shape != x.shape[:1]:
            raise ValueError(f"weight must have shape [M] = ({x.shape[0]},), got {tuple(self.weight.shape)}")
        require_same_device("weight", self.weight, "x", x)

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return accumulator * self.weight.to(accumulator.dtype)[:, None]


class NotifyRowBlock(Epilogue):
    """Sets rows[row_block] to the number of its rows as soon as all columns of the row block are in global memory.

    That is what `CountGate(rows)` of a following grouped GEMM waits for, or any kernel that acquires at gpu scope: it
    may start while this one runs. Each tile counts with release semantics; the one that brings a row block's last
    columns publishes it. Row blocks have 128 rows, never of two groups, and are numbered group after group.

    rows: int32 vector on the device of x, at least `max_row_blocks(M, E)` long. Zeros before the call; the caller
        resets them before the next one.
    arrivals: the same, for counting; None makes it. Zeros before the call, and again afterwards.
    epilogue: what is done to the accumulator before, e.g. SwiGLU(8); None: nothing.
    """

    def __init__(
        self, rows: torch.Tensor, arrivals: torch.Tensor | None = None, epilogue: Epilogue | None = None
    ) -> None:
        arrivals = _counters("rows", rows).new_zeros(rows.shape) if arrivals is None else arrivals
        _counters("arrivals", arrivals)
        require_same_device("arrivals", arrivals, "rows", rows)
        if arrivals is rows or arrivals.data_ptr() == rows.data_ptr() != 0:
            raise ValueError("arrivals must be another tensor than rows")
        if epilogue is not None and not isinstance(epilogue, Epilogue):
            raise TypeError(f"epilogue must be None or an instance of hooks.Epilogue, got {epilogue!r}")
        if epilogue is not None and epilogue.landed is not None:
            raise ValueError(f"epilogue must have no landed of its own, got {type(epilogue).__name__}")
        self.rows, self.arrivals = rows, arrivals
        self.epilogue = Identity() if epilogue is None else epilogue

    @property
    def shrink(self) -> int:  # type: ignore[override]
        return self.epilogue.shrink

    @property
    def keeps_zero(self) -> bool:  # type: ignore[override]
        return self.epilogue.keeps_zero

    @property
    def apply(self) -> Any:
        return self.epilogue.apply  # type: ignore[attr-defined]

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.epilogue.tensors

    @property
    def constants(self) -> tuple[int, ...]:
        return self.epilogue.constants

    @property
    def landed(self) -> Any:
        from tilecrew.grouped_gemm.kernel_epilogues import notify_row_block

        return notify_row_block

    @property
    def landed_tensors(self) -> tuple[Any, ...]:
        return self.rows, self.arrivals

    def check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        self.epilogue.check(x, w)
        num_blocks = max_row_blocks(x.shape[0], w.shape[0])
        for name, counters in (("rows", self.rows), ("arrivals", self.arrivals)):
            require_same_device(name, counters, "x", x)
            if counters.shape[0] < num_blocks:
                raise ValueError(
                    f"{name} must have at least max_row_blocks(M, E) = {num_blocks} elements, got {counters.shape[0]}"
                )

    def reference(self, accumulator: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return self.epilogue.reference(accumulator, groups)

    def landed_reference(self, num_rows_of_blocks: list[int]) -> None:
        self.rows[: len(num_rows_of_blocks)] = torch.tensor(num_rows_of_blocks, dtype=torch.int32)


def _counters(name: str, counters: torch.Tensor) -> torch.Tensor:
    require_tensor(name, counters)
    require_dtype(name, counters, (torch.int32,))
    if counters.dim() != 1 or not counters.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector, got shape {tuple(counters.shape)}")
    return counters
