"""The record of a full run of the GPU tests, tied to its sources: `pytest -m gpu --gpu-record FILE` writes it.

A test that has not ended counts as failed, and the record is written while the run goes on: one that is cut off leaves
what is left to do. Where that is so, or where a test was wrong, and not what it tests, `--gpu-record-again FILE` runs
only the tests that failed, once they are mended, and brings their outcomes into the record, which says how many they
were. The package's sources must be the same.
"""

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import time
from typing import Any

import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
COUNTS = ("passed", "failed", "skipped")
PLACE = ("device", "torch", "triton")
SECONDS_BETWEEN_WRITES = 2.0
FIELDS = ("source_sha256", *COUNTS, *PLACE, "date", "failed_tests", "run_again")


def source_sha256(root: pathlib.Path = ROOT) -> str:
    """Over every tilecrew/**/*.py in order: its path relative to the root, then its bytes."""
    digest = hashlib.sha256()
    for path in sorted(path.relative_to(root) for path in (root / "tilecrew").rglob("*.py")):
        digest.update(str(path).encode())
        digest.update((root / path).read_bytes())
    return digest.hexdigest()


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record", metavar="FILE", help="write the record of a full run of the GPU tests (-m gpu) to FILE"
    )
    parser.addoption(
        "--gpu-record-again", metavar="FILE", help="run the tests that failed in the record FILE again, and update it"
    )


def register(config: pytest.Config) -> None:
    path, again = config.getoption("--gpu-record"), config.getoption("--gpu-record-again")
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist: it has the tests, the controller sees every report
    if again is not None:
        config.pluginmanager.register(OnlyFailedTests(previous_record(again)), "only_failed_tests")
        if not is_worker:
            config.pluginmanager.register(GpuRecorder(pathlib.Path(again), previous_record(again)), "gpu_recorder")
    if path is None or is_worker:
        return
    is_full = config.getoption("markexpr") == "gpu" and not config.getoption("keyword") and not _has_selection(config)
    if not is_full:
        raise pytest.UsageError(
            "--gpu-record records full runs only: use it with -m gpu, without -k, paths or --deselect"
        )
    config.pluginmanager.register(GpuRecorder(pathlib.Path(path)), "gpu_recorder")


def _has_selection(config: pytest.Config) -> bool:
    paths = [pathlib.Path(argument).resolve() for argument in config.args]
    return any(path not in (ROOT, ROOT / "tests") for path in paths) or bool(config.getoption("deselect"))


def previous_record(path: str) -> dict[str, Any]:
    """A record with failures, of the same sources on such a device with the same versions; else a UsageError."""
    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu-record-again needs a CUDA device")
    record: dict[str, Any] = json.loads(pathlib.Path(path).read_text())
    now = make_record(0, [], 0)
    for name in ("source_sha256", *PLACE):
        if record[name] != now[name]:
            raise pytest.UsageError(f"--gpu-record-again: {name} is {now[name]}, and {record[name]} in {path}")
    if not record["failed_tests"]:
        raise pytest.UsageError(f"--gpu-record-again: no test has failed in {path}")
    return record


class OnlyFailedTests:
    """Deselects all others."""

    def __init__(self, previous: dict[str, Any]) -> None:
        self._failed = set(previous["failed_tests"])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._failed])
        items[:] = [item for item in items if item.nodeid in self._failed]


class GpuRecorder:
    """Counts outcomes and writes the record, now and then and when the session ends.

    previous: the record whose failed tests alone run.
    """

    def __init__(self, path: pathlib.Path, previous: dict[str, Any] | None = None) -> None:
        self._path = path
        self._previous = previous
        self._failed: set[str] = set()
        self._passed: set[str] = set()
        self._skipped: set[str] = set()
        self._ended: set[str] = set()
        self._collected: set[str] = set() if previous is None else set(previous["failed_tests"])
        self._written = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.skipped:
            self._skipped.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)
        if report.when == "teardown":
            self._ended.add(report.nodeid)
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self._write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu-record needs a CUDA device")
        if not self._write() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write(self) -> bool:
        """False on a machine on which nothing has run: it has tested nothing, and has no record."""
        has_run = (self._passed | self._failed) & self._ended
        if not has_run or not torch.cuda.is_available():
            return False
        failed = self._failed | (self._collected - self._ended)
        passed = has_run - failed
        record = make_record(len(passed), sorted(failed), len(self._skipped - failed))
        if self._previous is not None:
            record |= {
                "passed": self._previous["passed"] + len(passed),
                "skipped": self._previous["skipped"] + len(self._skipped - failed),
                "run_again": self._previous["run_again"] + len(has_run),
            }
        self._path.write_text(json.dumps(record, indent=2) + "\n")
        self._written = time.monotonic()
        return True


def make_record(passed: int, failed: list[str], skipped: int) -> dict[str, Any]:
    counts = {"passed": passed, "failed": len(failed), "skipped": skipped}
    return {
        "source_sha256": source_sha256(),
        **counts,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "failed_tests": failed,
        "run_again": 0,
    }
