"""Roles, what they have in flight, and what a simulation records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecrew.simulator.memory import Actor


@dataclass(frozen=True)
class Event:
    """Something that took time: steps of the scheduler from start to end.

    block    number of the program
    actor    the role, or for an asynchronous operation the role that issued it
    kind     "wait" (for a barrier), "copy" (TMA load), "store" (TMA store), "product" (wgmma)
    detail   the barrier; else empty
    """

    block: int
    actor: str
    kind: str
    start: int
    end: int
    location: str
    detail: str = ""


@dataclass(eq=False)
class Pending:
    """The accumulator of a product in flight; `value` when it is done and waited for."""

    value: Any = None
    is_visible: bool = False


@dataclass(eq=False)
class Role:
    """A group of warps: its actor, and what it has in flight, oldest first."""

    actor: Actor
    num_warps: int
    products: list["Task"]
    stores: list["Task"]
    start_of_wait: int = 0
    has_touched_since_barrier: bool = False
    can_go_on: Callable[[], bool] | None = None
    waits_for: Callable[[], str] = lambda: "nothing"


@dataclass(eq=False)
class Task:
    """An asynchronous operation: `run` does it, once; `before` must be done first. result: of a product."""

    kind: str
    location: str
    role: Role
    start: int
    actor: Actor
    run: Callable[[Actor], None]
    before: "Task | None" = None
    is_done: bool = False
    result: Pending | None = None
