"""Launches by plans, beside Triton's own with the installed version and those under .triton/, on a fake CUDA driver."""

import json
import shutil

import pytest

pytest.importorskip("triton")
from tests.tritons import INSTALLED, VERSIONS, output_of, start

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake CUDA driver, nor for Triton's launcher"),
]


@pytest.fixture(scope="module", params=VERSIONS)
def report(request, tmp_path_factory):
    version, folder = request.param, tmp_path_factory.mktemp("driver")
    child = start(version, folder / "cache", "tests.device.direct_launches", str(folder), COMPILER)
    report = json.loads(output_of(version, child))
    assert version in (INSTALLED, report["triton"])
    return report


def test_the_driver_gets_the_same_bytes(report):
    assert report["differences"]
    for case, differences in report["differences"].items():
        assert differences == [], case


def test_the_driver_gets_the_same_bytes_for_remembered_launches(report):
    assert len(report["remembered"]) == 6
    for case, differences in report["remembered"].items():
        assert differences == [], case


def test_launch_hooks_are_called(report):
    assert report["hooks"] == ["enter recurrent_kernel", "exit recurrent_kernel"]


def test_other_circumstances_end_a_plan(report):
    assert report["ended"] == {"nothing": False, "debug": True, "device": True}
