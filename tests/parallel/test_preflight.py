"""What doctor checks between ranks, and that it fails where a check does."""

import pytest
import torch

from tilecrew import cli
from tilecrew.parallel import ProcessesError, preflight

pytest.importorskip("typer")
pytest.importorskip("rich")


def invoke(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.build_app(), list(arguments))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """The tables above the one meant take long, and have tests of their own."""
    monkeypatch.setattr(cli, "print_report", lambda console: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.slow
def test_shared_memory_is_checked_on_any_machine():
    check = preflight._processes("cpu", 2)
    assert check == preflight.Check("shared memory between 2 processes", True, "content, signals and barrier")


def test_wrong_content_is_found(monkeypatch):
    monkeypatch.setattr(preflight, "run_processes", lambda *_, **options: [[1000, 2000] * 2, [1000, 1999] * 2])
    check = preflight._processes("cpu", 2)
    assert check.is_right is False
    assert "wrong content" in check.detail


def test_a_process_that_fails_is_found(monkeypatch):
    def fail(*_, **options):
        raise ProcessesError({1: "Traceback\nRuntimeError: out of shared memory"})

    monkeypatch.setattr(preflight, "run_processes", fail)
    check = preflight._processes("cpu", 2)
    assert (check.is_right, check.detail) == (False, "rank 1: RuntimeError: out of shared memory")


def test_a_check_that_raises_is_one_that_fails():
    def broken():
        raise RuntimeError("first line\nlast line")
        yield

    assert list(preflight._guarded("link", broken)) == [preflight.Check("link", False, "last line")]


@pytest.mark.parametrize("is_right", [True, False, None])
def test_doctor_fails_where_a_check_does(is_right, monkeypatch):
    checks = [preflight.Check("fact", None, "3"), preflight.Check("link [0]", is_right, "found [1]")]
    monkeypatch.setattr(preflight, "run_preflight", lambda: iter(checks))
    result = invoke("doctor")
    assert result.exit_code == (1 if is_right is False else 0)
    assert "link [0]" in result.output
    assert "found [1]" in result.output
    assert invoke("doctor", "--no-ranks").exit_code == 0


@pytest.mark.gpu
def test_the_gpus_of_this_machine():
    checks = list(preflight.run_preflight())
    wrong = [check for check in checks if check.is_right is False]
    assert not wrong, wrong
    text = "\n".join(f"{check.name}: {check.detail}" for check in checks)
    for device in range(torch.cuda.device_count()):
        assert f"GPU {device} counts under load: 64000 of 64000 additions" in text
    assert "communication blocks" in text
