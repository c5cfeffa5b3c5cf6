"""Reads the textual TTGIR of a compiled Gluon kernel (`compiled.asm["ttgir"]` of Triton 3.6, 3.8 and 3.9) into plain
Python values.

The text is read completely or not at all: a form, a type or an attribute that the reader does not know is a ValueError
that quotes its line. Four things that the text says are checked but not kept, because no value depends on them: the
columns of locations, the attributes of functions and of their arguments, and whether a memdesc is mutable. Nothing is
added either: a region of scf.if or scf.for whose empty scf.yield is not printed ends without one.
"""

import re
from collections.abc import Callable
from typing import Any

from tilecrew.simulator.forms import FORMS, REQUIRED, WORDS
from tilecrew.simulator.ir import (
    DescriptorType,
    Function,
    Layout,
    MemDescType,
    Operation,
    Program,
    Region,
    ScalarType,
    TensorType,
    Type,
)
from tilecrew.simulator.scanner import I1, Scanner, constant

__all__ = [
    "DescriptorType",
    "Function",
    "Layout",
    "MemDescType",
    "Operation",
    "Program",
    "Region",
    "ScalarType",
    "TensorType",
    "Type",
    "read",
]


def read(text: str) -> Program:
    """Read the TTGIR of a module with one public function; what cannot be read is a ValueError that quotes its line."""
    return _Reader(text).program()


class _Reader(Scanner):
    """A recursive descent through operations and regions."""

    # Operations.

    def operation(self) -> Operation:
        self.skip()
        results: list[str] = []
        while found := self.match((r",\s*" if results else "") + r"(%[\w$.-]+)(?::(\d+))?"):
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
        elif name in FORMS:
            operand_types, result_types, *regions = self.formatted(name, operands, attributes)
        else:
            raise self.error(f"unknown operation {name}")
        if len(operands) != len(operand_types) or len(results) != len(result_types):
            counts = (
                f"{len(operands)} for {len(operand_types)} operands, {len(results)} for {len(result_types)} results"
            )
            raise self.error(f"names and types differ in number: {counts}")
        for required in REQUIRED.get(name, ()):
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
        tokens, *typings = FORMS[name]
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
                if not re.fullmatch(WORDS.get(attribute, WORDS.get(name, ".*")), str(attributes[attribute]), re.DOTALL):
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
        return kinds if len(kinds) == 2 else [I1, *kinds]

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
        kind: Type = I1
        if dense or text not in ("true", "false"):
            self.expect(":")
            kind = self.type()
        value = constant(text, kind.name if isinstance(kind, ScalarType) else kind.element)
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
        return [I1], kinds, then, other

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
