"""The order of GPU tests that run side by side, and the places that they share."""

import itertools
import multiprocessing

import pytest

from tests import gpu_spread, own_process, slots

pytest_plugins = ["pytester"]


def numbered(letter, count):
    return [f"{letter}{number}" for number in range(count)]


def test_long_tests_begin_each_part():
    emulated, slow, rest = numbered("e", 26), numbered("s", 15), numbered("r", 400)
    ordered = gpu_spread.in_parts(gpu_spread.heads_of(emulated, slow, 22), rest)
    assert sorted(ordered) == sorted([*emulated, *slow, *rest])
    sizes = [(441 - done) // (22 - worker) for worker, done in enumerate(itertools.accumulate([20] * 21, initial=0))]
    starts = [0, *itertools.accumulate(sizes[:-1])]
    first = [ordered[start] for start in starts]
    assert first == [*emulated[: own_process.MAX_PROCESSES], *slow[:10]]
    assert ordered[1] == emulated[12] and ordered[2] == emulated[24] and ordered[3] == rest[0]


@pytest.mark.parametrize("num_workers", [1, 3, 12, 13, 40])
def test_every_test_is_there_once(num_workers):
    emulated, slow, rest = numbered("e", 26), numbered("s", 15), numbered("r", 50)
    ordered = gpu_spread.in_parts(gpu_spread.heads_of(emulated, slow, num_workers), rest)
    assert sorted(ordered) == sorted([*emulated, *slow, *rest])


def hold(folder, barrier, held):
    with slots.one_of(2, "a name", folder) as place:
        held.put(place)
        barrier.wait(20)


def test_places_are_held_by_as_many_as_there_are(tmp_path):
    """Two processes have one each, and both are free again when these have ended."""
    context = multiprocessing.get_context("spawn")
    barrier, held = context.Barrier(2), context.Queue()
    processes = [context.Process(target=hold, args=(tmp_path, barrier, held)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(held.get(timeout=20) for _ in range(2)) == [0, 1]
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    with slots.one_of(2, "a name", tmp_path) as first, slots.one_of(2, "a name", tmp_path) as second:
        assert (first, second) == (0, 1)


def test_who_comes_when_all_places_are_held_waits(tmp_path, monkeypatch):
    held = slots.one_of(1, "a name", tmp_path)
    held.__enter__()
    tries = []

    def sleep(seconds):
        tries.append(seconds)
        if len(tries) == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr(slots.time, "sleep", sleep)
    with slots.one_of(1, "a name", tmp_path) as place:
        assert place == 0
    assert len(tries) == 3


def test_who_waits_in_vain_gets_an_error(tmp_path):
    with slots.one_of(1, "a name", tmp_path):
        message = "none of 1 places of 'a name' was free for 0.1 s"
        with pytest.raises(TimeoutError, match=message), slots.one_of(1, "a name", tmp_path, limit_seconds=0.1):
            pass


def test_a_group_runs_one_at_a_time(pytester, monkeypatch):
    """Two workers, four tests of a group that say when they begin and end."""
    pytester.makepyfile(
        test_group="""
        import time, pathlib, pytest

        @pytest.mark.xdist_group("large")
        @pytest.mark.parametrize("number", range(4))
        def test_one(number):
            with open("log", "a") as log:
                log.write("begin ")
            time.sleep(0.1)
            with open("log", "a") as log:
                log.write("end ")
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n    xdist_group: one at a time\n    slow: x\n    emulated: x\n")
    monkeypatch.setenv("PYTHONPATH", str(own_process.ROOT))
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "worksteal", "-p", "tests.gpu_spread")
    result.assert_outcomes(passed=4)
    assert (pytester.path / "log").read_text() == "begin end " * 4
