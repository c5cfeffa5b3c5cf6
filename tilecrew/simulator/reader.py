"""Reads the textual TTGIR of a compiled Gluon kernel (Triton 3.6's `compiled.asm["ttgir"]`) into plain Python values.

The text is read completely or not at all: a form, a type or an attribute that the reader does not know is a ValueError
that quotes its line. Four things that the text says are checked but not kept, because no value depends on them: the
columns of locations, the attributes of functions and of their arguments, and whether a memdesc is mutable. Nothing is
added either: a region of scf.if or scf.for whose empty scf.yield is not printed ends without one.
"""

import re
import struct
from collections.abc import Callable
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
    """A tt.func. argument_names: as in the source, where a descriptor's flattened arguments share their name."""

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


def read(text: str) -> Program:
    """Read the TTGIR of a module with one public function; what cannot be read is a ValueError that quotes its line."""
    return _Reader(text).program()


# How an operation reads after its name | the types of its operands | those of its results | the operations that do.
# "%" a value, "%*" values between commas or none, ",%*" more of them; "{}" attributes, "~" attributes without braces;
# "t" a type, "t*" types between commas, ":t*" these or nothing, "(t)" types in parentheses or one type; "kind:x" a
# value of that kind for attribute x; anything else stands for itself. Types: "1" what the second place for types names,
# "0:i1" the same with elements i1, "0:*" with what it points to, "..." once for each operand left; where operands may
# be missing, they are the last ones.
_TABLE = """
% {} : t | 0 | 0 | arith.negf math.absf math.absi math.ceil math.cos math.erf math.exp math.exp2 math.floor math.log
% {} : t | 0 | 0 | math.log2 math.rsqrt math.sin math.sqrt
% , % {} : t | 0 0 | 0 | arith.addi arith.subi arith.muli arith.divsi arith.divui arith.remsi arith.remui arith.andi
% , % {} : t | 0 0 | 0 | arith.ori arith.xori arith.shli arith.shrsi arith.shrui arith.maxsi arith.minsi arith.maxui
% , % {} : t | 0 0 | 0 | arith.minui arith.addf arith.subf arith.mulf arith.divf arith.remf arith.maxnumf arith.minnumf
% , % {} : t | 0 0 | 0 | arith.maximumf arith.minimumf
% , % , % {} : t | 0 0 0 | 0 | math.fma
% {} : t to t | 0 | 1 | arith.extsi arith.extui arith.trunci arith.extf arith.truncf arith.sitofp arith.uitofp
% {} : t to t | 0 | 1 | arith.fptosi arith.fptoui arith.bitcast arith.index_cast
% {} : t -> t | 0 | 1 | tt.splat tt.broadcast tt.expand_dims tt.reshape tt.trans tt.bitcast tt.ptr_to_int tt.int_to_ptr
% {} : t -> t | 0 | 1 | ttg.convert_layout ttg.local_load ttg.memdesc_trans ttg.memdesc_reinterpret
word:predicate , % , % {} : t | 0 0 | 0:i1 | arith.cmpi arith.cmpf
% , % , % {} : condition | 0 1 1 | 1 | arith.select
% , % {} : t , t | 0 1 | 0 | tt.addptr
word:axis {} : t | | 0 | tt.get_program_id tt.get_num_programs
{} : t | | 0 | tt.make_range
% , % {} : t -> t | 0 0 | 1 | tt.join
% {} : t -> t | 0 | 1 1 | tt.split
% ,%* ~ {} : t | 0 0:i1 0:* | 0:* | tt.load
% , % ,%* ~ {} : t | 0 0:* 0:i1 | | tt.store
% , % , % ~ {} : t * t -> t | 0 1 2 | 2 | tt.dot
% , % , % ,%* {} : t * t -> t | 0 1 2 i1 | 2 | ttng.warp_group_dot
% ,%* {} : t* | 0 | 0 | ttng.warp_group_dot_wait
string:asm {} % ,%* : t* -> t* | 0 | 1 | tt.elementwise_inline_asm
@ word:callee ( %* ) {} : (t) -> (t) | 0 | 1 | tt.call
%* {} : (t) -> (t) | 0 | 1 | ttg.local_alloc
% , % {} : t -> t | 0 1 | | ttg.local_store
% {} : t | 0 | | ttg.local_dealloc ttng.inval_barrier
% [ % ] {} : t -> t | 0 i32 | 1 | ttg.memdesc_index
% [ integers:offsets ] {} : t -> t | 0 | 1 | ttg.memdesc_subslice
% , integer:count {} : t | 0 | | ttng.init_barrier
% , integer:size , % {} : t | 0 i1 | | ttng.barrier_expect
% , integer:count ,%* {} : t | 0 i1 | | ttng.arrive_barrier
% , % ,%* {} : t | 0 i32 i1 | | ttng.wait_barrier
% [ % ,%* ] % , % , % ~ {} : t , t -> t | 0 i32... 2 1 i1 | | ttng.async_tma_copy_global_to_local
% [ % ,%* ] % {} : t , t | 0 i32... 1 | | ttng.async_tma_copy_local_to_global
{} | | | gpu.barrier ttng.fence_async_shared ttng.async_tma_store_wait
%* {} :t* | 0 | | scf.yield tt.return tt.reduce.return tt.scan.return ttg.warp_yield ttg.warp_return
( % ) %* {} :t* | i1 0 | | scf.condition
"""
_FORMS: dict[str, list[list[str]]] = {
    name: [part.split() for part in line.split("|")[:3]]
    for line in _TABLE.strip().split("\n")
    for name in line.split("|")[3].split()
}
_REQUIRED = {
    **dict.fromkeys(("tt.trans", "ttg.memdesc_trans"), ("order",)),
    **dict.fromkeys(("ttng.warp_group_dot_wait", "ttng.async_tma_store_wait"), ("pendings",)),
    **dict.fromkeys(("tt.expand_dims", "tt.reduce"), ("axis",)),
    "tt.scan": ("axis", "reverse"),
    "tt.make_range": ("start", "end"),
    "tt.elementwise_inline_asm": ("constraints", "packed_element", "pure"),
}
_WORDS = {
    "arith.cmpi": r"eq|ne|[su][lg][te]",
    "arith.cmpf": r"false|true|ord|uno|[ou](eq|ne|[lg][te])",
    **dict.fromkeys(("tt.get_program_id", "tt.get_num_programs"), "[xyz]"),
}
_I1 = ScalarType("i1")
_VALUE = r"%[\w$.]+(?:#\d+)?"
_FLOATS = {"f16": ("<H", "<e"), "bf16": ("<H", ""), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}


