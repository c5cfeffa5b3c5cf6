"""A plugin for GPU tests that run side by side on one GPU: `-p tests.gpu_spread -n 22 --dist worksteal`.

pytest-xdist's worksteal gives every worker a part of the tests, one part behind the other, and those that are done take
from the ends of others' parts. This plugin puts long tests at the heads of the parts: those with emulated ranks on as
many workers as may run them at once (tests.own_process), the others on the rest. And it runs tests of one xdist_group
one at a time, which worksteal does not.
"""

import os
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from tests import own_process, slots


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    emulated = [item for item in items if item.get_closest_marker("emulated")]
    slow = [item for item in items if item.get_closest_marker("slow") and item not in emulated]
    rest = [item for item in items if item not in emulated and item not in slow]
    items[:] = in_parts(heads_of(emulated, slow, num_workers), rest)


def heads_of(emulated: Sequence[Any], slow: Sequence[Any], num_workers: int) -> list[list[Any]]:
    """What each worker begins with."""
    num_emulating = own_process.MAX_PROCESSES
    if num_workers <= num_emulating:
        return [[*emulated[worker::num_workers], *slow[worker::num_workers]] for worker in range(num_workers)]
    num_others = num_workers - num_emulating
    return [
        *(list(emulated[worker::num_emulating]) for worker in range(num_emulating)),
        *(list(slow[worker::num_others]) for worker in range(num_others)),
    ]


def in_parts(heads: list[list[Any]], rest: Sequence[Any]) -> list[Any]:
    """All of them, with each worker's head where its part begins; as even as worksteal makes them, where the heads are
    no longer than that."""
    rest, ordered = list(rest), list[Any]()
    total = len(rest) + sum(map(len, heads))
    for worker, head in enumerate(heads):
        size = (total - len(ordered)) // (len(heads) - worker)
        num_more = max(size - len(head), 0)
        ordered += [*head, *rest[:num_more]]
        del rest[:num_more]
    return ordered + rest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    group = item.get_closest_marker("xdist_group")
    if group is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with slots.one_of(1, str(group.args[0])):
        return (yield)
