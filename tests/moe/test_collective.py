"""The layer over all-to-all: gloo between processes of this machine; what each checks is in collective_rank.py."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tilecrew.moe import collective

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def run_ranks(module, world_size, tmp_path, *arguments):
    """Starts all ranks, ends the others soon after one has failed, and fails with what they wrote."""
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    logs = [(tmp_path / f"rank{rank}.txt").open("w+") for rank in range(world_size)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(tmp_path / "store"), *arguments],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    texts = []
    for number, log in enumerate(logs):
        log.seek(0)
        texts.append(f"rank {number}, exit status {ranks[number].returncode}:\n{log.read()}")
        log.close()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_agree_with_the_loop_over_all_experts(world_size, tmp_path):
    run_ranks("tests.moe.collective_rank", world_size, tmp_path)


@pytest.mark.slow
def test_no_rank_waits_for_ever(tmp_path):
    run_ranks("tests.moe.collective_rank", 2, tmp_path, "absence")


@pytest.mark.slow
def test_a_failing_rank_fails_the_test(tmp_path):
    """A rank whose store cannot be made: what the ranks' own checks rely on to be seen."""
    (tmp_path / "store").mkdir()
    with pytest.raises(AssertionError, match="rank 0, exit status 1"):
        run_ranks("tests.moe.collective_rank", 1, tmp_path)


def test_chunks_cover_the_experts_of_every_rank():
    for num_experts, world_size, num_chunks in ((7, 3, 2), (3, 4, 1), (64, 8, 5), (10, 1, 10)):
        for rank in range(world_size):
            chunks = [
                collective._chunk_of_rank(rank, num_experts, world_size, chunk, num_chunks)
                for chunk in range(num_chunks)
            ]
            experts = [expert for chunk in chunks for expert in chunk]
            assert experts == list(collective.expert_range(rank, num_experts, world_size))
