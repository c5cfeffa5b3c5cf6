"""Faults to plant into a compiled kernel: each kind lists its places, `mutate` returns the program with one of them.

A place is the number of an operation of the kernel, in the order of the text: an operation before those in its regions.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tilecrew.simulator.reader import Operation, Program, Region, ScalarType

I32 = ScalarType("i32")
FENCE, BARRIER = "ttng.fence_async_shared", "gpu.barrier"
ARRIVE, WAIT, EXPECT, INIT = "ttng.arrive_barrier", "ttng.wait_barrier", "ttng.barrier_expect", "ttng.init_barrier"
STORE_WAIT, DOT_WAIT = "ttng.async_tma_store_wait", "ttng.warp_group_dot_wait"
# What finishes reads of shared memory, and what writes it. A product in flight reads until its wait.
READS, WRITES = ("ttg.local_load", DOT_WAIT, STORE_WAIT), ("ttg.local_store",)
# Operations that do nothing but compute where something lies.
ADDRESS = ("ttg.memdesc_index", "ttg.memdesc_trans", "ttg.memdesc_reinterpret")


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """An operation and where it stands. role: 0 the first of warp_specialize, and so on; None: outside of it."""

    index: int
    op: Operation
    block: Region
    role: int | None


def entries(program: Program) -> list[Entry]:
    """Every operation of the kernel, in the order of the text."""
    found: list[Entry] = []

    def walk(region: Region, role: int | None) -> None:
        for op in region.operations:
            found.append(Entry(len(found), op, region, role))
            for number, inner in enumerate(op.regions):
                walk(inner, number if op.name == "ttg.warp_specialize" else role)

    walk(program.kernel.region, None)
    return found


def rewrite(program: Program, change: Callable[[int, Operation], list[Operation]]) -> Program:
    """The program with every operation of the kernel replaced by those that `change` makes of it and of its number.

    `change` sees an operation after those in its regions were replaced.
    """
    numbers = iter(range(10**9))

    def region_of(region: Region) -> Region:
        operations: list[Operation] = []
        for op in region.operations:
            index = next(numbers)
            if op.regions:
                op = dataclasses.replace(op, regions=tuple(region_of(inner) for inner in op.regions))
            operations += change(index, op)
        return dataclasses.replace(region, operations=tuple(operations))

    kernel = dataclasses.replace(program.kernel, region=region_of(program.kernel.region))
    functions = {name: kernel if f is program.kernel else f for name, f in program.functions.items()}
    return dataclasses.replace(program, functions=functions, kernel=kernel)


# Changes of one operation: what stands in its place.

Change = Callable[[Operation], list[Operation]]


def _drop(op: Operation) -> list[Operation]:
    return []


def _double(op: Operation) -> list[Operation]:
    return [op, op]


def _add(attribute: str, amount: int) -> Change:
    def change(op: Operation) -> list[Operation]:
        attributes = {**op.attributes, attribute: op.attributes[attribute] + amount}
        return [dataclasses.replace(op, attributes=attributes)]

    return change


def _constant(name: str, value: Any, location: str) -> Operation:
    return Operation("arith.constant", (name,), (), {"value": value}, (), (I32,), (), location)


def _flip_parity(op: Operation) -> list[Operation]:
    parity = op.operands[1]
    one = _constant("%planted_one", 1, op.location)
    flip = Operation("arith.xori", ("%planted",), (parity, "%planted_one"), {}, (I32, I32), (I32,), (), op.location)
    operands = (op.operands[0], "%planted", *op.operands[2:])
    return [one, flip, dataclasses.replace(op, operands=operands)]


# Where operations stand to each other.


def _block_before(every: list[Entry], place: int) -> list[Entry]:
    """The operations before a place in its block, the nearest first."""
    block = every[place].block
    return [entry for entry in reversed(every[:place]) if entry.block is block]


def _contains(op: Operation, names: tuple[str, ...]) -> bool:
    return op.name in names or any(_contains(inner, names) for region in op.regions for inner in region.operations)


def _last_access(every: list[Entry], arrive: Entry, names: tuple[str, ...]) -> Entry | None:
    """The last operation in front of an arrival, in its block, that is one of `names` or contains one."""
    return next((entry for entry in _block_before(every, arrive.index) if _contains(entry.op, names)), None)


def _arrive_before(program: Program, place: int, names: tuple[str, ...]) -> Program:
    """Moves an arrival, the gpu.barrier that goes with it, and the address of its mbarrier to before the last access.

    The barrier moves too: a role whose warps all agree that they have finished, but too early.
    """
    every = entries(program)
    target = _last_access(every, every[place], names)
    assert target is not None
    needed, moved = set(every[place].op.operands), [place]
    has_barrier = False
    for entry in _block_before(every, place):
        if entry.index <= target.index:
            break
        if entry.op.name == BARRIER and not has_barrier:
            moved, has_barrier = [entry.index, *moved], True
        elif needed & set(entry.op.results):
            moved, needed = [entry.index, *moved], needed | set(entry.op.operands)
    operations = [every[index].op for index in moved]

    def change(index: int, op: Operation) -> list[Operation]:
        if index == target.index:
            return [*operations, op]
        return [] if index in moved else [op]

    return rewrite(program, change)


def _definition(every: list[Entry], user: Entry, name: str) -> Operation | None:
    """The operation that gives an operand of `user` its value; None for arguments of regions."""
    for entry in reversed(every[: user.index]):
        if name in entry.op.results and entry.role in (user.role, None):
            return entry.op
    return None


def _remainders(every: list[Entry]) -> Iterator[tuple[Entry, str]]:
    """Every `ring.remainder(step, 3)` of the roles: its last operation, and the name of step.

    That is x - x // 3 * 3 for x = (step >> 16) + (step & 65535).
    """
    for entry in every:
        if entry.op.name != "arith.subi" or entry.role is None:
            continue
        folded, product = (_definition(every, entry, name) for name in entry.op.operands)
        if folded is None or product is None or (folded.name, product.name) != ("arith.addi", "arith.muli"):
            continue
        high = next(other for other in every if other.op is folded and other.role == entry.role)
        shift = _definition(every, high, folded.operands[0])
        if shift is not None and shift.name == "arith.shrsi":
            yield entry, shift.operands[0]


def _shorten(program: Program, chosen: Callable[[int], bool]) -> Program:
    """step % 2 in place of step % 3 for those remainders, but not where the phase is computed from them."""
    every = entries(program)
    steps = {entry.index: step for entry, step in _remainders(every) if chosen(entry.index)}
    stages = {(every[place].role, every[place].op.results[0]): place for place in steps}

    def change(index: int, op: Operation) -> list[Operation]:
        operands = list(op.operands)
        for number, name in enumerate(operands):
            place = stages.get((every[index].role, name))
            if place is not None and (op.name, operands[0]) != ("arith.subi", steps[place]):
                operands[number] = f"%planted_{place}"
        operations = [dataclasses.replace(op, operands=tuple(operands))]
        if index in steps:
            one, planted = f"%planted_one_{index}", f"%planted_{index}"
            low_bit = Operation("arith.andi", (planted,), (steps[index], one), {}, (I32, I32), (I32,), (), op.location)
            operations += [_constant(one, 1, op.location), low_bit]
        return operations

    return rewrite(program, change)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault. places: of all entries, those where it can be planted; mutate: the program with the fault."""

    places: Callable[[list[Entry]], list[int]]
    mutate: Callable[[Program, int], Program]


