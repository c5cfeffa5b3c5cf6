"""GPU tests of emulated ranks in a process of their own: their streams need more of CUDA's hardware queues than others.

CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when it starts, and all processes of a GPU share its channels: many test
processes with so many queues each would use them up. With 26 at once 17 were out of memory when they made streams.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import slots

ROOT = Path(__file__).parent.parent
MAX_PROCESSES = 12  # of a machine at a time


def run_emulated(path, part="", limit_seconds=1800):
    """Runs a file of tests, or a part of it (conftest's `--part`), when its turn has come, and shows its output where
    one fails; every test skipped is a skip."""
    with slots.one_of(MAX_PROCESSES, "emulated ranks"):
        code, text = _run(path, part, limit_seconds)
    assert code == 0, f"exit code {code}\n{text}"
    if " passed" not in text.splitlines()[-1]:
        pytest.skip(text.splitlines()[-1])


def _run(path, part, limit_seconds):
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONPATH": str(ROOT)}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    # A watchdog ends the process, and what it says must not be captured.
    command = [sys.executable, "-m", "pytest", "-v", "-x", "--capture=sys", "-p", "no:cacheprovider", str(path)]
    command += ["--part", part] if part else []
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
        try:
            code = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = f"none after {limit_seconds} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        return code, output.read()
