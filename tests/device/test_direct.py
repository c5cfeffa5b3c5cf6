"""Launches by plans, beside Triton's own with the installed version and those under .triton/, on a fake CUDA driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
OTHER_VERSIONS = sorted(path.parent.name for path in (ROOT / ".triton").glob("*/triton"))
INSTALLED = "installed"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake CUDA driver, nor for Triton's launcher"),
]


@pytest.fixture(scope="module", params=[INSTALLED, *OTHER_VERSIONS])
def report(request, tmp_path_factory):
    version, folder = request.param, tmp_path_factory.mktemp("driver")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    if version != INSTALLED:
        paths = [str(ROOT / ".triton" / version), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    child = subprocess.run(
        [sys.executable, "-m", "tests.device.direct_launches", str(folder), COMPILER],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert version in (INSTALLED, report["triton"])
    return report


def test_the_driver_gets_the_same_bytes(report):
    assert report["differences"]
    for case, differences in report["differences"].items():
        assert differences == [], case


def test_launch_hooks_are_called(report):
    assert report["hooks"] == ["enter recurrent_kernel", "exit recurrent_kernel"]


def test_other_circumstances_end_a_plan(report):
    assert report["ended"] == {"nothing": False, "debug": True, "device": True}
