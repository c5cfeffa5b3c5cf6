"""Values of a simulated program beside numpy arrays and Python numbers: pointers, views of shared memory, descriptors.

Floating-point values are float32 arrays rounded to their element type; integers are int64 arrays or Python ints,
wrapped to their width by the operations that can overflow it. Tensors are logical arrays: layouts matter only for
addresses in shared memory and for inline assembly.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

INTEGER_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}
ELEMENT_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4}


class FaultError(Exception):
    """What a simulated kernel does wrong: the message says what, where, and between whom."""


def round_to(x: Any, element: str) -> np.ndarray:
    """Rounds float32 values to an element type, to nearest even, kept as float32."""
    x = np.asarray(x, np.float32)
    if element == "f32":
        return x
    if element == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if element == "bf16":
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(x), x, rounded.view(np.float32))
    raise ValueError(f"no rounding to {element}")


def wrap(x: Any, element: str) -> Any:
    """Wraps integers to the width of their type, two's complement; i1 is 0 or 1."""
    bits = INTEGER_BITS[element]
    if bits == 64:
        return x
    if bits == 1:
        return x & 1
    half = 1 << (bits - 1)
    return ((x + half) & ((1 << bits) - 1)) - half


class GlobalTensor:
    """Global memory of one tensor argument: the elements of its storage, from its first one on.

    data       float32 or int64 values, flat, in storage order
    written    which elements the kernel has written
    """

    def __init__(self, name: str, element: str, data: np.ndarray) -> None:
        self.name, self.element, self.data = name, element, data
        self.written = np.zeros(data.shape, bool)

    def check(self, offsets: np.ndarray, what: str, location: str) -> None:
        if offsets.size and (offsets.min() < 0 or offsets.max() >= self.data.size):
            raise FaultError(
                f"{location}: {what} out of bounds of {self.name}: elements {offsets.min()} to {offsets.max()}, "
                f"it has {self.data.size}"
            )


@dataclass(frozen=True)
class Pointer:
    """Elements of a global tensor: `offset` is an int, or an array for a tensor of pointers."""

    tensor: GlobalTensor
    offset: Any


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor: a box of a strided tensor, with the layout of the tile in shared memory."""

    pointer: Pointer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def offsets(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(offsets, inside), both of the shape of the box: elements outside of the tensor have no offset."""
        offsets: np.ndarray = np.zeros(self.box, np.int64)
        inside = np.ones(self.box, bool)
        for axis, (start, size, extent, stride) in enumerate(
            zip(coordinates, self.box, self.shape, self.strides, strict=True)
        ):
            index = start + np.arange(size, dtype=np.int64)
            view = [1] * len(self.box)
            view[axis] = size
            offsets = offsets + (index * stride).reshape(view)
            inside &= ((index >= 0) & (index < extent)).reshape(view)
        return offsets + self.pointer.offset, inside
