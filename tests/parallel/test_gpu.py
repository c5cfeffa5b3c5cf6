"""Emulated ranks on one GPU, in a process of their own."""

from pathlib import Path

import pytest

from tests.own_process import run_emulated


# Blocks of all ranks must be resident at once: no two tests with emulated ranks at the same time.
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.xdist_group("emulated ranks")
def test_emulated_ranks():
    run_emulated(Path(__file__).parent / "emulated_gpu.py")
