"""The record of a full run of the GPU tests, tied to its sources: `pytest -m gpu --gpu-record FILE` writes it."""

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any

import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
FIELDS = ("source_sha256", "passed", "failed", "skipped", "device", "torch", "triton", "date")


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


def register(config: pytest.Config) -> None:
    path = config.getoption("--gpu-record")
    if path is None or hasattr(config, "workerinput"):  # pytest-xdist: the controller sees every report
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


class GpuRecorder:
    """Counts outcomes and writes the record when the session ends."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._failed: set[str] = set()
        self._passed: set[str] = set()
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.skipped:
            self._skipped.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
            return  # what was not run cannot be on record
        passed = len(self._passed - self._failed)
        if torch.cuda.is_available() and passed + len(self._failed) == 0:
            # A machine with a GPU on which nothing ran has tested nothing.
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu-record needs a CUDA device")
        record = make_record(passed, len(self._failed), len(self._skipped))
        self._path.write_text(json.dumps(record, indent=2) + "\n")


def make_record(passed: int, failed: int, skipped: int) -> dict[str, Any]:
    counts = {"passed": passed, "failed": failed, "skipped": skipped}
    return {
        "source_sha256": source_sha256(),
        **counts,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
