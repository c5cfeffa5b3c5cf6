"""Triton's hash of its compiler, made in a thread while kernels are imported."""

import threading

import pytest
import torch

from tilecrew.device import compiler_key
from tilecrew.device.launch import Launch

pytest.importorskip("triton")


@pytest.fixture
def hashing(monkeypatch):
    """[events, release]: what happened, and what lets Triton's hash end."""
    from triton.runtime import cache

    events, release = [], threading.Event()

    def triton_key():
        assert release.wait(60)
        events.append("hashed")

    monkeypatch.setattr(cache, "triton_key", triton_key)
    monkeypatch.setattr(compiler_key, "_thread", None)
    return events, release


def test_a_launch_waits_for_it(hashing, monkeypatch):
    events, release = hashing
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: events.append("launched")

    compiler_key.start()
    assert events == []
    threading.Timer(0.2, release.set).start()
    for _ in range(2):
        Launch(Kernel(), 1, (), {}).run()
    assert events == ["hashed", "launched", "launched"]


def test_launches_of_several_threads_wait_for_it(hashing, monkeypatch):
    events, release = hashing
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def wait():
        compiler_key.wait()
        events.append("waited")

    compiler_key.start()
    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert events == []
    release.set()
    for thread in threads:
        thread.join(60)
    assert events == ["hashed"] + 8 * ["waited"]


def test_nothing_is_hashed_in_a_process_without_a_gpu(hashing, monkeypatch):
    events, release = hashing
    release.set()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    compiler_key.start()
    compiler_key.wait()
    assert events == []
