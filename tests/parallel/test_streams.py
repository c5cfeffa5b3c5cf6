"""Streams of a world: torch hands out few, again and again, and one that waits must not be the one it waits for."""

import contextlib
import itertools

import pytest
import torch

from tilecrew.parallel import fusion
from tilecrew.parallel import world as module

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def pool(monkeypatch):
    """torch.cuda.Stream as it is on a GPU: 32 streams in turn, here numbers."""
    numbers = itertools.cycle(range(module.STREAMS_OF_TORCH))
    monkeypatch.setattr(module.torch.cuda, "Stream", lambda device: next(numbers))
    return numbers


def test_streams_are_distinct_wherever_the_pool_stands(pool):
    for _ in range(5):
        streams = module.distinct_streams(DEVICE, 30)
        assert len(set(streams)) == 30


def test_more_streams_than_torch_has(pool):
    with pytest.raises(ValueError, match="size must be at most 16 emulated ranks"):
        module.distinct_streams(DEVICE, 33)


def test_a_torch_that_gives_fewer_is_an_error(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "Stream", lambda device: 7)
    with pytest.raises(RuntimeError, match="only 1 different streams"):
        module.distinct_streams(DEVICE, 2)


@pytest.mark.parametrize("current", [3, 4, 5])
def test_the_side_stream_is_never_the_current_one(current, monkeypatch):
    world = object.__new__(module.World)
    world.device, world._sides = DEVICE, [3, 4]
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: current)
    assert world.side_stream in {3, 4} - {current}


class Stream:
    """A stream that notes what is asked of it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class WorldOfTwoStreams:
    def __init__(self, log):
        self.device, self.current, self.side_stream = DEVICE, Stream("current", log), Stream("side", log)


@pytest.mark.parametrize("fails", [False, True])
def test_halves_side_by_side(fails, monkeypatch):
    log = []
    world = WorldOfTwoStreams(log)

    @contextlib.contextmanager
    def use(stream):
        log.append(f"use {stream.name}")
        yield
        log.append(f"leave {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: world.current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    expected = pytest.raises(ValueError, match="no launch") if fails else contextlib.nullcontext()
    with expected, fusion.beside_current_stream(world) as side:
        with side:
            log.append("communicate")
        if fails:
            raise ValueError("no launch")
        log.append("multiply")
    launches = ["use side", "communicate", "leave side", *([] if fails else ["multiply"])]
    assert log == ["side waits for current", *launches, "current waits for side"]
