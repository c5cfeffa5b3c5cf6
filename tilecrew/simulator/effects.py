"""What operations with memory do in a block: shared and global memory, barriers, asynchronous copies and products."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tilecrew.simulator import layouts
from tilecrew.simulator.memory import Actor, Barrier, Tile, num_bytes
from tilecrew.simulator.reader import MemDescType, Operation
from tilecrew.simulator.tasks import Pending, Role, Task
from tilecrew.simulator.values import ELEMENT_BYTES, Descriptor, FaultError, round_to

if TYPE_CHECKING:
    from tilecrew.simulator.machine import Block


def _tile_of(allocation: Any, base: int, type: MemDescType) -> Tile:
    """Elements of a tile, or of a stack of tiles where the type has more dimensions than its layout."""
    rank = _rank(type.layout)
    tile_shape = type.shape[len(type.shape) - rank :] if len(type.shape) > rank else type.shape
    width = ELEMENT_BYTES[type.element]
    inner = layouts.shared_addresses(type.layout, tile_shape, 8 * width) // width
    stack = type.shape[: len(type.shape) - len(tile_shape)]
    starts = np.arange(math.prod(stack), dtype=np.int64) * math.prod(tile_shape)
    elements = base + (starts.reshape(*stack, *[1] * len(tile_shape)) + inner)
    return Tile(allocation, elements)


def _allocate(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    type = _tile_type(op)
    name = f"{op.results[0].lstrip('%')} of {op.location}"
    tile = _tile_of(block.shared.allocate(name, type.element, math.prod(type.shape)), 0, type)
    if op.operands:
        block.shared.write(role.actor, tile, block.get(op, values, op.operands[0]), op.location, False)
    return (tile,)


def _keep(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    """The end of a tile's life: what has its memory afterwards is the compiler's business, and not simulated."""
    return ()


def _view(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    tile = block.get(op, values, op.operands[0])
    elements, type = tile.elements, _tile_type(op)
    if op.name == "ttg.memdesc_index":
        index = block.get(op, values, op.operands[1])
        if not 0 <= index < elements.shape[0]:
            raise FaultError(f"{op.location}: index {index} of {elements.shape[0]} tiles ({tile.allocation.name})")
        elements = elements[index]
    elif op.name == "ttg.memdesc_subslice":
        offsets = op.attributes["offsets"]
        elements = elements[tuple(slice(o, o + n) for o, n in zip(offsets, type.shape, strict=True))]
    elif op.name == "ttg.memdesc_trans":
        elements = elements.transpose(op.attributes["order"])
    else:
        base = int(elements.min())
        if int(elements.max()) - base + 1 != elements.size:
            raise ValueError(f"{op.location}: {op.name} of a tile with gaps is not simulated")
        elements = _tile_of(tile.allocation, base, type).elements
    if elements.shape != tuple(type.shape):
        raise ValueError(f"{op.location}: {op.name} gives {elements.shape}, its type says {type.shape}")
    return (Tile(tile.allocation, elements),)


def _load(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    role.has_touched_since_barrier = True
    tile = block.get(op, values, op.operands[0])
    return (block.shared.read(role.actor, tile, op.location, is_async=False).copy(),)


def _store(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    role.has_touched_since_barrier = True
    value, tile = (block.get(op, values, name) for name in op.operands)
    block.shared.write(role.actor, tile, value, op.location, is_async=False)
    return ()


def _fence(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    block.shared.fence(role.actor)
    return ()


def _block_barrier(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    role.has_touched_since_barrier = False
    block.shared.barrier(role.actor)
    return ()


def barrier_of(block: "Block", op: Operation, values: dict[str, Any], name: str) -> Barrier:
    """The barrier that a view of one element of shared memory names."""
    tile = block.get(op, values, name)
    place = int(tile.elements.reshape(-1)[0])
    if place not in tile.allocation.barriers:
        raise FaultError(f"{op.location}: a barrier that was never initialised ({tile.allocation.name})")
    return tile.allocation.barriers[place]


def _initialise(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    tile = block.get(op, values, op.operands[0])
    place = int(tile.elements.reshape(-1)[0])
    name = f"{tile.allocation.name}, barrier {place}"
    tile.allocation.barriers[place] = Barrier(op.attributes["count"], name)
    return ()


def _check_barrier_before(role: Role, op: Operation) -> None:
    if role.has_touched_since_barrier:
        raise FaultError(
            f"{op.location}: one thread of {role.actor.name} arrives, but other threads may still be in shared "
            f"memory: no barrier since their last access"
        )


def _arrive(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    if len(op.operands) > 1 and not block.get(op, values, op.operands[1]):
        return ()
    _check_barrier_before(role, op)
    barrier = barrier_of(block, op, values, op.operands[0])
    barrier.arrive(role.actor.clock, op.attributes["count"], op.location)
    role.actor.tick()
    return ()


def _expect(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    if len(op.operands) > 1 and not block.get(op, values, op.operands[1]):
        return ()
    barrier = barrier_of(block, op, values, op.operands[0])
    _check_barrier_before(role, op)
    barrier.bytes_due += op.attributes["size"]
    barrier.arrive(role.actor.clock, 1, op.location)
    role.actor.tick()
    return ()


def start_task(
    block: "Block", role: Role, kind: str, location: str, run: Callable[[Actor], None], before: Task | None = None
) -> Task:
    """Starts an asynchronous operation of a role; it knows what the role knows now."""
    actor = block.shared.actor(f"the {kind} of {role.actor.name}", role.actor)
    role.actor.tick()
    task = Task(kind, location, role, block.steps, actor, run, before)
    block.tasks.append(task)
    return task


def _copy_in(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    descriptor, *coordinates, barrier_name, tile_name, pred = _copy_operands(block, op, values)
    if not pred:
        return ()
    barrier, tile = barrier_of(block, op, values, barrier_name), block.get(op, values, tile_name)

    def land(actor: Actor) -> None:
        tensor = descriptor.pointer.tensor
        offsets, inside = descriptor.offsets(tuple(coordinates))
        tensor.check(offsets[inside], "a TMA load", op.location)
        values_in = np.where(inside, tensor.data[np.where(inside, offsets, 0)], 0)
        block.shared.write(actor, tile, values_in, op.location, is_async=True)
        barrier.land(actor.clock, num_bytes(tile))

    start_task(block, role, "copy", op.location, land)
    return ()


def _copy_operands(block: "Block", op: Operation, values: dict[str, Any]) -> list[Any]:
    """descriptor, coordinates as ints, names of barrier and tile, predicate."""
    descriptor = block.get(op, values, op.operands[0])
    rank = len(descriptor.box)
    coordinates = [int(block.get(op, values, name)) for name in op.operands[1 : 1 + rank]]
    tile_name, barrier_name, pred_name = op.operands[1 + rank : 4 + rank]
    return [descriptor, *coordinates, barrier_name, tile_name, block.get(op, values, pred_name)]


def _copy_out(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    descriptor: Descriptor = block.get(op, values, op.operands[0])
    coordinates = tuple(int(block.get(op, values, name)) for name in op.operands[1:-1])
    tile = block.get(op, values, op.operands[-1])

    def leave(actor: Actor) -> None:
        read = block.shared.read(actor, tile, op.location, is_async=True)
        offsets, inside = descriptor.offsets(coordinates)
        tensor = descriptor.pointer.tensor
        tensor.check(offsets[inside], "a TMA store", op.location)
        tensor.data[offsets[inside]] = read[inside]
        tensor.written[offsets[inside]] = True

    before = role.stores[-1] if role.stores else None
    role.stores.append(start_task(block, role, "store", op.location, leave, before))
    return ()


def _wait_stores(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    while len(role.stores) > op.attributes["pendings"]:
        task = role.stores.pop(0)
        block.finish(task)
        np.maximum(role.actor.clock, task.actor.clock, out=role.actor.clock)
    return ()


def _product(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    left, right = (block.get(op, values, name) for name in op.operands[:2])
    accumulator = block.take(op, values, op.operands[2])
    use = block.get(op, values, op.operands[3]) if len(op.operands) > 3 else True
    result = Pending()

    def multiply(actor: Actor) -> None:
        a, b = (
            block.shared.read(actor, x, op.location, is_async=True) if isinstance(x, Tile) else x for x in (left, right)
        )
        start = accumulator.value if isinstance(accumulator, Pending) else accumulator
        with np.errstate(all="ignore"):
            product = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
            result.value = round_to(product + start if use else product, "f32")

    before = role.products[-1] if role.products else None
    task = start_task(block, role, "product", op.location, multiply, before)
    task.result = result
    role.products.append(task)
    if not op.attributes.get("isAsync"):
        _end_products(block, role, 0)
    return (result,)


def _end_products(block: "Block", role: Role, pendings: int) -> None:
    while len(role.products) > pendings:
        task = role.products.pop(0)
        block.finish(task)
        if task.result is not None:
            task.result.is_visible = True
        np.maximum(role.actor.clock, task.actor.clock, out=role.actor.clock)
    role.has_touched_since_barrier = True


def _wait_products(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    _end_products(block, role, op.attributes["pendings"])
    return tuple(block.take(op, values, name) for name in op.operands)


def _read_global(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    pointer, *rest = (block.get(op, values, name) for name in op.operands)
    mask = rest[0] if rest else True
    other = rest[1] if len(rest) > 1 else 0
    offsets = np.asarray(pointer.offset)
    mask = np.broadcast_to(np.asarray(mask, bool), offsets.shape)
    pointer.tensor.check(offsets[mask], "a load", op.location)
    value = np.where(mask, pointer.tensor.data[np.where(mask, offsets, 0)], other)
    if value.ndim == 0:
        return (np.float32(value) if value.dtype.kind == "f" else int(value),)
    return (value,)


def _write_global(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    pointer, value, *rest = (block.get(op, values, name) for name in op.operands)
    offsets = np.asarray(pointer.offset)
    mask = np.broadcast_to(np.asarray(rest[0] if rest else True, bool), offsets.shape)
    pointer.tensor.check(offsets[mask], "a store", op.location)
    pointer.tensor.data[offsets[mask]] = np.broadcast_to(value, offsets.shape)[mask]
    pointer.tensor.written[offsets[mask]] = True
    return ()


def _atomic_update(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    """tt.atomic_rmw: one element after the other, in order; returns what was there before."""
    pointer, value, *rest = (block.get(op, values, name) for name in op.operands)
    offsets = np.asarray(pointer.offset)
    mask = np.broadcast_to(np.asarray(rest[0] if rest else True, bool), offsets.shape)
    pointer.tensor.check(offsets[mask], "an atomic operation", op.location)
    if op.attributes["operation"] not in ATOMIC:
        raise ValueError(f"{op.location}: the atomic operation {op.attributes['operation']} is not simulated")
    update, data = ATOMIC[op.attributes["operation"]], pointer.tensor.data
    before = np.zeros(offsets.shape, data.dtype)
    values_in = np.broadcast_to(value, offsets.shape)
    for place in zip(*np.nonzero(mask), strict=True) if offsets.ndim else ([()] if mask else []):
        before[place] = data[offsets[place]]
        data[offsets[place]] = update(data[offsets[place]], values_in[place])
        pointer.tensor.written[offsets[place]] = True
    return (before if before.ndim else before[()].item(),)


def _atomic_compare(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    """tt.atomic_cas of one element."""
    pointer, expected, value = (block.get(op, values, name) for name in op.operands)
    offset = np.asarray(pointer.offset)
    if offset.ndim:
        raise ValueError(f"{op.location}: tt.atomic_cas of a tensor is not simulated")
    pointer.tensor.check(offset, "an atomic operation", op.location)
    before = pointer.tensor.data[offset].item()
    if before == expected:
        pointer.tensor.data[offset] = value
        pointer.tensor.written[offset] = True
    return (before,)


def _num_programs(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    return (block.num_programs if op.attributes["axis"] == "x" else 1,)


def _program_id(block: "Block", role: Role, op: Operation, values: dict[str, Any]) -> tuple[Any, ...]:
    return (block.program_id if op.attributes["axis"] == "x" else 0,)


ATOMIC: dict[str, Callable] = {
    "add": lambda old, new: old + new,
    "fadd": lambda old, new: old + new,
    "max": max,
    "min": min,
    "exch": lambda old, new: new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
}


def _tile_type(op: Operation) -> MemDescType:
    type = op.result_types[0]
    if not isinstance(type, MemDescType):
        raise ValueError(f"{op.location}: {op.name} gives {type}, not a view of shared memory")
    return type


def _rank(layout: layouts.Layout) -> int:
    """Dimensions of the tiles that a shared-memory layout describes; further ones count tiles."""
    if layout.kind == "nvmma_shared":
        return layout.parameters.get("rank", 2)
    return len(layout.parameters["order"])


# Operations after which nobody else can tell a difference: no turn for the others before them.
QUIET = (
    "ttg.local_alloc",
    "ttg.local_dealloc",
    "ttg.memdesc_index",
    "ttg.memdesc_subslice",
    "ttg.memdesc_trans",
    "ttg.memdesc_reinterpret",
    "gpu.barrier",
    "ttg.barrier",
    "ttng.init_barrier",
    "tt.get_program_id",
)
MEMORY = {
    "ttg.local_alloc": _allocate,
    "ttg.local_dealloc": _keep,
    "ttg.memdesc_index": _view,
    "ttg.memdesc_subslice": _view,
    "ttg.memdesc_trans": _view,
    "ttg.memdesc_reinterpret": _view,
    "ttg.local_load": _load,
    "ttg.local_store": _store,
    "ttng.fence_async_shared": _fence,
    "gpu.barrier": _block_barrier,
    "ttg.barrier": _block_barrier,
    "ttng.init_barrier": _initialise,
    "ttng.arrive_barrier": _arrive,
    "ttng.barrier_expect": _expect,
    "ttng.async_tma_copy_global_to_local": _copy_in,
    "ttng.async_tma_copy_local_to_global": _copy_out,
    "ttng.async_tma_store_wait": _wait_stores,
    "ttng.warp_group_dot": _product,
    "ttng.warp_group_dot_wait": _wait_products,
    "tt.load": _read_global,
    "tt.store": _write_global,
    "tt.get_program_id": _program_id,
    "tt.get_num_programs": _num_programs,
    "tt.atomic_rmw": _atomic_update,
    "tt.atomic_cas": _atomic_compare,
}
