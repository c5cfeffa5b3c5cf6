"""Runs kernel tests under Triton's interpreter, in a process of its own: Triton decides at import whether it
interprets, and the tests that compile kernels share the parent's process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run_interpreted(file: str) -> None:
    """Fails with the output of `pytest FILE` where a test of it fails under the interpreter. file: from `tests/` on."""
    path = ROOT / "tests" / file
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=900)
    assert child.returncode == 0, f"{' '.join(command)}\n{child.stdout}\n{child.stderr}"


def allow_loop_bounds() -> None:
    """Lets the interpreter of Triton up to 3.9 loop over range(n) of a runtime n with NumPy 2.4 and newer.

    The interpreter keeps scalars as arrays of one element and calls int() on them, which NumPy no longer converts.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def fill_empty_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN on the CPU, so that an output which a kernel forgets to write fails its test."""
    empty = torch.empty

    def nan_filled(*arguments, **options):
        tensor = empty(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", nan_filled)
