"""Emulated ranks on one GPU, in a process of their own."""

from pathlib import Path

import pytest

from tests.own_process import run_emulated


@pytest.mark.gpu
@pytest.mark.emulated
@pytest.mark.slow
def test_emulated_ranks():
    run_emulated(Path(__file__).parent / "emulated_gpu.py")
