"""The kernels that move rows between ranks, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).parent / "interpreted_exchange.py"))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=900)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"
