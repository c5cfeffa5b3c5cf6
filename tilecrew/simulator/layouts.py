"""Where Triton's layouts put the elements of a tensor: threads and registers, and bytes of shared memory.

A distributed layout is linear over GF(2): the coordinates of an element are the exclusive or of one basis vector for
each set bit of the register, lane and warp numbers. `register_map` builds these bases as Triton does and then fits
them to the tensor's shape: a basis that leaves a smaller tensor becomes zero (several holders of one element; of a
`linear` layout such registers are dropped), a larger tensor is covered by more registers, the dimension that varies
fastest first.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

WARP_SIZE = 32
# The largest extent of a box that one TMA copy moves; Triton lays shared tiles out in such boxes.
_BOX = 256


class Layout(Protocol):
    """A layout attribute: its kind (`blocked`, `nvmma_shared`, ...) and its parameters by name."""

    @property
    def kind(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]: ...


Basis = tuple[int, ...]


@dataclass
class _Bases:
    """Basis vectors of a distributed layout, and its dimensions from the fastest to the slowest."""

    register: list[Basis]
    lane: list[Basis]
    warp: list[Basis]
    order: tuple[int, ...]

    def levels(self) -> tuple[list[Basis], list[Basis], list[Basis]]:
        return self.register, self.lane, self.warp


def _bits(size: int) -> int:
    if size < 1 or size & (size - 1):
        raise ValueError(f"{size} is not a power of two")
    return size.bit_length() - 1


def _tile(sizes: Sequence[int], order: Iterable[int], start: list[int]) -> list[Basis]:
    """Bases that walk over `sizes` steps of each dimension in `order`; `start` is one step, and grows."""
    bases = []
    for dimension in order:
        for _ in range(_bits(sizes[dimension])):
            bases.append(tuple(start[dimension] if k == dimension else 0 for k in range(len(sizes))))
            start[dimension] *= 2
    return bases


def _blocked(parameters: dict[str, Any]) -> _Bases:
    order = tuple(parameters["order"])
    start = [1] * len(order)
    register, lane, warp = (
        _tile(parameters[name], order, start) for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
    )
    return _Bases(register, lane, warp, order)


def _linear(parameters: dict[str, Any]) -> _Bases:
    if any(any(basis) for basis in parameters.get("block", [])):
        raise ValueError("more than one block")
    levels: list[list[Basis]] = [[tuple(basis) for basis in parameters[name]] for name in ("register", "lane", "warp")]
    if any(sum(map(bool, basis)) > 1 for level in levels for basis in level):
        raise ValueError("a basis that moves in two dimensions")
    # a dimension is the faster the earlier a register moves along it; the others follow, last dimension first
    moves = [k for basis in levels[0] for k, x in enumerate(basis) if x]
    order = dict.fromkeys([*moves, *reversed(range(len(levels[1][0])))])
    return _Bases(levels[0], levels[1], levels[2], tuple(order))


def _nvidia_mma(parameters: dict[str, Any]) -> _Bases:
    version, warps = parameters["versionMajor"], parameters["warpsPerCTA"]
    if version not in (2, 3) or len(warps) != 2:
        raise ValueError("only versions 2 and 3 of two dimensions are supported")
    rows, columns = parameters["instrShape"][-2:] if version == 2 else parameters["instrShape"][:2]
    if rows != 16:
        raise ValueError("an instruction has 16 rows in each warp")
    register: list[Basis] = [(0, 1), (8, 0), *((0, 8 << k) for k in range(_bits(columns) - 3))]
    lane: list[Basis] = [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]
    # warps of mma.sync are numbered along rows of the warp grid, those of wgmma down its columns
    warp = _tile(warps, (1, 0) if version == 2 else (0, 1), [rows, columns])
    return _Bases(register, lane, warp, (1, 0))


def _fit(bases: _Bases, shape: tuple[int, ...], keeps_registers: bool) -> _Bases:
    """The bases for a tensor of this shape; `keeps_registers`: also those that a smaller tensor makes equal."""
    if len(shape) != len(bases.order):
        raise ValueError(f"shape {shape} has not {len(bases.order)} dimensions")
    if not keeps_registers:
        inside = [b for b in bases.register if all(x < size for x, size in zip(b, shape, strict=True))]
        bases = _Bases(inside, bases.lane, bases.warp, bases.order)
    register, lane, warp = (
        [tuple(x if x < size else 0 for x, size in zip(basis, shape, strict=True)) for basis in level]
        for level in bases.levels()
    )
    for dimension in bases.order:
        extent = 1
        for basis in (*register, *lane, *warp):
            extent = max(extent, 2 * basis[dimension])
        more = [1] * len(shape)
        more[dimension] = max(1, shape[dimension] // extent)
        start = [extent if k == dimension else 0 for k in range(len(shape))]
        register += _tile(more, (dimension,), start)
    return _Bases(register, lane, warp, bases.order)


def _slice(layout: Layout, shape: tuple[int, ...]) -> _Bases:
    dimension, parent = int(layout.parameters["dim"]), layout.parameters["parent"]
    bases = _fitted(parent, (*shape[:dimension], 1, *shape[dimension:]))
    register, lane, warp = (
        [(*basis[:dimension], *basis[dimension + 1 :]) for basis in level] for level in bases.levels()
    )
    # along registers a slice keeps one of equal values, across lanes and warps all of them
    register = [basis for basis in register if any(basis)]
    return _Bases(register, lane, warp, tuple(k - (k > dimension) for k in bases.order if k != dimension))


def _fitted(layout: Layout, shape: tuple[int, ...]) -> _Bases:
    if layout.kind == "slice":
        return _slice(layout, shape)
    makers = {"blocked": _blocked, "linear": _linear, "nvidia_mma": _nvidia_mma}
    if layout.kind not in makers:
        raise ValueError("expected blocked, linear, nvidia_mma or slice")
    return _fit(makers[layout.kind](layout.parameters), shape, keeps_registers=layout.kind != "linear")


def _combine(bases: list[Basis], rank: int) -> np.ndarray:
    """Coordinates [2 ** len(bases), rank] of every combination of bases."""
    coordinates = np.zeros((1, rank), np.int64)
    for basis in bases:
        coordinates = np.concatenate([coordinates, coordinates ^ np.array(basis, np.int64)])
    return coordinates


def register_map(layout: Layout, shape: tuple[int, ...], num_warps: int) -> np.ndarray:
    """Flat row-major indices of the elements that each thread holds, int64 [32 * num_warps, registers].

    Threads count from the first of the warp group that holds the tensor. Registers come in the order of Triton's
    struct of a thread's values, which is the one that elementwise inline assembly sees: for nvidia_mma, within a warp's
    16 rows, 8-column tile by tile [r, c], [r, c + 1], [r + 8, c], [r + 8, c + 1] with r = lane // 4 and
    c = 2 * (lane % 4); then the next columns, and last (outermost) the next rows. An element that several threads or
    registers hold appears several times.

    Args:
        layout: blocked, linear, nvidia_mma of version 2 or 3, or a slice of one of these.
        shape: shape of the tensor; powers of two.
        num_warps: warps of the warp group.

    Raises:
        ValueError: the layout is of another kind, or not one of such a tensor in that many warps.
    """
    try:
        bases = _fitted(layout, shape)
        if len(bases.lane) != _bits(WARP_SIZE) or len(bases.warp) != _bits(num_warps):
            raise ValueError(
                f"made for {1 << len(bases.warp)} warps of {1 << len(bases.lane)} threads, not {num_warps}"
            )
        rank = len(shape)
        threads, registers = _combine([*bases.lane, *bases.warp], rank), _combine(bases.register, rank)
        strides = np.array([math.prod(shape[k + 1 :]) for k in range(rank)], np.int64)
        indices = (threads[:, None] ^ registers) @ strides
        if np.unique(indices).size != math.prod(shape):
            raise ValueError("the layout does not cover the tensor")
    except (KeyError, ValueError) as error:
        raise ValueError(f"no register map of {layout} for shape {shape}: {error}") from error
    return indices


def _blocks(rows: int, columns: int, width: int) -> np.ndarray:
    """Offsets in elements [rows, columns] where blocks of `width` columns follow each other, each row by row."""
    block, position = np.divmod(np.arange(columns), width)
    return block * rows * width + np.arange(rows)[:, None] * width + position


def _nvmma_shared(parameters: dict[str, Any], shape: tuple[int, ...], element_bits: int) -> np.ndarray:
    swizzle, size = parameters["swizzlingByteWidth"], element_bits // 8
    if parameters.get("elementBitWidth", element_bits) != element_bits or parameters.get("fp4Padded", False):
        raise ValueError(f"the elements have {element_bits} bits")
    if parameters.get("transposed", False):
        if len(shape) != 2 or swizzle == 0 or max(shape) > _BOX:
            raise ValueError(f"transposed needs a swizzle and two dimensions of at most {_BOX}")
        return _nvmma_shared({**parameters, "transposed": False}, shape[::-1], element_bits).T
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if len(shape) > 2 and max(shape[:-1]) > _BOX:
        raise ValueError(f"a leading dimension above {_BOX}")
    if swizzle == 0:
        if columns > _BOX and max(shape[:-1], default=1) > _BOX:
            raise ValueError(f"rows and columns above {_BOX}")
        return (_blocks(rows, columns, min(columns, _BOX)) * size).reshape(shape)
    if swizzle not in (32, 64, 128) or columns * size % swizzle or rows % 8:
        raise ValueError(f"a tile needs whole blocks of 8 rows of {swizzle} bytes")
    offsets = _blocks(rows, columns, swizzle // size) * size
    # 16-byte chunks of a row are permuted by the row's number among the 8 rows that span the banks
    phase = np.arange(rows) // (128 // swizzle) % (swizzle // 16)
    return (offsets ^ (phase * 16)[:, None]).reshape(shape)


def _swizzled_shared(parameters: dict[str, Any], shape: tuple[int, ...], element_bits: int) -> np.ndarray:
    order = parameters["order"]
    if parameters["maxPhase"] != 1:
        raise ValueError("only maxPhase = 1 is supported")
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"order {order} is not one of {len(shape)} dimensions")
    slowest_first = list(reversed(order))
    plain = np.arange(math.prod(shape), dtype=np.int64).reshape([shape[k] for k in slowest_first])
    return plain.transpose(np.argsort(slowest_first)) * (element_bits // 8)


def shared_addresses(layout: Layout, shape: tuple[int, ...], element_bits: int) -> np.ndarray:
    """Byte offset of every element of one tile in shared memory, int64 of the tile's shape.

    A swizzled nvmma_shared tile consists of blocks as wide as the swizzle, one after the other, each row by row; all
    dimensions but the last count as rows. Within a block the 16-byte chunks of a row are permuted: at a width of 128
    bytes, chunk k of row r lies where chunk k ^ (r % 8) would. Without swizzle a tile is row-major, in blocks of 256
    columns where it has more (a TMA box has no more).

    Args:
        layout: nvmma_shared, or swizzled_shared with maxPhase = 1.
        shape: shape of the tile: of one stage, where a buffer has several.
        element_bits: width of an element; whole bytes.

    Raises:
        ValueError: the layout is of another kind, or not one of such a tile.
    """
    makers = {"nvmma_shared": _nvmma_shared, "swizzled_shared": _swizzled_shared}
    try:
        if layout.kind not in makers:
            raise ValueError("expected nvmma_shared or swizzled_shared")
        if element_bits % 8:
            raise ValueError(f"elements of {element_bits} bits are not whole bytes")
        return makers[layout.kind](layout.parameters, shape, element_bits)
    except (KeyError, ValueError) as error:
        raise ValueError(f"no shared addresses of {layout} for shape {shape}: {error}") from error
