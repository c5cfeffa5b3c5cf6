"""The parts that every line of TTGIR has: names, strings, types, layouts, attributes, locations."""

import re
import struct
from typing import Any

from tilecrew.simulator.ir import DescriptorType, Layout, MemDescType, ScalarType, TensorType, Type

I1 = ScalarType("i1")
VALUE = r"%[\w$.-]+(?:#\d+)?"
FLOATS = {"f16": ("<H", "<e"), "bf16": ("<H", ""), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}


def constant(text: str, element: str) -> int | float | bool | None:
    """The value of a constant as MLIR prints it, a float rounded to its type; None where that is not known."""
    if element == "i1":
        return {"true": True, "false": False}.get(text)
    if re.fullmatch(r"i\d+|index", element):
        return int(text) if re.fullmatch(r"-?\d+", text) else None
    if element not in FLOATS or not re.search(r"[.x]", text):
        return None
    integer, real = FLOATS[element]
    try:
        if element == "bf16":
            (bits,) = struct.unpack("<I", struct.pack("<f", float(text))) if "x" not in text else (int(text, 16) << 16,)
            rounded = bits + 0x7FFF + (bits >> 16 & 1) if "x" not in text else bits
            return struct.unpack("<f", struct.pack("<I", rounded & 0xFFFF0000))[0]
        packed = struct.pack(integer, int(text, 16)) if "x" in text else struct.pack(real, float(text))
        return struct.unpack(real, packed)[0]
    except (OverflowError, struct.error):
        return None


class Scanner:
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
        first = self.match(VALUE)
        names = [first[0]] if first else []
        while first and (found := self.match(rf",\s*({VALUE})")):
            names.append(found[1])
        return names

    def value(self) -> str:
        return self.need(VALUE, "operand")[0]

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
            inner = self.accept("tensor<")  # as Triton 3.6 prints it
            shape, element = self.shape(), self.scalar()
            layout = self.layout() if self.accept(",") else None
            for _ in range(1 + inner):
                self.expect(">")
            return DescriptorType(shape, element, layout)
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
        if self.accept("dense<"):
            value = self.attribute()
            self.need(r">\s*:\s*tensor<\d+xi\d+>", "vector of integers")
            return value
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
            inner = type(self)("")
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
