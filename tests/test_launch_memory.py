"""Launches that are remembered: what is another launch, who is forgotten, and several threads."""

import functools
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilecrew._launches import LaunchMemory
from tilecrew._plans import NotRepeatable, Recording


class Tensor:
    """What a memory asks of a tensor, so that it can be on a GPU that is not here."""

    def __init__(self, address, device=0, dtype=torch.float32):
        self._address, self._device, self.dtype = address, device, dtype

    def data_ptr(self):
        return self._address

    def get_device(self):
        return self._device


class Log:
    """Launches that note whether they were made or repeated, and where."""

    def __init__(self, can_be_repeated=True):
        self.entries, self.now, self.can_be_repeated = [], "as ever", can_be_repeated
        self.before_run = lambda: None

    def make(self, name, tensors):
        return FakeLaunch(self, name, tensors)


class FakeLaunch:
    def __init__(self, log, name, tensors):
        self.log, self.name, self.tensors = log, name, tensors

    def run(self):
        self.log.entries.append(("made", self.name, [tensor.data_ptr() for tensor in self.tensors]))
        return "compiled"

    def repeatable(self, compiled, locate):
        assert compiled == "compiled"
        if not self.log.can_be_repeated:
            raise NotRepeatable("it is so")
        return FakeRepeatable(self.log, self.name, [locate(tensor) for tensor in self.tensors])


class FakeRepeatable:
    def __init__(self, log, name, slots):
        self.log, self.name, self.slots = log, name, slots

    def circumstances(self):
        return self.log.now

    @staticmethod
    def surroundings():
        return "a stream"

    def run(self, addresses, surroundings):
        assert surroundings == "a stream"
        self.log.before_run()
        self.log.entries.append(("repeated", self.name, [addresses[slot] for slot in self.slots]))


def run(memory, log, key, *tensors):
    """What the call has logged."""
    memory.run(key, tensors, functools.partial(log.make, key, tensors))
    return log.entries[-1]


def test_a_launch_is_repeated_at_other_addresses():
    memory, log = LaunchMemory(), Log()
    assert run(memory, log, "a", Tensor(16), Tensor(32)) == ("made", "a", [16, 32])
    assert run(memory, log, "a", Tensor(64), Tensor(48)) == ("repeated", "a", [64, 48])
    assert run(memory, log, "b", Tensor(64), Tensor(48))[0] == "made"


def test_what_is_another_launch():
    memory, log = LaunchMemory(), Log()
    run(memory, log, "a", Tensor(16), Tensor(32))
    assert run(memory, log, "a", Tensor(16), Tensor(16))[0] == "made"  # one tensor twice
    assert run(memory, log, "a", Tensor(16), Tensor(32, dtype=torch.int32))[0] == "made"
    assert run(memory, log, "a", Tensor(16), Tensor(36))[0] == "made"  # not aligned
    with Recording(()):
        memory.run("a", (), lambda: log.make("a", (Tensor(16), Tensor(32))))
    assert log.entries[-1][0] == "made"
    assert run(memory, log, "a", Tensor(16), Tensor(32))[0] == "repeated"
    log.now = "changed"
    assert run(memory, log, "a", Tensor(16), Tensor(32))[0] == "made"
    assert run(memory, log, "a", Tensor(16), Tensor(32))[0] == "repeated"


def test_every_device_has_its_own():
    """One entry would be made anew at each change of device."""
    memory, log = LaunchMemory(), Log()
    for outcome in ("made", "repeated", "repeated"):
        for device in (0, 1):
            log.now = f"device {device} is current"
            assert run(memory, log, "a", Tensor(16, device), Tensor(32, device))[0] == outcome


def test_a_device_is_that_of_a_tensor_that_is_there():
    memory, log = LaunchMemory(), Log()
    for device in (0, 1):
        tensors = (None, Tensor(16, device))
        memory.run("a", tensors, lambda tensors=tensors: log.make("a", tensors[1:]))
    assert [outcome for outcome, *_ in log.entries] == ["made", "made"]


def test_what_has_no_repeatable_form_is_made_each_time():
    memory, log = LaunchMemory(), Log(can_be_repeated=False)
    for _ in range(3):
        assert run(memory, log, "a", Tensor(16))[0] == "made"


def test_the_least_recently_used_is_forgotten():
    memory, log = LaunchMemory(capacity=2), Log()
    run(memory, log, "a", Tensor(16))
    run(memory, log, "b", Tensor(16))
    assert run(memory, log, "a", Tensor(16))[0] == "repeated"  # now the one used last
    run(memory, log, "c", Tensor(16))
    assert run(memory, log, "a", Tensor(16))[0] == "repeated"
    assert run(memory, log, "b", Tensor(16))[0] == "made"


def in_another_thread(function, *arguments):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *arguments).result(timeout=20)


@pytest.mark.parametrize("when", ["before circumstances", "before run"])
def test_another_thread_drops_what_is_about_to_run(when, monkeypatch):
    """And does not have to wait for it."""
    memory, log = LaunchMemory(capacity=1), Log()
    run(memory, log, "a", Tensor(16))
    other = Log()

    def drop():
        in_another_thread(run, memory, other, "b", Tensor(16))

    if when == "before run":
        log.before_run = drop
    else:
        monkeypatch.setattr(FakeRepeatable, "circumstances", lambda self: (self.log is log and drop(), log.now)[1])
    assert run(memory, log, "a", Tensor(32)) == ("repeated", "a", [32])
    assert other.entries[-1][:2] == ("made", "b")


def test_threads_that_make_and_drop_at_once():
    """Each call launches what it asks for once, at its own address."""
    memory, log, start = LaunchMemory(capacity=2), Log(), threading.Barrier(4)
    asked = [[((turn + number) % 4, 16 * (4 * turn + number + 1)) for turn in range(1000)] for number in range(4)]

    def work(calls):
        start.wait(20)
        for key, address in calls:
            memory.run(key, (Tensor(address),), functools.partial(log.make, key, (Tensor(address),)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(work, calls) for calls in asked]:
                future.result(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert sorted((key, address) for _, key, (address,) in log.entries) == sorted(itertools.chain(*asked))
    assert {outcome for outcome, *_ in log.entries} == {"made", "repeated"}
