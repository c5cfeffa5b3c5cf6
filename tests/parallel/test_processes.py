"""Ranks as processes of this host, on shared memory: contents, barriers, waits that fail, teardown."""

import pytest
import torch

from tests.parallel import cases
from tilecrew.parallel import ProcessesError, memory, run_processes

NEAR_WRAP = 2**32 - 4
BF16 = torch.bfloat16


def everything(world):
    """One start of processes for all that succeeds."""
    assert cases.read_all_peers(world) == world.rank
    epoch = cases.write_all_peers(world)
    view = cases.keeps_views(world)
    assert cases.gathers(world, 5, torch.float64) < 2
    assert cases.gathers(world, 130, BF16) <= 2
    total = cases.reduces(world, 5, torch.float32)
    cases.reduces(world, 130, BF16)
    return epoch, view, total, cases.uses_after_teardown(world)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_exchange_compute_and_end(size):
    found = run_processes(everything, size, first_epoch=NEAR_WRAP)
    assert len(found) == size
    for rank, (epoch, view, _, messages) in enumerate(found):
        assert epoch == 8  # NEAR_WRAP and twelve barriers
        assert view == 3 * ((rank + 1) % size + 1)
        assert messages[:3] == ["this ParallelTensor has been destroyed"] * 3
        assert messages[3:] == ["this World has been closed"] * 4


@pytest.mark.slow
def test_a_killed_rank_ends_the_others():
    with pytest.raises(ProcessesError) as error:
        run_processes(cases.dies, 3, 1, timeout_seconds=2, limit_seconds=120)
    errors = error.value.errors
    assert sorted(errors) == [0, 1, 2]
    assert "ended with code -9" in errors[1]
    for rank in (0, 2):
        assert "waited too long at the barrier: rank 1 should have written epoch 2 or later, seen 1" in errors[rank]


@pytest.mark.slow
def test_who_waits_in_vain_is_known_to_all():
    found = run_processes(waits, 3, timeout_seconds=1, limit_seconds=120)
    for barrier, _ in found:
        assert barrier in ((0, (-1, 2, 1, 0)), (1, (-1, 2, 1, 0)))


def waits(world):
    return cases.stays_away(world, 2), None


@pytest.mark.slow
def test_a_missing_signal_is_known_to_all():
    found = run_processes(cases.waits_for_signal, 3, timeout_seconds=1, limit_seconds=120)
    assert found == [(0, (1, 2, 5, 0))] * 3


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shape", "rows"])
def test_disagreement_raises_on_every_rank(what):
    with pytest.raises(ProcessesError) as error:
        run_processes(cases.disagrees, 3, what, timeout_seconds=20, limit_seconds=120)
    assert sorted(error.value.errors) == [0, 1, 2]
    for text in error.value.errors.values():
        assert "ValueError: ranks disagree: rank 0 has a tensor of shape" in text


def never_ends(world):
    while True:
        cases.pause(0)


@pytest.mark.slow
def test_processes_that_do_not_end_are_killed():
    with pytest.raises(ProcessesError, match=r"rank 0: .*said nothing"):
        run_processes(never_ends, 1, limit_seconds=12)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "num_processes must be at least 1, got 0"),
        ((1,), {"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ((999,), {"device": "cuda"}, "num_processes must be at most the"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        run_processes(never_ends, *arguments, **options)


def test_hosts_of_gpus_wait_for_the_compilers_of_others(monkeypatch):
    """On a GPU timeout_seconds is of kernels that wait for kernels; on the CPU hosts do all waiting themselves."""
    timeouts = []
    monkeypatch.setattr(memory.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(memory.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(memory.dist, "new_group", lambda ranks, timeout, **options: timeouts.append(timeout))
    memory.SymmetricMemory("group", 2.0, torch.device("cuda", 0))
    memory.SymmetricMemory("group", 3600.0, torch.device("cuda", 0))
    memory.SharedMemory("group", 2.0)
    assert [timeout.total_seconds() for timeout in timeouts] == [memory.LONGEST_COMPILING, 3600.0, 2.0]