def _constant(text: str, element: str) -> int | float | bool | None:
    """The value of a constant as MLIR prints it, a float rounded to its type; None where that is not known."""
    if element == "i1":
        return {"true": True, "false": False}.get(text)
    if re.fullmatch(r"i\d+|index", element):
        return int(text) if re.fullmatch(r"-?\d+", text) else None
    if element not in _FLOATS or not re.search(r"[.x]", text):
        return None
    integer, real = _FLOATS[element]
    try:
        if element == "bf16":
            (bits,) = struct.unpack("<I", struct.pack("<f", float(text))) if "x" not in text else (int(text, 16) << 16,)
            rounded = bits + 0x7FFF + (bits >> 16 & 1) if "x" not in text else bits
            return struct.unpack("<f", struct.pack("<I", rounded & 0xFFFF0000))[0]
        packed = struct.pack(integer, int(text, 16)) if "x" in text else struct.pack(real, float(text))
        return struct.unpack(real, packed)[0]
    except (OverflowError, struct.error):
        return None


class _Reader:
    """A recursive descent through the text; `position` is the end of what was read, never past a blank after it."""

    def __init__(self, text: str):
        self.location_lines: dict[str, str] = {m[1]: m[0] for m in re.finditer(r"(?m)^(#loc\d*) = loc\(.*\)$", text)}
        self.locations: dict[str, tuple[str, str]] = {}
        self.layouts: dict[str, Layout] = {}
        self.text = re.sub(r"(?m)^#loc\d* = loc\(.*\)$", "", text)
        self.position = 0

    # What everything else is read with.

    def error(self, problem: str) -> ValueError:
        start = self.text.rfind("\n", 0, self.position) + 1
        line = self.text[start:].split("\n", 1)[0].strip()
        before, after = self.text.count("\n", 0, start), self.text[self.position :].lstrip()[:40]
        return ValueError(f"TTGIR line {before + 1}: {problem} at {after!r} in: {line}")

    def skip(self) -> None:
        self.position = self.blank_end()

    def blank_end(self) -> int:
        blank = re.compile(r"(?:\s+|//[^\n]*)*").match(self.text, self.position)
        assert blank is not None
        return blank.end()

    def match(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.blank_end())
        if found:
            self.position = found.end()
        return found

    def need(self, pattern: str, what: str) -> re.Match[str]:
        found = self.match(pattern)
        if not found:
            raise self.error(f"no {what}")
        return found

    def accept(self, literal: str) -> bool:
        return bool(self.match(re.escape(literal) + (r"\b" if literal[-1].isalnum() else "")))

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise self.error(f"no {literal!r}")

    def string(self) -> str:
        raw = self.need(r'"((?:[^"\\\n]|\\.)*)"', "string or known value")[1]
        try:
            return re.sub(rb"\\([0-9A-Fa-f]{2}|.)", self.unescaped, raw.encode()).decode()
        except UnicodeDecodeError:
            raise self.error("no UTF-8") from None

    def unescaped(self, found: re.Match[bytes]) -> bytes:
        if len(found[1]) == 2:
            return bytes([int(found[1], 16)])
        plain = {b"n": b"\n", b"t": b"\t", b"\\": b"\\", b'"': b'"'}.get(found[1])
        if plain is None:
            raise self.error("unknown escape")
        return plain

    def values(self) -> list[str]:
        """SSA names between commas, or none."""
        first = self.match(_VALUE)
        names = [first[0]] if first else []
        while first and (found := self.match(rf",\s*({_VALUE})")):
            names.append(found[1])
        return names

    def value(self) -> str:
        return self.need(_VALUE, "operand")[0]

    # Layouts, types, attributes, locations.

    def layout(self) -> Layout:
        if found := self.match(r"#(?:ttg|ttng)\.(\w+)"):
            if self.accept("<{"):
                parameters = self.dictionary()
                self.expect(">")
                return Layout(found[1], parameters)
            if found[1] == "shared_memory":
                return Layout(found[1], {})
            raise self.error("unknown form of layout")
        alias = self.need(r"#\w+", "layout")[0]
        if alias not in self.layouts:
            raise self.error(f"unknown alias {alias}")
        return self.layouts[alias]

    def scalar(self) -> str:
        element = r"(?:[iu]?i\d+|f16|f32|f64|bf16|f8E\w+)"
        return self.need(rf"(?:index|!ttg\.async\.token|!tt\.ptr<{element}(?:, \d+)?>|{element})(?![\w.])", "type")[0]

    def shape(self) -> tuple[int, ...]:
        return tuple(int(length) for length in self.need(r"(?:\d+x)*", "shape")[0].split("x")[:-1])

    def type(self) -> Type:
        if self.accept("tensor<"):
            shape, element = self.shape(), self.scalar()
            layout = self.layout() if self.accept(",") else None
            self.expect(">")
            return TensorType(shape, element, layout)
        if self.accept("!tt.tensordesc<"):
            block = self.type()
            if not isinstance(block, TensorType):
                raise self.error("no tensor in a descriptor")
            self.expect(">")
            return DescriptorType(block.shape, block.element, block.layout)
        if self.accept("!ttg.memdesc<"):
            shape, element = self.shape(), self.scalar()
            self.expect(",")
            layout = self.layout()
            self.expect(",")
            if self.layout().kind != "shared_memory":
                raise self.error("unknown memory")
            self.match(r",\s*mutable\b")
            whole = self.match(r",\s*(\d+(?:x\d+)*)")
            self.expect(">")
            return MemDescType(shape, element, layout, tuple(map(int, whole[1].split("x"))) if whole else None)
        return ScalarType(self.scalar())

    def types(self) -> list[Type]:
        kinds = [self.type()]
        while self.accept(","):
            kinds.append(self.type())
        return kinds

    def type_group(self) -> list[Type]:
        """Types in parentheses, perhaps none, or one type without."""
        if not self.accept("("):
            return [self.type()]
        if self.accept(")"):
            return []
        kinds = self.types()
        self.expect(")")
        return kinds

    def types_to_types(self) -> tuple[list[Type], list[Type]]:
        self.expect(":")
        kinds = self.type_group()
        self.expect("->")
        return kinds, self.type_group()

    def attribute(self) -> Any:
        if found := self.match(r"(?:true|false)\b"):
            return found[0] == "true"
        if self.accept("array<"):
            self.need(r"[if]\d+", "element type")
            if self.accept(":"):
                return self.sequence(">")
            self.expect(">")
            return []
        if self.accept("["):
            return [] if self.accept("]") else self.sequence("]")
        if self.accept("{"):
            return self.dictionary()
        if self.match(r"(?=#)"):
            return self.layout()
        if found := self.match(r"-?\d+(\.\d+(?:[eE][+-]?\d+)?)?(?![\w.])"):
            if self.accept(":"):
                self.scalar()
            return float(found[0]) if found[1] else int(found[0])
        return self.string()

    def sequence(self, end: str) -> list[Any]:
        values = [self.attribute()]
        while self.accept(","):
            values.append(self.attribute())
        self.expect(end)
        return values

    def dictionary(self) -> dict[str, Any]:
        """The rest of a dictionary after its "{"; a name alone is True."""
        entries: dict[str, Any] = {}
        while not self.accept("}"):
            if entries:
                self.expect(",")
            bare = self.match(r"[A-Za-z_][\w$.]*")
            name = bare[0] if bare else self.string()
            if name in entries:
                raise self.error(f"{name} twice")
            entries[name] = self.attribute() if self.accept("=") else True
        return entries

    def attributes(self, entries: dict[str, Any]) -> None:
        """Add to the entries what flags, <{...}> and {...} there are."""
        while found := self.match(r"(overflow|fastmath)<([\w, ]+)>|(<)?\{"):
            new = {found[1]: found[2]} if found[1] else self.dictionary()
            if found[3]:
                self.expect(">")
            if both := new.keys() & entries.keys():
                raise self.error(f"{', '.join(sorted(both))} twice")
            entries.update(new)

    def integer(self) -> Any:
        return int(self.need(r"\d+\b", "number")[0])

    def word(self) -> str:
        return self.need(r"\w+", "word")[0]

    def integers(self) -> Any:
        return [int(number) for number in self.need(r"\d+(?:, \d+)*", "numbers")[0].split(",")]

    def location(self) -> tuple[str, str]:
        """(name, place): of a call's site the innermost place that is known."""
        if self.accept("unknown"):
            return "", ""
        if found := self.match(r"#loc\d*\b"):
            return self.named_location(found[0])
        if self.accept("callsite("):
            name, place = self.location()
            self.expect("at")
            outer = self.location()[1]
            self.expect(")")
            return name, place or outer
        if self.accept("fused["):
            parts = [self.location()]
            while self.accept(","):
                parts.append(self.location())
            self.expect("]")
            return parts[0][0], next((place for _, place in parts if place), "")
        text = self.string()
        if found := self.match(r":(\d+):\d+\b"):
            return "", f"{text.rsplit('/', 1)[-1]}:{found[1]}"
        place = ""
        if self.accept("("):
            place = self.location()[1]
            self.expect(")")
        return text, place

    def named_location(self, alias: str) -> tuple[str, str]:
        if alias not in self.locations:
            line = self.location_lines.pop(alias, "")  # popped: a location within itself is unknown too
            if not line:
                raise self.error(f"unknown location {alias}")
            inner = _Reader("")
            inner.text, inner.location_lines, inner.locations = line, self.location_lines, self.locations
            inner.expect(f"{alias} = loc(")
            found = inner.location()
            inner.need(r"\)$", "end of the location")
            self.locations[alias] = found
        return self.locations[alias]

    def trailing_location(self) -> tuple[str, str]:
        if not self.accept("loc("):
            return "", ""
        found = self.location()
        self.expect(")")
        return found

    # Operations.

    def operation(self) -> Operation:
        self.skip()
        results: list[str] = []
        while found := self.match((r",\s*" if results else "") + r"(%[\w$.]+)(?::(\d+))?"):
            results += [f"{found[1]}#{number}" for number in range(int(found[2]))] if found[2] else [found[1]]
        if results:
            self.expect("=")
        generic = self.match(r'(?=")')
        name = self.string() if generic else self.need(r"[a-z_]\w*(?:\.\w+)+", "operation")[0]
        own: Any = getattr(self, "form_" + name.replace(".", "_"), None)
        operands: list[str] = []
        attributes: dict[str, Any] = {}
        if generic or own:
            read_form = self.generic if generic else own
            operand_types, result_types, *regions = read_form(operands, attributes)
        elif name in _FORMS:
            operand_types, result_types, *regions = self.formatted(name, operands, attributes)
        else:
            raise self.error(f"unknown operation {name}")
        if len(operands) != len(operand_types) or len(results) != len(result_types):
            counts = (
                f"{len(operands)} for {len(operand_types)} operands, {len(results)} for {len(result_types)} results"
            )
            raise self.error(f"names and types differ in number: {counts}")
        for required in _REQUIRED.get(name, ()):
            if required not in attributes:
                raise self.error(f"no attribute {required} of {name}")
        if name in ("tt.load", "tt.store"):
            attributes["num_operands"] = len(operands)
        if name == "ttng.warp_group_dot":
            attributes["has_use_acc"] = len(operands) == 4
            attributes.setdefault("isAsync", False)  # not printed where it is false
        place, types = self.trailing_location()[1], (tuple(operand_types), tuple(result_types))
        return Operation(name, tuple(results), tuple(operands), attributes, *types, tuple(regions), place)

    def formatted(self, name: str, operands: list[str], attributes: dict[str, Any]) -> tuple[list[Type], list[Type]]:
        """Read an operation of the table."""
        tokens, *typings = _FORMS[name]
        kinds: list[list[Type]] = []
        readers: dict[str, Callable[[], Any]] = {
            "%": lambda: operands.append(self.value()),
            "%*": lambda: operands.extend(self.values()),
            ",%*": lambda: operands.extend(self.values()) if self.accept(",") else None,
            "{}": lambda: self.attributes(attributes),
            "~": lambda: attributes.update(self.bare_attributes()),
            "t": lambda: kinds.append([self.type()]),
            "t*": lambda: kinds.append(self.types()),
            ":t*": lambda: kinds.append(self.types() if self.accept(":") else []),
            "(t)": lambda: kinds.append(self.type_group()),
            "condition": lambda: kinds.extend([kind] for kind in self.condition_and_type()),
        }
        for token in tokens:
            kind, _, attribute = token.partition(":")
            if token in readers:
                readers[token]()
            elif attribute:
                attributes[attribute] = getattr(self, kind)()
                if not re.fullmatch(_WORDS.get(name, ".*"), str(attributes[attribute]), re.DOTALL):
                    raise self.error(f"unknown {attribute} {attributes[attribute]}")
            else:
                self.expect(token)
        parts = [[self.typed(token.removesuffix("..."), kinds) for token in typing] for typing in typings]
        missing = len(operands) - sum(map(len, parts[0]))
        operand_types: list[Type] = []
        for token, part in zip(typings[0], parts[0], strict=True):
            operand_types += part * (missing + 1) if token.endswith("...") else part
        optional = len(tokens) > 1 and ",%*" in tokens and len(typings[0]) > 1
        return operand_types[: len(operands)] if optional else operand_types, [
            kind for part in parts[1] for kind in part
        ]

    def typed(self, token: str, kinds: list[list[Type]]) -> list[Type]:
        """The types that a part of the table's typing means."""
        place, _, element = token.partition(":")
        if not place.isdigit():
            return [ScalarType(place)]
        if not element:
            return kinds[int(place)]
        (kind,) = kinds[int(place)]
        if element == "*":
            pointer = re.fullmatch(r"!tt\.ptr<(\w+)>", getattr(kind, "name", getattr(kind, "element", "")))
            if not pointer:
                raise self.error("no pointers to global memory")
            element = pointer[1]
        return [TensorType(kind.shape, element, kind.layout) if isinstance(kind, TensorType) else ScalarType(element)]

    def condition_and_type(self) -> list[Type]:
        """The types of arith.select, which prints that of its condition where it is no scalar."""
        kinds = self.types()
        return kinds if len(kinds) == 2 else [_I1, *kinds]

    def bare_attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while entry := self.match(r"(?:,\s*)?(inputPrecision|cacheModifier|evictionPolicy) = (\w+)"):
            found[entry[1]] = entry[2]
        return found

    def form_arith_constant(self, operands: list[str], attributes: dict[str, Any]) -> Any:
        dense = self.accept("dense<")
        number = r"true\b|false\b|0x[0-9A-Fa-f]+\b|-?\d+(?:\.\d+(?:[eE][+-]?\d+)?)?(?![\w.])"
        text = self.need(number, "constant of one value")[0]
        if dense:
            self.expect(">")
        kind: Type = _I1
        if dense or text not in ("true", "false"):
            self.expect(":")
            kind = self.type()
        value = _constant(text, kind.name if isinstance(kind, ScalarType) else kind.element)
        if value is None or dense != isinstance(kind, TensorType):
            raise self.error(f"unknown constant {text}")
        attributes.update(value=value, dense=dense)
        return [], [kind]

    def generic(self, operands: list[str], attributes: dict[str, Any]) -> Any:
        regions: list[Region] = []
        self.expect("(")
        operands += self.values()
        self.expect(")")
        self.attributes(attributes)
        if self.accept("("):
            regions.append(self.region())
            while self.accept(","):
                regions.append(self.region())
            self.expect(")")
            self.attributes(attributes)
        return *self.types_to_types(), *regions

    def initial_values(self, operands: list[str]) -> list[str]:
        """Read `(%name = %value, ...)`: return the names, add the values to the operands."""
        names: list[str] = []
        self.expect("(")
        while not self.accept(")"):
            if names:
                self.expect(",")
            names.append(self.value())
            self.expect("=")
            operands.append(self.value())
        return names

    def carried(self, names: list[str], kinds: list[Type]) -> tuple[tuple[str, Type], ...]:
        if len(names) != len(kinds):
            raise self.error(f"{len(names)} names with {len(kinds)} types")
        return tuple(zip(names, kinds, strict=True))

    def form_scf_for(self, operands: list[str], attributes: dict[str, Any]) -> Any:
        names = [self.value()]
        for word in ("=", "to", "step"):
            self.expect(word)
            operands.append(self.value())
        kinds: list[Type] = []
        if self.accept("iter_args"):
            names += self.initial_values(operands)
            self.expect("->")
            kinds = self.type_group()
        counter = self.type() if self.accept(":") else ScalarType("index")
        body = self.region(self.carried(names, [counter, *kinds]))
        self.attributes(attributes)
        return [counter, counter, counter, *kinds], kinds, body

    def form_scf_if(self, operands: list[str], attributes: dict[str, Any]) -> Any:
        operands.append(self.value())
        kinds = self.type_group() if self.accept("->") else []
        then = self.region()
        other = self.region() if self.accept("else") else Region((), ())
        self.attributes(attributes)
        return [_I1], kinds, then, other

    def form_scf_while(self, operands: list[str], attributes: dict[str, Any]) -> Any:
        names = self.initial_values(operands) if self.match(r"(?=\()") else []
        initial, kinds = self.types_to_types()
        before = self.region(self.carried(names, initial))
        self.expect("do")
        after = self.region()
        if self.accept("attributes"):
            self.attributes(attributes)
        return initial, kinds, before, after

    def form_ttg_warp_specialize(self, operands: list[str], attributes: dict[str, Any]) -> Any:
        self.expect("(")
        operands += self.values()
        self.expect(")")
        if self.accept("attributes"):
            self.attributes(attributes)
        self.expect("default")
        regions = [self.region()]
        num_warps: list[int] = []
        while self.accept(f"partition{len(num_warps)}"):
            arguments = tuple((name, kind) for name, kind, _ in self.arguments())
            num_warps.append(int(self.need(r"num_warps\((\d+)\)", "num_warps")[1]))
            regions.append(self.region(arguments))
        attributes["partition_num_warps"] = num_warps
        return *self.types_to_types(), *regions

    def arguments(self) -> list[tuple[str, Type, str]]:
        """(name, type, name of the location) of each argument between parentheses."""
        found: list[tuple[str, Type, str]] = []
        self.expect("(")
        while not self.accept(")"):
            if found:
                self.expect(",")
            name = self.value()
            self.expect(":")
            kind = self.type()
            if self.accept("{"):
                self.dictionary()
            found.append((name, kind, self.trailing_location()[0]))
        return found

    def region(self, arguments: tuple[tuple[str, Type], ...] = ()) -> Region:
        self.expect("{")
        if not arguments and self.match(r"\^\w+"):
            if self.match(r"(?=\()"):
                arguments = tuple((name, kind) for name, kind, _ in self.arguments())
            self.expect(":")
        operations: list[Operation] = []
        while not self.accept("}"):
            operations.append(self.operation())
        return Region(arguments, tuple(operations))

    def function(self) -> tuple[Function, bool]:
        """The rest of a function after its `tt.func`, and whether it is public."""
        visibility = self.need(r"(public|private|)\s*@([\w$.]+)", "function")
        arguments = self.arguments()
        if self.accept("->"):
            self.type_group()
        if self.accept("attributes"):
            self.expect("{")
            self.dictionary()
        names = tuple(source or name[1:] for name, _, source in arguments)
        pairs = tuple((name, kind) for name, kind, _ in arguments)
        function = Function(visibility[2], pairs, names, self.region(pairs))
        self.trailing_location()
        return function, visibility[1] != "private"

    def program(self) -> Program:
        self.skip()
        while found := self.match(r"(#\w+) = "):
            if found[1] in self.layouts:
                raise self.error(f"{found[1]} twice")
            self.layouts[found[1]] = self.layout()
            self.skip()
        self.expect("module")
        attributes: dict[str, Any] = {}
        if self.accept("attributes"):
            self.expect("{")
            attributes = self.dictionary()
        self.expect("{")
        functions: dict[str, Function] = {}
        kernels: list[Function] = []
        while not self.accept("}"):
            self.skip()
            self.expect("tt.func")
            function, public = self.function()
            functions[function.name] = function
            kernels += [function] * public
        self.trailing_location()
        self.skip()
        if self.position != len(self.text):
            raise self.error("more than a module")
        if len(kernels) != 1:
            raise self.error(f"{len(kernels)} public functions")
        return Program(functions, kernels[0], attributes, self.layouts)
