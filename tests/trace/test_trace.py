"""`tilecrew trace`: Proton's trace read into spans, the table, the files, and what the command says where it cannot
run. No GPU."""

import importlib
import json
import re

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tilecrew import cli
from tilecrew.trace import run, spans
from tilecrew.trace.spans import Span, TraceError

PERIOD = 1000
CHUNKS = 6


def proton_event(scope, warp, start, cycles, program=0):
    """An event as Proton writes it: a clock of 1 GHz, so that a microsecond is 1000 cycles."""
    return {
        "cat": "some_kernel",
        "name": scope,
        "ph": "X",
        "pid": f"some_kernel Core{40 + program} CTA{program}",
        "tid": f"warp {warp} (line 0)",
        "ts": start / 1000,
        "dur": cycles / 1000,
        "args": {"call_stack": ["ROOT", "some_kernel"]},
    }


def pipeline_events(program=0, offset=5000):
    """Three roles: chunk i + 1 is loaded, i computed and i - 1 stored at the same time."""
    events = []
    for i in range(CHUNKS):
        now = offset + i * PERIOD
        events += [
            proton_event("load: wait empty", 8, now - 1000, 100, program),
            proton_event("load: issue", 8, now - 900, 50, program),
            proton_event("store: O", 9, now + 1010, 300, program),
        ]
        for warp in (0, 1, 2, 3):
            delay = 3 * warp
            events += [
                proton_event("scan: wait inputs", warp, now + delay, 20, program),
                proton_event("scan: O out [-1]", warp, now + 20 + delay, 80, program),
                proton_event("scan: S", warp, now + 100 + delay, 850 + i, program),
            ]
    return events


def write(path, events):
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}) + "\n")
    return path


@pytest.fixture
def proton_trace(tmp_path):
    events = pipeline_events() + pipeline_events(program=1, offset=90_000)
    return write(tmp_path / "proton.chrome_trace", events[::-1])  # in any order


def test_spans_of_one_program(proton_trace):
    found = spans.read(proton_trace, 0, CHUNKS)
    assert found[0] == Span("load", "wait empty", 0, 0, 100)
    assert found == sorted(found, key=lambda span: span.start)
    by_stage = {(span.role, span.stage, span.chunk): span for span in found}
    # The first warp stands for its role; the clock starts at the first span, which is 1000 cycles before the scan's.
    assert by_stage["scan", "S", 3] == Span("scan", "S", 3, 4100, 4953)
    assert by_stage["store", "O", 3] == Span("store", "O", 3, 5010, 5310)
    assert by_stage["scan", "wait inputs", 0].is_wait and not by_stage["scan", "S", 0].is_wait
    # What works for the chunk before counts as that chunk's, and has nothing to do at the first.
    assert by_stage["scan", "O out", 0] == Span("scan", "O out", 0, 2020, 2100)
    assert ("scan", "O out", -1) not in by_stage and ("scan", "O out", CHUNKS - 1) not in by_stage
    assert len(found) == 6 * CHUNKS - 1
    assert spans.read(proton_trace, 1, CHUNKS) == found


def test_what_is_missing_is_said(proton_trace, tmp_path):
    with pytest.raises(TraceError, match="no span of program 2"):
        spans.read(proton_trace, 2, CHUNKS)
    with pytest.raises(TraceError, match=r"6 spans in warp \d for 7 chunks"):
        spans.read(proton_trace, 0, CHUNKS + 1)
    events = pipeline_events()
    lost = next(event for event in events if event["name"] == "scan: S" and event["tid"].startswith("warp 0 "))
    with pytest.raises(TraceError, match="scan: S: 5 spans in warp 0 for 6 chunks"):
        spans.read(write(tmp_path / "lost", [event for event in events if event is not lost]), 0, CHUNKS)
    with pytest.raises(TraceError, match="'nameless' names no role"):
        spans.read(write(tmp_path / "x", [proton_event("nameless", 0, 0, 1)]), 0, 1)


def test_roles_are_in_the_order_of_the_pipeline():
    names = ("store", "scan 0", "load_value", "scan 1", "load_inverse")
    found = [Span(role, "x", 0, start, start + 1) for start, role in enumerate(names)]
    assert spans.roles_of(found) == ["load_value", "load_inverse", "scan 0", "scan 1", "store"]


def test_the_summary_has_medians(proton_trace):
    rows = spans.summary(spans.read(proton_trace, 0, CHUNKS))
    assert [(row.role, row.stage) for row in rows] == [
        ("load", "wait empty"),
        ("load", "issue"),
        ("scan", "wait inputs"),
        ("scan", "S"),
        ("scan", "O out"),
        ("store", "O"),
    ]
    cycles = {(row.role, row.stage): row.cycles for row in rows}
    assert cycles["scan", "S"] == 852.5 and cycles["store", "O"] == 300
    assert {row.period for row in rows} == {PERIOD}


