"""Two hooks with one class name, for test_hook_keys.py."""

import torch

from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm import Epilogue, Gate


@gluon.jit
def three(x):
    return x * 3.0


@gluon.jit
def eight(x):
    return x * 8.0


def scaled_by_three():
    class Scale(Epilogue):
        @gluon.jit
        def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):  # noqa: N805
            return three(accumulator)

        def reference(self, accumulator, groups):
            return accumulator * 3

    return Scale()


def scaled_by_eight():
    class Scale(Epilogue):
        @gluon.jit
        def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):  # noqa: N805
            return eight(accumulator)

        def reference(self, accumulator, groups):
            return accumulator * 8

    return Scale()


def scaled_by(factor):
    """One class, whose function closes over another value each time."""
    value = gl.constexpr(factor)

    class Scale(Epilogue):
        @gluon.jit
        def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):  # noqa: N805
            return accumulator * value

        def reference(self, accumulator, groups):
            return accumulator * factor

    return Scale()


def counting_by(step):
    """One class, whose function behind the stores closes over another value each time; none where step is None."""
    value = gl.constexpr(step)

    class Count(Epilogue):
        def __init__(self):
            self.counter = torch.zeros(1, dtype=torch.int32)

        @gluon.jit
        def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):  # noqa: N805
            return accumulator

        @property
        def landed_tensors(self):
            return (self.counter,)

        def reference(self, accumulator, groups):
            return accumulator

        def landed_reference(self, num_rows_of_blocks):
            self.counter += step * len(num_rows_of_blocks)

    @gluon.jit
    def landed(row_block, column_block, num_rows, num_calls, tensors):
        gl.atomic_add(tensors[0], value)

    if step is not None:
        Count.landed = landed
    return Count()


class Plus(Epilogue):
    """A hook with a tensor, as a user writes it: adds shift[row % 4] and the number of the group."""

    def __init__(self, shift: torch.Tensor) -> None:
        self.shift = shift

    @property
    def tensors(self):
        return (self.shift,)

    @gluon.jit
    def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):  # noqa: N805
        return accumulator + (gl.load(tensors[0] + rows % 4) + group)[:, None]

    def reference(self, accumulator, groups):
        rows = torch.arange(accumulator.shape[0])
        return accumulator + (self.shift[rows % 4] + groups)[:, None]


class Record(Gate):
    """Waits for nothing, and notes what it is asked for: seen[row_block] = num_rows."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen

    @property
    def tensors(self):
        return (self.seen,)

    @gluon.jit
    def wait(row_block, num_rows, tensors):  # noqa: N805
        gl.store(tensors[0] + row_block, num_rows)

    def check(self, num_rows_of_blocks):
        self.seen[: len(num_rows_of_blocks)] = torch.tensor(num_rows_of_blocks, dtype=torch.int32)


class Trace(Epilogue):
    """Leaves accumulators as they are. When a row block is complete, counts the elements of it that are still NaN.

    calls, expected_calls [row blocks] and missing [1]: int32, -1 before the launch.
    """

    def __init__(self, out: torch.Tensor, offs: torch.Tensor, num_blocks: int, block_m: int) -> None:
        begins = zip([0, *offs.tolist()[:-1]], offs.tolist(), strict=True)
        first_rows = [row for begin, end in begins for row in range(begin, end, block_m)]
        assert len(first_rows) == num_blocks
        self.out, self.first_rows = out, torch.tensor(first_rows, dtype=torch.int32)
        self.calls, self.expected_calls = torch.empty(2, num_blocks, dtype=torch.int32).unbind()
        self.missing = torch.empty(1, dtype=torch.int32)

    @gluon.jit
    def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):  # noqa: N805
        return accumulator

    @property
    def landed_tensors(self):
        return self.calls, self.expected_calls, self.missing, self.out, self.first_rows, self.out.shape[1]

    @gluon.jit
    def landed(row_block, column_block, num_rows, num_calls, tensors):  # noqa: N805
        calls, expected_calls, missing, out, first_rows, num_columns = tensors
        before = gl.atomic_add(calls + row_block, 1, sem="acq_rel", scope="gpu")
        gl.store(expected_calls + row_block, num_calls)
        if before == num_calls - 2:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            column = gl.arange(0, 512, layout)
            first_row = gl.load(first_rows + row_block)
            for row in range(num_rows):
                value = gl.load(out + (first_row + row) * num_columns + column, mask=column < num_columns, other=0.0)
                value = value.to(gl.float32)
                gl.atomic_add(missing, gl.sum((value != value).to(gl.int32), 0))

    def reference(self, accumulator, groups):
        return accumulator

    def landed_reference(self, num_rows_of_blocks):
        self.missing.zero_()


class SimulatedCountGate(Gate):
    """CountGate in operations that the simulator knows."""

    def __init__(self, counters: torch.Tensor) -> None:
        self.counters = counters

    @property
    def tensors(self):
        return (self.counters,)

    @gluon.jit
    def wait(row_block, num_rows, tensors):  # noqa: N805
        count = gl.atomic_add(tensors[0] + row_block, 0, sem="acquire", scope="gpu")
        while count < num_rows:
            count = gl.atomic_add(tensors[0] + row_block, 0, sem="acquire", scope="gpu")

    def check(self, num_rows_of_blocks):
        return None


class OneAfterTheOther(SimulatedCountGate):
    """Holds a row block back until the one before has been notified, by the same launch: counters are `rows` of its
    NotifyRowBlock."""

    @gluon.jit
    def wait(row_block, num_rows, tensors):  # noqa: N805
        before = tensors[0] + gl.maximum(row_block - 1, 0)
        count = gl.atomic_add(before, 0, sem="acquire", scope="gpu")
        while (count == 0) & (row_block > 0):
            count = gl.atomic_add(before, 0, sem="acquire", scope="gpu")