def _single(name: str, change: Change, where: Callable[[Operation], bool] = lambda op: True) -> Kind:
    """A kind that changes one operation of a name."""

    def mutate(program: Program, place: int) -> Program:
        return rewrite(program, lambda index, op: change(op) if index == place else [op])

    return Kind(lambda every: [e.index for e in every if e.op.name == name and where(e.op)], mutate)


def _early(names: tuple[str, ...]) -> Kind:
    def places(every: list[Entry]) -> list[int]:
        arrivals = (entry for entry in every if entry.op.name == ARRIVE)
        return [entry.index for entry in arrivals if _last_access(every, entry, names)]

    return Kind(places, lambda program, place: _arrive_before(program, place, names))


def _before_barrier(every: list[Entry]) -> list[int]:
    """Fences that a gpu.barrier follows at once."""
    pairs = zip(every, every[1:], strict=False)
    return [fence.index for fence, after in pairs if fence.op.name == FENCE and after.op.name == BARRIER]


def _swap(program: Program, place: int) -> Program:
    first, second = (entry.op for entry in entries(program)[place : place + 2])
    changed = {place: [second], place + 1: [first]}
    return rewrite(program, lambda index, op: changed.get(index, [op]))


KINDS: dict[str, Kind] = {
    "drop fence": _single(FENCE, _drop),
    # the fence behind its gpu.barrier instead of in front: only the arriving thread's stores are then fenced in time
    "late fence": Kind(_before_barrier, _swap),
    # also those that no arrival follows
    "drop barrier": _single(BARRIER, _drop),
    "drop arrive": _single(ARRIVE, _drop),
    "double arrive": _single(ARRIVE, _double),
    # an arrival before the last read, or the last write, in front of it
    "free early": _early(READS),
    "publish early": _early(WRITES),
    "flip parity": _single(WAIT, _flip_parity),
    "drop wait": _single(WAIT, _drop),
    "expect more": _single(EXPECT, _add("size", 16)),
    "expect less": _single(EXPECT, _add("size", -16)),
    "count more": _single(INIT, _add("count", 1)),
    "count less": _single(INIT, _add("count", -1), lambda op: op.attributes["count"] > 1),
    "drop store wait": _single(STORE_WAIT, _drop),
    "drop product wait": _single(DOT_WAIT, _add("pendings", 100)),
    # one role takes step % (stages - 1) for a stage, and step // stages for the phase as before
    "short ring, one role": Kind(
        lambda every: [entry.index for entry, _ in _remainders(every)],
        lambda program, place: _shorten(program, lambda index: index == place),
    ),
    # all roles do: the ring wraps one stage early while the phases stay
    "short ring": Kind(
        lambda every: [entry.index for entry, _ in _remainders(every)][:1],
        lambda program, place: _shorten(program, lambda index: True),
    ),
}


def places(program: Program, kind: str) -> list[int]:
    """Where this kind of fault can be planted: numbers of operations."""
    return KINDS[kind].places(entries(program))


def mutate(program: Program, kind: str, place: int) -> Program:
    """The program with the fault at one of its places."""
    return KINDS[kind].mutate(program, place)


def names_of_places(program: Program, kind: str, role_names: list[str]) -> dict[tuple[str, int], int]:
    """The places of a kind by role and number among the role's; "" is the kernel outside of its roles."""
    every, numbers, named = entries(program), dict[str, int](), dict[tuple[str, int], int]()
    for place in places(program, kind):
        role = every[place].role
        name = "" if role is None else role_names[role]
        named[name, numbers.get(name, 0)] = place
        numbers[name] = numbers.get(name, 0) + 1
    return named
