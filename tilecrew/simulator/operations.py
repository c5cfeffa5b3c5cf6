"""What the operations without memory and time do, on numpy values. An operation that is not here is an error."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tilecrew.simulator import ptx
from tilecrew.simulator.reader import Operation, Region, ScalarType, TensorType
from tilecrew.simulator.values import INTEGER_BITS, Pointer, round_to, wrap

INTEGER_COMPARISONS: dict[str, Callable] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}
FLOAT_COMPARISONS: dict[str, Callable] = {
    "oeq": lambda a, b: a == b,
    "ogt": lambda a, b: a > b,
    "oge": lambda a, b: a >= b,
    "olt": lambda a, b: a < b,
    "ole": lambda a, b: a <= b,
    "one": lambda a, b: (a < b) | (a > b),
    "une": lambda a, b: a != b,
    "uno": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _quotient(a: Any, b: Any) -> Any:
    """Signed division that rounds toward zero."""
    quotient = np.abs(a) // np.abs(b)
    return quotient * np.sign(a) * np.sign(b)


INTEGER: dict[str, Callable] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _quotient,
    "arith.remsi": lambda a, b: a - b * _quotient(a, b),
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.shli": lambda a, b: a << b,
    "arith.shrsi": lambda a, b: a >> b,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.extsi": lambda a: a,
    "arith.trunci": lambda a: a,
}
FLOAT: dict[str, Callable] = {
    "arith.addf": lambda a, b: a + b,
    "arith.subf": lambda a, b: a - b,
    "arith.mulf": lambda a, b: a * b,
    "arith.divf": lambda a, b: a / b,
    "tt.approx_divf": lambda a, b: a / b,
    "arith.negf": lambda a: -a,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.extf": lambda a: a,
    "arith.truncf": lambda a: a,
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.log": np.log,
    "math.absf": np.abs,
    "math.sqrt": np.sqrt,
    "math.rsqrt": lambda a: 1 / np.sqrt(a),
}


def element_of(type: Any) -> str:
    """Element type of a tensor, or the scalar type itself."""
    if isinstance(type, TensorType):
        return type.element
    if not isinstance(type, ScalarType):
        raise ValueError(f"{type} has no element type")
    return type.name


def shape_of(op: Operation) -> tuple[int, ...]:
    """Shape of an operation's first result, which is a tensor."""
    (type, *_) = op.result_types
    if not isinstance(type, TensorType):
        raise ValueError(f"{op.location}: {op.name} gives {type}, not a tensor")
    return type.shape


def on_offset(value: Any, function: Callable) -> Any:
    """Applies a change of shape to an array, or to the offsets of a tensor of pointers."""
    if isinstance(value, Pointer):
        return Pointer(value.tensor, function(np.asarray(value.offset)))
    return function(np.asarray(value))


def _range(op: Operation, values: list[Any]) -> Any:
    return np.arange(op.attributes["start"], op.attributes["end"], dtype=np.int64)


def _constant(op: Operation, values: list[Any]) -> Any:
    type, value = op.result_types[0], op.attributes["value"]
    if isinstance(type, TensorType):
        dtype = {"i1": bool, "f32": np.float32, "f16": np.float32, "bf16": np.float32}.get(type.element, np.int64)
        return np.full(type.shape, value, dtype)
    return np.float32(value) if element_of(type) in ("f32", "f16", "bf16") else value


def _select(op: Operation, values: list[Any]) -> Any:
    condition, yes, no = values
    if isinstance(yes, Pointer):
        if yes.tensor is not no.tensor:
            raise ValueError(f"{op.location}: a choice between pointers into two tensors")
        return Pointer(yes.tensor, np.where(condition, yes.offset, no.offset))
    if np.ndim(condition) == 0 and np.ndim(yes) == 0:
        return yes if condition else no
    return np.where(condition, yes, no)


def _add_pointer(op: Operation, values: list[Any]) -> Any:
    pointer, offset = values
    return Pointer(pointer.tensor, pointer.offset + offset)


def _inline_assembly(op: Operation, values: list[Any], num_warps: int) -> Any:
    type, attributes = op.result_types[0], op.attributes
    layout = type.layout if isinstance(type, TensorType) else None
    inputs = [np.asarray(value) for value in values]
    inputs = [x.astype(np.int32 if x.dtype.kind in "iu" else np.float32) for x in inputs]
    result = ptx.elementwise(
        attributes["asm"], attributes["constraints"], attributes["packed_element"], inputs, layout, num_warps
    )
    if result.dtype.kind == "i":
        return int(result) if result.ndim == 0 else result.astype(np.int64)
    return result


