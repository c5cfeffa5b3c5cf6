"""Interpreter of the PTX in inline assembly, run for all threads of a warp group at once.

Registers hold bits, as in the machine: an array [..., threads] of uint32, uint64 or bool. An instruction's type says
how it reads them. Floating point is numpy's float32; a fused multiply-add is computed in float64 and rounded.
Statements run in order, for all threads: the project's assembly has no branches and no predicated instructions.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecrew.simulator.layouts import WARP_SIZE, Layout, register_map

_BITS: dict[str, Any] = {"b32": np.uint32, "u32": np.uint32, "s32": np.uint32, "f32": np.uint32}
_BITS |= {"b16": np.uint16, "u16": np.uint16, "f16": np.uint16}
_BITS |= {"b64": np.uint64, "u64": np.uint64, "s64": np.uint64, "pred": np.bool_}
_VIEWS: dict[str, Any] = _BITS | {"s32": np.int32, "f16": np.float16, "f32": np.float32, "s64": np.int64}
# Of a constraint: its register's type, the dtypes of arrays that may go in, and the dtype of those that come out.
_CONSTRAINTS: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "f": ("f32", (np.float32,), np.float32),
    "r": ("b32", (np.int32, np.uint32), np.int32),
    "l": ("b64", (np.int64, np.uint64), np.int64),
}
_SPECIAL = ("%tid.x", "%laneid")


def _shift_left(value: np.ndarray, amount: np.ndarray) -> np.ndarray:
    return np.where(amount > 31, np.uint32(0), value << np.minimum(amount, np.uint32(31)))


def _shift_right(value: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Arithmetic for signed values: bits above 31 are the sign, so a shift by 32 or more is one by 31 twice."""
    shifted = value >> np.minimum(amount, np.uint32(31)).astype(value.dtype)
    return np.where(amount > 31, shifted >> value.dtype.type(31), shifted)


def _not_equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """PTX's ne is ordered: false where either is NaN."""
    return (a < b) | (a > b)


def _copy(x: np.ndarray) -> np.ndarray:
    return x


def _select(a: np.ndarray, b: np.ndarray, condition: np.ndarray) -> np.ndarray:
    return np.where(condition, a, b)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _exp2(x: np.ndarray) -> np.ndarray:
    return _flush(np.exp2(_flush(x).astype(np.float64)).astype(np.float32))