def test_the_chrome_trace_has_a_track_for_each_role(proton_trace, tmp_path):
    found = spans.read(proton_trace, 0, CHUNKS)
    spans.write_chrome(found, "a kernel", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(tracks.values()) == ["load", "scan", "store"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(found)
    (third,) = (event for event in complete if event["name"] == "S" and event["args"]["chunk"] == 3)
    assert tracks[third["tid"]] == "scan"
    assert (third["ts"], third["dur"], third["args"]["cycles"]) == (4.1, 0.853, 853)


def has_colour(path, colour: str) -> bool:
    from matplotlib import colors, image

    pixels = np.round(image.imread(path)[..., :3] * 255)
    return bool((np.abs(pixels - np.round(np.array(colors.to_rgb(colour)) * 255)).max(-1) <= 1).any())


def test_the_picture_shows_its_chunks_and_their_neighbours(proton_trace, tmp_path):
    pytest.importorskip("matplotlib")
    from tilecrew.trace import timeline

    found = spans.read(proton_trace, 0, CHUNKS)
    path = tmp_path / "trace.png"
    timeline.draw(found, "a kernel", path, (2, 3))
    # Meanwhile chunk 1 is stored and chunk 3 is loaded.
    shown = [chunk for chunk in range(CHUNKS) if has_colour(path, timeline.colour_of(chunk))]
    assert shown == [1, 2, 3]
    with pytest.raises(ValueError, match="no span of chunks 7:9"):
        timeline.draw(found, "nothing", path, (7, 9))


def test_the_buffer_holds_every_record():
    for num_chunks in (1, 5, 64, 100):
        mode = run.profile_mode(12, num_chunks)
        size = int(re.search(r"buffer_size=(\d+)", mode)[1])
        assert size % 12 == 0
        per_warp = size // 12
        assert per_warp & (per_warp - 1) == 0 and per_warp >= num_chunks * run.RECORD_BYTES_PER_CHUNK


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(*arguments: str):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.build_app(), ["trace", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["portable"], "PIPELINE must be one of scan, roles, got 'portable'"),
        (["scan", "--chunks", "4-8"], "--chunks must be FIRST:BEHIND, such as 4:8, got '4-8'"),
        (["scan", "--chunks", "8:8"], "--chunks must lie within 0:64, got 8:8"),
        (["roles", "--tokens", "100", "--chunks", "1:3"], "--chunks must lie within 0:2, got 1:3"),
        (["scan", "--block-v", "32"], "--block-v must be one of 64, 128 for scan, got 32"),
        (["roles", "--query-heads", "3"], "--value-heads must be a multiple of --query-heads 3, got 8"),
        (["roles", "--program", "8"], "--program must be below 8, got 8"),
        (["scan", "--tokens", "1000000"], "16 programs of 15625 chunks are more than Proton can record"),
    ],
)
def test_bad_settings(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def cannot_run(monkeypatch, **facts):
    """What the command says on a Hopper GPU with everything installed, but for `facts`."""
    find_spec, import_module = importlib.util.find_spec, importlib.import_module

    def import_or_fail(name, *rest):
        if name == facts.get("missing"):
            raise ImportError(f"No module named {name!r}")
        return import_module(name, *rest)

    def find(name, *rest):
        return None if name == facts.get("missing") else find_spec(name, *rest)

    hardware = run.hardware_of("cpu").__class__(
        "cuda", "cuda", capability=facts.get("capability", (9, 0)), name="GPU X"
    )
    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(run.importlib, "import_module", import_or_fail)
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: facts.get("gpu", True))
    monkeypatch.setattr(run, "hardware_of", lambda device: hardware)
    monkeypatch.setattr(run, "run_trace", lambda settings, console: True)
    return invoke("scan")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"missing": "matplotlib"}, "it needs matplotlib; install with: pip install matplotlib"),
        ({"missing": "triton.profiler.language"}, "it needs Triton with its profiler, triton.profiler: No module"),
        ({"gpu": False}, "it measures on a GPU, and torch sees none here"),
        ({"capability": (8, 0)}, "the pipelines are kernels for Hopper (compute capability 9.0), this is a GPU X"),
    ],
)
def test_what_is_missing(monkeypatch, facts, message):
    pytest.importorskip("triton")
    pytest.importorskip("matplotlib")
    result = cannot_run(monkeypatch, **facts)
    assert result.exit_code == 2
    assert f"tilecrew trace cannot run: {message}" in result.output


def test_nothing_is_missing(monkeypatch):
    pytest.importorskip("triton")
    pytest.importorskip("matplotlib")
    assert cannot_run(monkeypatch).exit_code == 0


def test_from_protons_file_to_the_output(monkeypatch, proton_trace, tmp_path):
    """All but the launch: the files, the table, and exit code 1 where spans are missing."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "require", lambda settings: None)
    monkeypatch.setattr(run, "why_not", lambda: None)
    monkeypatch.setattr(run.torch.cuda, "get_device_name", lambda: "GPU X")
    monkeypatch.setattr(
        run, "trace", lambda settings: (spans.read(proton_trace, settings.program, CHUNKS), "some_kernel")
    )
    output = tmp_path / "new" / "folder"
    result = invoke("scan", "--chunks", "2:4", "--program", "1", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in output.iterdir()) == ["trace.json", "trace.png"]
    assert re.search(r"scan\W+S\W+852\W+1000", result.output)
    result = invoke("scan", "--program", "2", "--output", str(output))
    assert result.exit_code == 1
    assert "the trace cannot be used" in result.output and "no span of program 2" in result.output
