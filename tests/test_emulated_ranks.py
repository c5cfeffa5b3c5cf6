"""Tests of emulated ranks on one GPU, those of a file in a process of their own.

A rank that waits must not share a hardware queue with one that it waits for. CUDA reads how many queues a process gets
when it starts, and a GPU has too few for every process of a parallel test run to have as many as these need.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/emulated_gpu*.py"))
NUM_QUEUES = 32
TIMEOUT_SECONDS = 300


def test_there_are_files():
    assert FILES


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_in_a_process_of_its_own(file):
    of_this_run = ("PYTEST_", "CUDA_DEVICE_MAX_CONNECTIONS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_this_run)}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(NUM_QUEUES)
    options = ["-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "--durations=5"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert run.returncode == 0, run.stdout
    assert re.search(r"\b[1-9]\d* passed", run.stdout), run.stdout