def _unsigned(op: Operation, values: list[Any]) -> Any:
    """arith.extui; only i1 and values that are not negative occur."""
    (value,) = values
    if np.any(np.asarray(value) < 0):
        raise ValueError(f"{op.location}: arith.extui of a negative value is not simulated")
    return value * 1


def _unsigned_shift_right(op: Operation, values: list[Any]) -> Any:
    value, shift = values
    element = element_of(op.result_types[0])
    return wrap((value & ((1 << INTEGER_BITS[element]) - 1)) >> shift, element)


SHAPE: dict[str, Callable[[Operation, list[Any]], Any]] = {
    "arith.constant": _constant,
    "arith.select": _select,
    "arith.extui": _unsigned,
    "arith.shrui": _unsigned_shift_right,
    "arith.index_cast": lambda op, v: v[0],
    "arith.sitofp": lambda op, v: np.float32(v[0]),
    "arith.cmpi": lambda op, v: INTEGER_COMPARISONS[op.attributes["predicate"]](*v),
    "arith.cmpf": lambda op, v: FLOAT_COMPARISONS[op.attributes["predicate"]](*v),
    "tt.make_range": _range,
    "tt.addptr": _add_pointer,
    "tt.splat": lambda op, v: on_offset(v[0], lambda x: np.broadcast_to(x, shape_of(op))),
    "tt.broadcast": lambda op, v: on_offset(v[0], lambda x: np.broadcast_to(x, shape_of(op))),
    "tt.expand_dims": lambda op, v: on_offset(v[0], lambda x: np.expand_dims(x, op.attributes["axis"])),
    "tt.reshape": lambda op, v: on_offset(v[0], lambda x: x.reshape(shape_of(op))),
    "tt.trans": lambda op, v: on_offset(v[0], lambda x: x.transpose(op.attributes["order"])),
    "ttg.convert_layout": lambda op, v: v[0],
    "tt.join": lambda op, v: np.stack(v, -1),
    "tt.dot": lambda op, v: (v[0] @ v[1] + v[2]).astype(np.float32),
}


def evaluate(op: Operation, values: list[Any], num_warps: int) -> tuple[Any, ...]:
    """Results of an operation that touches no memory. Raises ValueError that names an operation it does not know."""
    with np.errstate(all="ignore"):
        if op.name in INTEGER:
            return (wrap(INTEGER[op.name](*values), element_of(op.result_types[0])),)
        if op.name in FLOAT:
            return (round_to(FLOAT[op.name](*values), element_of(op.result_types[0])),)
        if op.name in SHAPE:
            return (SHAPE[op.name](op, values),)
        if op.name == "tt.split":
            return tuple(np.asarray(values[0])[..., half] for half in range(2))
        if op.name == "tt.elementwise_inline_asm":
            return (_inline_assembly(op, values, num_warps),)
        if op.name in ("tt.reduce", "tt.scan"):
            return _fold(op, values, num_warps)
    raise ValueError(f"{op.location}: the simulator does not know the operation {op.name}")


def _fold(op: Operation, values: list[Any], num_warps: int) -> tuple[Any, ...]:
    """tt.reduce and tt.scan of one tensor: the region combines two elements, here two slices."""
    if len(values) != 1 or op.attributes.get("reverse"):
        raise ValueError(f"{op.location}: {op.name} of several tensors, or in reverse, is not simulated")
    slices = np.moveaxis(np.asarray(values[0]), op.attributes["axis"], 0)
    steps = [slices[0]]
    for element in slices[1:]:
        steps.append(combine(op.regions[0], (steps[-1], element), num_warps))
    if op.name == "tt.scan":
        return (np.moveaxis(np.stack(steps), 0, op.attributes["axis"]),)
    last = steps[-1]
    return (last[()] if np.ndim(last) == 0 else last,)


def combine(region: Region, arguments: tuple[Any, ...], num_warps: int) -> Any:
    """Runs the region of a reduction."""
    values = dict(zip((name for name, _ in region.arguments), arguments, strict=True))
    for op in region.operations:
        operands = [values[name] for name in op.operands]
        if op.name in ("tt.reduce.return", "tt.scan.return"):
            return operands[0]
        values.update(zip(op.results, evaluate(op, operands, num_warps), strict=True))
    raise ValueError("a reduction without a result")
