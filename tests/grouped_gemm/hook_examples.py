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
