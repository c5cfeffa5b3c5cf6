"""`tilecrew simulate`: what it prints, its exit codes, its picture."""

import dataclasses
import importlib.util
import inspect

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("triton")

from tilecrew import cli
from tilecrew.gated_delta_rule import crew_forward_scan
from tilecrew.simulator import run
from tilecrew.simulator.machine import Event


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(*arguments: str):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.build_app(), ["simulate", *arguments])


def lines_of(output: str) -> dict[str, str]:
    return {line[:16].strip(): line[16:].strip() for line in output.splitlines()}


def has_colour(path, colour: str) -> bool:
    from matplotlib import colors, image

    pixels = np.round(image.imread(path)[..., :3] * 255)
    wanted = np.round(np.array(colors.to_rgb(colour)) * 255)
    return bool((np.abs(pixels - wanted).max(-1) <= 1).any())


def without(region, name: str, location: str):
    """A copy of a region, and of those inside, without one operation."""
    operations = [
        dataclasses.replace(op, regions=tuple(without(inner, name, location) for inner in op.regions))
        for op in region.operations
        if (op.name, op.location) != (name, location)
    ]
    return dataclasses.replace(region, operations=tuple(operations))


def drop(monkeypatch, name: str, method: str, statement: str) -> None:
    """Kernels are simulated without the operation that a statement of a method of ScanCrew became."""
    lines = inspect.getsource(crew_forward_scan).splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f"def {method}("))
    number = next(number for number, line in enumerate(lines, 1) if number > first and statement in line)
    location = f"crew_forward_scan.py:{number}"
    compile_program = run.compile_program

    def compile_without(launch):
        program = compile_program(launch)
        region = without(program.kernel.region, name, location)
        return dataclasses.replace(program, kernel=dataclasses.replace(program.kernel, region=region))

    monkeypatch.setattr(run, "compile_program", compile_without)


def test_a_good_run_with_its_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    from tilecrew.simulator import timeline

    path = tmp_path / "new folder" / "scan.png"
    result = invoke("forward-scan", "--seed", "1", "--timeline", str(path))
    assert result.exit_code == 0, result.output
    lines = lines_of(result.output)
    assert lines["kernel"] == "forward-scan, seed 1"
    assert lines["roles"].split(", ")[:2] == ["scan_role", "attention_role"]
    programs, steps = lines["programs"].split(", ")
    assert programs == "2"
    assert int(steps.split()[0]) > 200
    assert 1e-4 < float(lines["relative error"]) < 5e-3
    assert lines["timeline"] == str(path)
    for colour in (timeline.RUNNING, *timeline.ASYNCHRONOUS.values()):
        assert has_colour(path, colour)


@pytest.mark.parametrize("kernel", ["prepare", "prepare-gated", "forward-roles", "forward-scan-128"])
def test_the_other_kernels(kernel):
    result = invoke(kernel)
    assert result.exit_code == 0, result.output
    assert 1e-5 < float(lines_of(result.output)["relative error"]) < 5e-3


def test_an_unknown_kernel():
    result = invoke("backward")
    assert result.exit_code == 2
    known = "prepare, prepare-gated, forward-roles, forward-scan, forward-scan-128"
    assert f"KERNEL must be one of {known}, got 'backward'" in result.output


def test_a_missing_arrival_is_a_deadlock(monkeypatch):
    drop(monkeypatch, "ttng.arrive_barrier", "release_output", "mbarrier.arrive")
    result = invoke("forward-scan")
    assert result.exit_code == 1
    assert "forward-scan, seed 0: fault" in result.output
    assert "deadlock: program 0: scan_role waits for parity 0 of output_free of crew_forward_scan.py" in result.output


@pytest.mark.parametrize("seed", ["0", "7"])
def test_a_missing_fence_is_a_fault_in_every_order(monkeypatch, seed):
    drop(monkeypatch, "ttng.fence_async_shared", "finish_chunk", "fence_async_shared")
    result = invoke("forward-scan", "--seed", seed)
    assert result.exit_code == 1
    assert "the store of store_role reads output of crew_forward_scan.py" in result.output
    assert "scan_role wrote it at kernel_forward_scan.py" in result.output
    assert "without a fence" in result.output


def test_a_wrong_result(monkeypatch):
    from tilecrew.simulator import kernels

    monkeypatch.setattr(kernels, "LARGEST_ERROR", 1e-6)
    result = invoke("prepare")
    assert result.exit_code == 1
    assert "above 1.0e-06" in result.output


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("triton", (), "the simulator needs triton; install with: pip install triton"),
        ("matplotlib", ("--timeline", "x.png"), "the simulator needs matplotlib; install with: pip install matplotlib"),
    ],
)
def test_missing_packages(missing, options, message, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else find_spec(name, *rest)
    )
    result = invoke("forward-scan", *options)
    assert result.exit_code == 2
    assert message in result.output


def test_a_timeline_shows_its_block_and_its_window_only(tmp_path):
    pytest.importorskip("matplotlib")
    from tilecrew.simulator import timeline

    path = tmp_path / "x.png"
    events = [
        Event(0, "a_role", "wait", 5, 90, "x.py:1", "full of ring.py:28, barrier 2"),
        Event(0, "a_role", "copy", 92, 99, "x.py:2"),
        Event(1, "a_role", "store", 10, 20, "x.py:3"),
    ]
    timeline.draw(events, "two blocks", path)
    assert has_colour(path, timeline.ASYNCHRONOUS["copy"])
    assert not has_colour(path, timeline.ASYNCHRONOUS["store"])
    timeline.draw([events[0], dataclasses.replace(events[1], kind="wait"), events[2]], "no copy", path, window=50)
    assert not has_colour(path, timeline.ASYNCHRONOUS["copy"])
    with pytest.raises(ValueError, match="no event of block 2"):
        timeline.draw(events, "nothing", path, block=2)


def test_operations_in_flight_at_once_lie_in_rows_of_their_own():
    pytest.importorskip("matplotlib")
    from tilecrew.simulator import timeline

    spans = [(0, 10), (2, 4), (4, 6), (5, 12), (10, 10), (10, 11)]
    events = [Event(0, "a_role", "copy", start, end, "x.py:1") for start, end in spans]
    assert timeline._rows(events) == [0, 1, 1, 2, 0, 1]
    assert timeline.barrier_label("ready_64 of handoff.py:22, barrier 0") == "ready_64 0"