def _pack_half(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two float32 as fp16, rounded to nearest even, the first operand in the upper half."""
    high_bits, low_bits = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (high, low))
    return high_bits << 16 | low_bits


def _tiles(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The 8x8 tile [..., warps, 8, 8] of which lane 4 r + c / 2 of each warp has columns c and c + 1 of row r."""
    if low.shape[-1] % WARP_SIZE:
        raise ValueError(f"threads of shape {low.shape} are not whole warps")
    return np.stack([low, high], -1).reshape(*low.shape[:-1], -1, 8, 8)


def _transpose(value: np.ndarray) -> np.ndarray:
    tiles = np.swapaxes(_tiles(value & np.uint32(0xFFFF), value >> np.uint32(16)), -1, -2)
    low, high = np.moveaxis(tiles.reshape(*value.shape, 2), -1, 0)
    return low | high << np.uint32(16)


def _warp_product(*registers: np.ndarray) -> tuple[np.ndarray, ...]:
    """mma.sync of shape m16n8k16 or m16n8k8, of 10 or 7 operands."""
    registers = tuple(np.broadcast_arrays(*registers))
    depth = 2 if len(registers) == 10 else 1
    halves = [
        _tiles(*((x >> np.uint32(shift)).astype(np.uint16).view(np.float16).astype(np.float64) for shift in (0, 16)))
        for x in registers[: 3 * depth]
    ]
    left = np.concatenate([np.concatenate(halves[2 * k : 2 * k + 2], -2) for k in range(depth)], -1)
    right = np.concatenate(halves[2 * depth :], -1)
    added = np.concatenate([_tiles(*registers[-4:-2]), _tiles(*registers[-2:])], -2)
    result = (left @ np.swapaxes(right, -1, -2) + added).astype(np.float32)
    pairs = (result[..., :8, :], result[..., 8:, :])
    shape = registers[0].shape
    return tuple(
        np.ascontiguousarray(half.reshape(*half.shape[:-2], WARP_SIZE, 2)[..., i]).reshape(shape)
        for half in pairs
        for i in range(2)
    )


def _shuffle(value: np.ndarray, lane: np.ndarray, clamp: np.ndarray, mask: np.ndarray) -> np.ndarray:
    if clamp.ndim or mask.ndim or int(clamp) != 31 or int(mask) != 0xFFFFFFFF:
        raise ValueError("expected clamp 31 and mask 0xffffffff")
    value, lane = np.broadcast_arrays(value, lane & np.uint32(31))
    if not value.ndim or value.shape[-1] % WARP_SIZE:
        raise ValueError(f"threads of shape {value.shape} are not whole warps")
    warps = (*value.shape[:-1], -1, WARP_SIZE)
    return np.take_along_axis(value.reshape(warps), lane.reshape(warps).astype(np.int64), -1).reshape(value.shape)


# Launches run one after the other here, so that there is nothing to wait for; and global memory has no proxies and no
# stores under way: those of TMA are done when tma_store_wait ends.
_WITHOUT_EFFECT = (
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "fence.proxy.async",
    "cp.async.bulk.wait_group 0",
)


@dataclass(frozen=True)
class _Operation:
    """function: of all operands, with one result or, where `num_results` is more, a tuple of so many."""

    result: str
    operands: tuple[str, ...]
    function: Callable[..., Any]
    num_results: int = 1


def _operations() -> dict[str, _Operation]:
    """Every known instruction by its name with all suffixes."""
    table = {
        "shl.b32": _Operation("b32", ("b32", "u32"), _shift_left),
        "shr.b32": _Operation("b32", ("b32", "u32"), _shift_right),
        "shr.u32": _Operation("u32", ("u32", "u32"), _shift_right),
        "shr.s32": _Operation("s32", ("s32", "u32"), _shift_right),
        "fma.rn.f32": _Operation("f32", ("f32", "f32", "f32"), _fma),
        "neg.f32": _Operation("f32", ("f32",), np.negative),
        "cvt.rn.f16x2.f32": _Operation("b32", ("f32", "f32"), _pack_half),
        "cvt.f32.f16": _Operation("f32", ("f16",), lambda x: x.astype(np.float32)),
        "cvt.u16.u32": _Operation("u16", ("u32",), lambda x: x.astype(np.uint16)),
        "movmatrix.sync.aligned.m8n8.trans.b16": _Operation("b32", ("b32",), _transpose),
        "ex2.approx.ftz.f32": _Operation("f32", ("f32",), _exp2),
        "shfl.sync.idx.b32": _Operation("b32", ("b32", "u32", "u32", "u32"), _shuffle),
    }
    for depth in (8, 16):
        operands = ("b32",) * (3 * depth // 8) + ("f32",) * 4
        name = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.f16.f16.f32"
        table[name] = _Operation("f32", operands, _warp_product, 4)
    functions: dict[str, Callable[..., np.ndarray]] = {"and": np.bitwise_and, "or": np.bitwise_or}
    for name, function in (functions | {"xor": np.bitwise_xor}).items():
        table[f"{name}.b32"] = _Operation("b32", ("b32", "b32"), function)
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for name, function in functions.items():
        for kind in ("u32", "s32"):
            table[f"{name}{'.lo' * (name == 'mul')}.{kind}"] = _Operation(kind, (kind, kind), function)
        for suffix in ("f32", "rn.f32"):
            table[f"{name}.{suffix}"] = _Operation("f32", ("f32", "f32"), function)
    functions = {"eq": np.equal, "ne": _not_equal, "lt": np.less, "le": np.less_equal}
    functions |= {"gt": np.greater, "ge": np.greater_equal}
    for kind in ("u32", "s32", "f32"):
        for name, function in functions.items():
            table[f"setp.{name}.{kind}"] = _Operation("pred", (kind, kind), function)
    for kind in ("b32", "u32", "s32", "f32", "b64", "u64", "s64"):
        table[f"mov.{kind}"] = _Operation(kind, (kind,), _copy)
        table[f"selp.{kind}"] = _Operation(kind, (kind, kind, "pred"), _select)
    return table


_OPERATIONS = _operations()


@dataclass(frozen=True)
class _Statement:
    """One instruction: operands are names of registers, or the bits of literals."""

    text: str
    operation: _Operation
    targets: tuple[str, ...]
    operands: tuple[str | np.ndarray, ...]


@dataclass(frozen=True)
class _Program:
    statements: tuple[_Statement, ...]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    sharing: frozenset[str]  # outputs whose register may be that of an input


def _may_hold(declared: str, wanted: str) -> bool:
    """Whether PTX lets an instruction of type `wanted` use a register declared as `declared`: sizes agree, and bits
    (b32) go with everything but floating point only with itself."""
    if declared[1:] != wanted[1:] or "pred" in (declared, wanted):
        return declared == wanted
    return "b" in (declared[0], wanted[0]) or (declared[0] == "f") == (wanted[0] == "f")


def _literal(text: str, kind: str) -> np.ndarray | None:
    """Bits of a literal of that type, None where the text is none."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) and kind in ("f32", "b32"):
        return np.array(int(text[2:], 16), np.uint32)
    if not re.fullmatch(r"-?(\d+|0[xX][0-9a-fA-F]+)U?", text) or kind in ("f32", "pred"):
        return None
    value, bits = int(text.removesuffix("U"), 0), int(kind[1:])
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        return None
    return np.array(value % (1 << bits), _BITS[kind])


def _parse_constraints(constraints: str) -> tuple[list[str], list[str], frozenset[str]]:
    outputs: list[str] = []
    inputs: list[str] = []
    sharing = set()
    for index, constraint in enumerate(part.strip() for part in constraints.split(",")):
        match = re.fullmatch(r"(=&?)?([frl])", constraint)
        if match is None or (match[1] and inputs):
            raise ValueError(f"constraint {constraint!r}: expected =f, =r, =l (also =&), then f, r, l")
        (outputs if match[1] else inputs).append(match[2])
        if match[1] == "=":
            sharing.add(f"${index}")
    return outputs, inputs, frozenset(sharing)


def _parse_operand(text: str, kind: str, registers: dict[str, str], opcode: str) -> str | np.ndarray:
    if text in _SPECIAL and opcode in ("mov.u32", "mov.b32"):
        return text
    if text in registers:
        if not _may_hold(registers[text], kind):
            raise ValueError(f"{text} is a register of type {registers[text]}, not {kind}")
        return text
    literal = _literal(text, kind)
    if literal is None:
        raise ValueError(f"operand {text!r} is no register and no literal of type {kind}")
    return literal


def _parse_statement(text: str, registers: dict[str, str]) -> _Statement:
    opcode, _, rest = text.partition(" ")
    operation = _OPERATIONS.get(opcode)
    if operation is None:
        raise ValueError(f"instruction {opcode!r} is not known")
    parts = [part.strip() for part in rest.split(",")]
    targets, operands = tuple(parts[: operation.num_results]), parts[operation.num_results :]
    if len(operands) != len(operation.operands):
        raise ValueError(f"expected {len(operation.operands)} operands after the results, found {len(operands)}")
    for target in targets:
        if target not in registers or not _may_hold(registers[target], operation.result):
            raise ValueError(f"{target!r} is no register of type {operation.result}")
    kinds = zip(operands, operation.operands, strict=True)
    return _Statement(
        text, operation, targets, tuple(_parse_operand(operand, kind, registers, opcode) for operand, kind in kinds)
    )


@functools.lru_cache(maxsize=64)
def _parse(asm: str, constraints: str) -> _Program:
    outputs, inputs, sharing = _parse_constraints(constraints)
    registers = {f"${i}": _CONSTRAINTS[letter][0] for i, letter in enumerate([*outputs, *inputs])}
    names = list(registers)
    statements = []
    for part in re.sub(r"//[^\n]*|[{}]", " ", asm).split(";"):
        text = " ".join(part.split())
        try:
            if text.startswith(".reg "):
                _, kind, declared = text.split(" ", 2)
                if kind[0] != "." or kind[1:] not in _BITS:
                    raise ValueError(f"type {kind!r} is not known")
                for name in declared.split(","):
                    if not re.fullmatch(r"[A-Za-z_%][A-Za-z0-9_$]*", name.strip()):
                        raise ValueError(f"{name.strip()!r} is no name of a register")
                    registers[name.strip()] = kind[1:]
            elif text and text not in _WITHOUT_EFFECT:
                statements.append(_parse_statement(text, registers))
        except ValueError as error:
            raise ValueError(f"statement {text!r}: {error}") from error
    return _Program(tuple(statements), tuple(names[: len(outputs)]), tuple(names[len(outputs) :]), sharing)


def _special(name: str, num_threads: int, first_thread: int) -> np.ndarray:
    if num_threads % WARP_SIZE:
        raise ValueError(f"{num_threads} threads are not whole warps, so {name} has no value")
    threads = np.arange(first_thread, first_thread + num_threads, dtype=np.uint32)
    return threads if name == "%tid.x" else threads % np.uint32(WARP_SIZE)


class _Machine:
    """Registers of all threads while a program runs."""

    def __init__(self, program: _Program, values: dict[str, np.ndarray], num_threads: int, first_thread: int):
        self.program = program
        self.values = values
        self.threads = (num_threads, first_thread)
        self.inputs_at_risk = False

    def read(self, operand: str | np.ndarray, kind: str) -> np.ndarray:
        if isinstance(operand, str):
            if operand in _SPECIAL:
                return _special(operand, *self.threads)
            if self.inputs_at_risk and operand in self.program.inputs:
                raise ValueError(f"input {operand} is read after an output without & was written")
            if operand not in self.values:
                raise ValueError(f"register {operand} is read before it is written")
            operand = self.values[operand]
        return operand.view(_VIEWS[kind])

    def execute(self, statement: _Statement) -> None:
        operation = statement.operation
        kinds = zip(statement.operands, operation.operands, strict=True)
        result = operation.function(*(self.read(operand, kind) for operand, kind in kinds))
        results = result if operation.num_results > 1 else (result,)
        for target, value in zip(statement.targets, results, strict=True):
            self.values[target] = np.asarray(value).view(_BITS[operation.result])
            self.inputs_at_risk |= target in self.program.sharing


def run(
    asm: str, constraints: str, inputs: Sequence[np.ndarray], num_threads: int, first_thread: int = 0
) -> list[np.ndarray]:
    """The output registers of inline assembly, one array [..., num_threads] each.

    Args:
        asm: PTX with $0, $1, ... for the outputs and then the inputs. Known are the declarations .reg, and mov, add,
            sub, mul, shl, shr, and, or, xor, setp, selp, fma, neg, cvt, ex2, mma.sync, movmatrix and shfl.sync.idx in
            the variants that the project uses; braces are ignored, and so are griddepcontrol, fence.proxy.async and
            cp.async.bulk.wait_group.
        constraints: one of =f, =r, =l, =&f, =&r, =&l for each output, then one of f, r, l for each input.
        inputs: one array [..., num_threads] for each input register, float32 for f, int32 for r, int64 for l. Leading
            dimensions are independent runs of the same threads.
        num_threads: threads; whole warps where the assembly asks for the thread or the lane or shuffles.
        first_thread: %tid.x of the first thread.

    Raises:
        ValueError: an instruction, operand or constraint is not known, types do not agree, a register is read before
            it is written, or an input after an output that may share its register. The message quotes the statement.
    """
    program = _parse(asm, constraints)
    letters = [part.strip()[-1] for part in constraints.split(",")]
    if len(inputs) != len(program.inputs):
        raise ValueError(f"constraints {constraints!r} name {len(program.inputs)} inputs, found {len(inputs)}")
    values = {}
    shape: tuple[int, ...] = (num_threads,)
    for name, value, letter in zip(program.inputs, inputs, letters[len(program.outputs) :], strict=True):
        kind, dtypes, _ = _CONSTRAINTS[letter]
        if value.dtype not in dtypes or value.shape[-1:] != (num_threads,):
            raise ValueError(
                f"input {name}: expected {dtypes[0].__name__} [..., {num_threads}], found {value.dtype} "
                f"{list(value.shape)}"
            )
        values[name] = np.ascontiguousarray(value).view(_BITS[kind])
        shape = np.broadcast_shapes(shape, value.shape)
    machine = _Machine(program, values, num_threads, first_thread)
    with np.errstate(all="ignore"):
        for statement in program.statements:
            try:
                machine.execute(statement)
            except ValueError as error:
                raise ValueError(f"statement {statement.text!r}: {error}") from error
    missing = [name for name in program.outputs if name not in values]
    if missing:
        raise ValueError(f"outputs {', '.join(missing)} are never written")
    return [
        np.array(np.broadcast_to(values[name].view(_CONSTRAINTS[letter][2]), shape))
        for name, letter in zip(program.outputs, letters, strict=False)
    ]


def elementwise(
    asm: str,
    constraints: str,
    packed_element: int,
    inputs: Sequence[np.ndarray],
    layout: Layout | None,
    num_warps: int,
    first_thread: int = 0,
) -> np.ndarray:
    """The tensor that elementwise inline assembly makes of tensors of one shape.

    Each thread's registers, in the order of `layouts.register_map`, are taken in packs. The assembly runs once for each
    pack, with as many input registers for each tensor as the pack has elements, and as many output registers.

    Args:
        asm: see `run`.
        constraints: see `run`.
        packed_element: elements in a pack.
        inputs: tensors of one shape in logical order, float32 or int32; 0-dimensional ones, or none, have one thread.
        layout: layout of all of them, None for 0-dimensional ones.
        num_warps: warps of the warp group that holds them.
        first_thread: %tid.x of its first thread.

    Returns:
        A tensor of that shape, float32 or int32 as the output constraint says.

    Raises:
        ValueError: what `run` raises; shapes that differ; registers that do not fill packs; one element with two
            values, because threads that share it computed different ones.
    """
    shape = inputs[0].shape if inputs else ()
    if any(x.shape != shape for x in inputs):
        raise ValueError(f"shapes differ: {[x.shape for x in inputs]}")
    if shape:
        if layout is None:
            raise ValueError(f"tensors of shape {shape} need a layout")
        indices = register_map(layout, shape, num_warps)
    else:
        indices = np.zeros((1, 1), np.int64)
    threads, registers = indices.shape
    if registers % packed_element:
        raise ValueError(f"{registers} registers of {layout} do not fill packs of {packed_element}")
    # [pack, element of the pack, thread]
    packs = indices.T.reshape(registers // packed_element, packed_element, threads)
    operands = [x.reshape(-1)[packs[:, k]] for x in inputs for k in range(packed_element)]
    outputs = run(asm, constraints, operands, threads, first_thread)
    if len(outputs) != packed_element or len({x.dtype for x in outputs}) != 1:
        raise ValueError(f"constraints {constraints!r}: expected {packed_element} outputs of one type")
    values = np.stack(outputs, 1)
    result = np.empty(int(np.prod(shape)), values.dtype)
    result[packs] = values
    bits = np.dtype(f"u{result.itemsize}")
    unequal = result.view(bits)[packs] != values.view(bits)
    if unequal.any():
        element = tuple(int(k) for k in np.unravel_index(packs[unequal][0], shape)) if shape else ()
        raise ValueError(f"threads that share element {list(element)} computed different values of it")
    return result.reshape(shape)
