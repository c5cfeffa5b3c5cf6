"""Runs one block of a kernel: its roles as coroutines, its asynchronous operations when a seeded scheduler says so.

After every operation that touches shared memory or a barrier the scheduler picks who goes on: a role, a TMA copy that
lands, a product of a warp group that reads its operands, a TMA store that reads its tile. Every seed draws a speed for
each of them anew, so that some seeds starve one role for long and others let copies land at the last moment.
"""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from tilecrew.simulator.effects import MEMORY, QUIET, barrier_of
from tilecrew.simulator.memory import SharedMemory
from tilecrew.simulator.operations import evaluate
from tilecrew.simulator.reader import Operation, Program, Region
from tilecrew.simulator.tasks import Event, Pending, Role, Task
from tilecrew.simulator.values import FaultError

MAX_STEPS = 2_000_000
END = object()
ENDS = ("scf.yield", "tt.return", "ttg.warp_yield", "ttg.warp_return")


class Block:
    """One program of the grid: `start` once, then `step` until `is_over`."""

    def __init__(
        self,
        program: Program,
        program_id: int,
        num_programs: int,
        role_names: Sequence[str],
        chance: random.Random,
        events: list[Event],
    ) -> None:
        self.program, self.program_id, self.num_programs = program, program_id, num_programs
        self.role_names, self.random, self.events = role_names, chance, events
        self.shared = SharedMemory()
        self.tasks: list[Task] = []
        self.steps = 0
        self.coroutines: list[tuple[Role, Iterator[None]]] = []
        self.speeds: dict[str, float] = {}

    def start(self, arguments: dict[str, Any]) -> None:
        """arguments: values of the kernel function's arguments."""
        num_warps = self.program.attributes["ttg.num-warps"]
        role = Role(self.shared.actor(self._role_name(0)), num_warps, [], [])
        self._start(role, self.program.kernel.region, dict(arguments))

    @property
    def is_over(self) -> bool:
        return not self.coroutines and not self.tasks

    def step(self) -> bool:
        """Lets one ready role or asynchronous operation go on, chosen by drawn speeds; False where none is ready."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise FaultError(f"no end after {MAX_STEPS} steps")
        ready: list[Any] = [entry for entry in self.coroutines if self._is_ready(entry[0])]
        ready += [task for task in self.tasks if task.before is None or task.before.is_done]
        if not ready:
            return False
        chosen = self.random.choices(ready, [self._speed(entry) for entry in ready])[0]
        if isinstance(chosen, Task):
            self.finish(chosen)
            return True
        role, coroutine = chosen
        if next(coroutine, END) is END:
            self.coroutines.remove(chosen)
            for task in (*role.stores, *role.products):
                raise FaultError(f"{role.actor.name} ends without a wait for its {task.kind} at {task.location}")
        return True

    def waiting(self) -> str:
        """Who waits for what."""
        return "; ".join(
            f"program {self.program_id}: {role.actor.name} waits for {role.waits_for()}" for role, _ in self.coroutines
        )

    def _role_name(self, index: int) -> str:
        return self.role_names[index] if index < len(self.role_names) else f"role {index}"

    def _start(self, role: Role, region: Region, values: dict[str, Any]) -> None:
        self.coroutines.append((role, self._execute(role, region, values)))

    def _is_ready(self, role: Role) -> bool:
        return role.can_go_on is None or role.can_go_on()

    def _speed(self, entry: Any) -> float:
        key = entry.kind if isinstance(entry, Task) else entry[0].actor.name
        if key not in self.speeds:
            self.speeds[key] = 10 ** self.random.uniform(-2, 1)
        return self.speeds[key]

    def finish(self, task: Task) -> None:
        """Runs a task, and those that must come before it."""
        if task.is_done:
            return
        if task.before is not None:
            self.finish(task.before)
        task.run(task.actor)
        task.is_done = True
        self.tasks.remove(task)
        self._note(task.role, task.kind, task.start, task.location)

    def _note(self, role: Role, kind: str, start: int, location: str, detail: str = "") -> None:
        self.events.append(Event(self.program_id, role.actor.name, kind, start, self.steps, location, detail))

    def _suspend(self, role: Role, can_go_on: Callable[[], bool], what: Callable[[], str]) -> None:
        role.can_go_on, role.waits_for, role.start_of_wait = can_go_on, what, self.steps

    # Control flow

    def _execute(self, role: Role, region: Region, values: dict[str, Any]) -> Generator[None, None, tuple[Any, ...]]:
        """Runs a region; returns the operands of the operation that ends it."""
        for op in region.operations:
            if op.name in ENDS:
                return tuple(self.take(op, values, name) for name in op.operands)
            if op.name == "scf.condition":
                return tuple(self.take(op, values, name) for name in op.operands)
            if op.name in CONTROL:
                results = yield from CONTROL[op.name](self, role, op, values)
            elif op.name in MEMORY:
                if op.name not in QUIET:
                    yield
                results = MEMORY[op.name](self, role, op, values)
            else:
                operands = [self.get(op, values, name) for name in op.operands]
                results = evaluate(op, operands, role.num_warps)
            values.update(zip(op.results, results, strict=True))
        return ()

    def take(self, op: Operation, values: dict[str, Any], name: str) -> Any:
        """A value as it is: accumulators in flight may be handed on."""
        if name not in values:
            raise ValueError(f"{op.location}: {name} has no value")
        return values[name]

    def get(self, op: Operation, values: dict[str, Any], name: str) -> Any:
        """A value to compute with."""
        value = self.take(op, values, name)
        if isinstance(value, Pending):
            if not value.is_visible:
                raise FaultError(f"{op.location}: {op.name} uses an accumulator before the wait for its product")
            return value.value
        return value

    def _for(self, role: Role, op: Operation, values: dict[str, Any]) -> Generator[None, None, tuple[Any, ...]]:
        lower, upper, step = (self.get(op, values, name) for name in op.operands[:3])
        carried = tuple(self.take(op, values, name) for name in op.operands[3:])
        names = [name for name, _ in op.regions[0].arguments]
        for index in range(int(lower), int(upper), int(step)):
            values.update(zip(names, (index, *carried), strict=True))
            carried = yield from self._execute(role, op.regions[0], values)
        return carried

    def _if(self, role: Role, op: Operation, values: dict[str, Any]) -> Generator[None, None, tuple[Any, ...]]:
        region = op.regions[0] if self.get(op, values, op.operands[0]) else op.regions[1]
        return (yield from self._execute(role, region, values))

    def _while(self, role: Role, op: Operation, values: dict[str, Any]) -> Generator[None, None, tuple[Any, ...]]:
        before, after = op.regions
        carried = tuple(self.take(op, values, name) for name in op.operands)
        while True:
            values.update(zip((name for name, _ in before.arguments), carried, strict=True))
            condition, *carried_on = yield from self._execute(role, before, values)
            if not condition:
                return tuple(carried_on)
            values.update(zip((name for name, _ in after.arguments), carried_on, strict=True))
            carried = yield from self._execute(role, after, values)

    def _specialize(self, role: Role, op: Operation, values: dict[str, Any]) -> Generator[None, None, tuple[Any, ...]]:
        """Starts the other roles, runs the first one, and waits for all."""
        captures = [self.get(op, values, name) for name in op.operands]
        workers = []
        role.actor.tick()
        for index, region in enumerate(op.regions[1:]):
            num_warps = op.attributes["partition_num_warps"][index]
            worker = Role(self.shared.actor(self._role_name(index + 1), role.actor), num_warps, [], [])
            arguments = dict(zip((name for name, _ in region.arguments), captures, strict=True))
            self._start(worker, region, arguments)
            workers.append(worker)
        results = yield from self._execute(role, op.regions[0], values)
        running = set(workers)

        def all_ended() -> bool:
            return not any(other in running for other, _ in self.coroutines)

        self._suspend(role, all_ended, lambda: "the other roles to end")
        yield
        role.can_go_on = None
        for worker in workers:
            np.maximum(role.actor.clock, worker.actor.clock, out=role.actor.clock)
        return results

    def _wait(self, role: Role, op: Operation, values: dict[str, Any]) -> Generator[None, None, tuple[Any, ...]]:
        barrier = barrier_of(self, op, values, op.operands[0])
        parity = int(self.get(op, values, op.operands[1]))
        if len(op.operands) > 2 and not self.get(op, values, op.operands[2]):
            return ()
        self._suspend(
            role,
            lambda: barrier.has_completed(parity),
            lambda: (
                f"parity {parity} of {barrier.location} at {op.location} (phase {barrier.phase}, "
                f"{barrier.arrivals} of {barrier.count} arrivals, {barrier.bytes_due} bytes due)"
            ),
        )
        yield
        role.can_go_on = None
        self._note(role, "wait", role.start_of_wait, op.location, barrier.location)
        np.maximum(role.actor.clock, barrier.completed_clock, out=role.actor.clock)
        return ()


CONTROL = {
    "scf.for": Block._for,
    "scf.if": Block._if,
    "scf.while": Block._while,
    "ttg.warp_specialize": Block._specialize,
    "ttng.wait_barrier": Block._wait,
}
