"""The committed record of the GPU tests, and the recorder itself."""

import datetime
import hashlib
import json
import pathlib
import re
import warnings

import pytest
import torch

from tests import gpu_record

pytest_plugins = ("pytester",)


@pytest.mark.skipif(not gpu_record.RECORD.exists(), reason="the GPU tests have not been recorded yet")
def test_the_record_is_complete():
    record = json.loads(gpu_record.RECORD.read_text())
    assert tuple(record) == gpu_record.FIELDS
    assert re.fullmatch(r"[0-9a-f]{64}", record["source_sha256"])
    assert record["failed"] == 0
    assert record["passed"] > 0
    assert record["skipped"] >= 0
    assert all(record[name] for name in ("device", "torch", "triton"))
    datetime.datetime.fromisoformat(record["date"])
    if record["source_sha256"] != gpu_record.source_sha256():
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn("tests/gpu_record.json is of other sources: run `make gpu-test` on a GPU", stacklevel=1)


def test_hash_of_the_sources(tmp_path):
    for name in ("b.py", "a/c.py", "a/d.txt"):
        path = tmp_path / "tilecrew" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    expected = hashlib.sha256(b"tilecrew/a/c.pya/c.pytilecrew/b.pyb.py").hexdigest()
    assert gpu_record.source_sha256(tmp_path) == expected


def test_the_hash_is_that_of_the_documented_command(monkeypatch):
    monkeypatch.chdir(gpu_record.ROOT)
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path("tilecrew").rglob("*.py")):
        digest.update(str(path).encode())
        digest.update(path.read_bytes())
    assert gpu_record.source_sha256() == digest.hexdigest()


CONFTEST = """
from tests import gpu_record

pytest_addoption = gpu_record.add_option
pytest_configure = gpu_record.register
"""
TESTS = """
import pytest

@pytest.mark.gpu
def test_passes(): pass

@pytest.mark.gpu
def test_fails(): assert not {fails}

@pytest.mark.gpu
def test_skips(): pytest.skip("reason")

def test_on_the_cpu(): assert False
"""


@pytest.fixture
def project(pytester, monkeypatch):
    monkeypatch.setattr(gpu_record, "ROOT", pytester.path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a GPU\n")
    pytester.makeconftest(CONFTEST)
    return pytester


@pytest.mark.parametrize("fails", [False, True])
def test_a_full_run_is_recorded(project, fails):
    project.makepyfile(TESTS.format(fails=fails))
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record", "record.json")
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if fails else pytest.ExitCode.OK)
    record = json.loads((project.path / "record.json").read_text())
    assert tuple(record) == gpu_record.FIELDS
    assert (record["passed"], record["failed"], record["skipped"]) == (2 - fails, int(fails), 1)
    assert record["device"] == "a device"


def test_failed_tests_run_again(project):
    """A test is mended, the sources are the same: its new outcome is on record, and that it has run again."""
    project.makepyfile(test_one=TESTS.format(fails=True))
    project.runpytest_inprocess("-m", "gpu", "--gpu-record", "record.json")
    first = json.loads((project.path / "record.json").read_text())
    assert (first["failed_tests"], first["run_again"]) == (["test_one.py::test_fails"], 0)
    project.makepyfile(test_one=TESTS.format(fails=False))
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record-again", "record.json")
    result.assert_outcomes(passed=1, deselected=3)
    record = json.loads((project.path / "record.json").read_text())
    assert (record["passed"], record["failed"], record["skipped"]) == (2, 0, 1)
    assert (record["failed_tests"], record["run_again"]) == ([], 1)
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record-again", "record.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_what_a_run_that_was_cut_off_has_left_runs_again(project):
    interrupted = TESTS.format(fails=False).replace("assert not False", "raise KeyboardInterrupt")
    project.makepyfile(test_one=interrupted, test_two=TESTS.format(fails=False))
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record", "record.json", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    record = json.loads((project.path / "record.json").read_text())
    left = ["test_one.py::test_fails", "test_one.py::test_skips"]
    left += [f"test_two.py::test_{name}" for name in ("fails", "passes", "skips")]
    assert (record["passed"], record["failed"], record["failed_tests"]) == (1, 5, left)
    project.makepyfile(test_one=TESTS.format(fails=False))
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record-again", "record.json")
    result.assert_outcomes(passed=3, skipped=2, deselected=3)
    record = json.loads((project.path / "record.json").read_text())
    assert (record["passed"], record["failed"], record["skipped"], record["run_again"]) == (4, 0, 2, 3)


def test_the_record_is_written_while_workers_run(project, monkeypatch):
    """What pytest-xdist tells the controller: the tests of its workers, and their reports."""
    monkeypatch.setattr(gpu_record, "SECONDS_BETWEEN_WRITES", -1.0)
    path = project.path / "record.json"
    recorder = gpu_record.GpuRecorder(path)
    recorder.pytest_xdist_node_collection_finished(None, ["a", "b", "c"])
    for name, outcome in (("a", "passed"), ("b", "failed")):
        for when in ("setup", "call", "teardown"):
            assert path.exists() == (name == "b")
            recorder.pytest_runtest_logreport(pytest.TestReport(name, ("", 0, ""), {}, outcome, None, when))
    record = json.loads(path.read_text())
    assert (record["passed"], record["failed_tests"]) == (1, ["b", "c"])


def test_other_sources_are_not_run_again(project, monkeypatch):
    project.makepyfile(test_one=TESTS.format(fails=True))
    project.runpytest_inprocess("-m", "gpu", "--gpu-record", "record.json")
    monkeypatch.setattr(gpu_record, "source_sha256", lambda: "of other sources")
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record-again", "record.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*source_sha256 is*"])


@pytest.mark.parametrize(
    "arguments", [[], ["-m", "gpu", "-k", "passes"], ["-m", "gpu", "test_one.py"], ["-m", "not gpu"]]
)
def test_a_partial_run_is_not_recorded(project, arguments):
    project.makepyfile(test_one=TESTS.format(fails=False))
    result = project.runpytest_inprocess(*arguments, "--gpu-record", "record.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert not (project.path / "record.json").exists()


def test_a_gpu_on_which_everything_was_skipped_fails(project):
    project.makepyfile("import pytest\n\n@pytest.mark.gpu\ndef test_skips(): pytest.skip('reason')\n")
    result = project.runpytest_inprocess("-m", "gpu", "--gpu-record", "record.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert not (project.path / "record.json").exists()
