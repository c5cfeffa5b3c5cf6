"""A compiled kernel as plain Python values: types, operations, regions, functions."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in registers or in memory: `#ttg.<kind><{parameters}>`, a parent layout among the latter."""

    kind: str
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        # In one order, for equal layouts to have equal hashes.
        object.__setattr__(self, "parameters", dict(sorted(self.parameters.items())))

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass(frozen=True)
class ScalarType:
    """A type without a shape: "i32", "bf16", "index", "!tt.ptr<f32>", "!ttg.async.token"."""

    name: str


@dataclass(frozen=True)
class TensorType:
    """A tensor in registers; its elements may be pointers ("!tt.ptr<f32>")."""

    shape: tuple[int, ...]
    element: str
    layout: Layout | None


@dataclass(frozen=True)
class MemDescType:
    """A tile in shared memory; allocation_shape is given for a slice of a larger tile, whose shape it then is."""

    shape: tuple[int, ...]
    element: str
    layout: Layout
    allocation_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DescriptorType:
    """A descriptor of a tensor in global memory, for copies of tiles of this shape and layout."""

    shape: tuple[int, ...]
    element: str
    layout: Layout | None


Type = ScalarType | TensorType | MemDescType | DescriptorType


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. Names keep their "%"; several results of one name are "%name#0", "%name#1".

    Operands stand in the order of the text; so do operand_types, one for each operand. location: "file.py:219" or "".
    """

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: dict[str, Any]
    operand_types: tuple[Type, ...]
    result_types: tuple[Type, ...]
    regions: tuple["Region", ...]
    location: str


@dataclass(frozen=True, eq=False)
class Region:
    """A block: its arguments as (name, type), and its operations in order."""

    arguments: tuple[tuple[str, Type], ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, eq=False)
class Function:
    """A tt.func. argument_names: as in the source. The values of a descriptor or a tuple share its name in Triton 3.6;
    since 3.8 they have a suffix each: "q_desc.shape.0".
    """

    name: str
    arguments: tuple[tuple[str, Type], ...]
    argument_names: tuple[str, ...]
    region: Region


@dataclass(frozen=True, eq=False)
class Program:
    """A module: its functions by name, the public one, its attributes, and its layouts by alias ("#blocked")."""

    functions: dict[str, Function]
    kernel: Function
    attributes: dict[str, Any]
    layouts: dict[str, Layout]
