"""The commands and their messages; the demo itself is in test_demo.py."""

import importlib.util
import json

import pytest
import torch

import tilecrew
from tilecrew import cli

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(*arguments: str):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.build_app(), list(arguments))


def without(monkeypatch, *names: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in names else find_spec(name, *rest)
    )


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("demo", "on a GPU 16384"),
        ("bench moe", "on the CPU 1,2"),
        ("bench grouped-gemm", "targets on a GPU"),
        ("trace", "128 for roles"),
    ],
)
def test_help_tells_defaults_that_depend_on_something(command, default):
    """In square brackets they would be taken for markup, and not be shown."""
    result = invoke(*command.split(), "--help")
    assert default in " ".join(result.output.replace("│", " ").split())


def test_help_lists_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "bench", "doctor"):
        assert command in result.output


def test_bench_measures_prints_and_writes(tmp_path, monkeypatch):
    from tilecrew.benchmark import cases

    monkeypatch.setitem(cases.FORWARD, "small", [cases.ForwardCase(1, 70, 1, 2)])
    monkeypatch.setitem(cases.DECODE, "small", [cases.DecodeCase(2, 1, 2)])
    options = ("--device", "cpu", "--peers", "", "--seconds", "0", "--output", str(tmp_path))
    result = invoke("bench", "gated-delta-rule", *options)
    assert result.exit_code == 0, result.output
    assert "1x70, 1/2" in result.output
    assert "decode" in result.output
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [row["operator"] for row in record["rows"]] == ["forward", "forward", "decode"]
    assert record["versions"]["tilecrew"]
    assert (tmp_path / "bench.md").is_file()
    assert (tmp_path / "bench.png").is_file()


def test_bench_fails_where_tilecrew_is_wrong(tmp_path, monkeypatch):
    from tilecrew.benchmark import cases, measure

    monkeypatch.setitem(cases.FORWARD, "small", [cases.ForwardCase(1, 70, 1, 2)])
    monkeypatch.setitem(cases.DECODE, "small", [])
    monkeypatch.setitem(measure.LARGEST_ERROR, torch.float32, 0.0)
    options = ("--device", "cpu", "--peers", "", "--seconds", "0", "--output", str(tmp_path))
    result = invoke("bench", "gated-delta-rule", *options)
    assert result.exit_code == 1
    assert "no time for tilecrew: error" in result.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cases", "large", "--cases must be one of targets, small, got 'large'"),
        ("--peers", "other", "--peers must be 'installed' or some of flashqla, flashinfer, fla, got 'other'"),
        ("--peers", "flashqla", "--peers flashqla: flash_qla is not installed"),
        ("--device", "tpu", "--device must be auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_bench_with_an_option_that_cannot_be_met(option, value, message, monkeypatch):
    without(monkeypatch, "flash_qla")
    result = invoke("bench", "gated-delta-rule", option, value)
    assert result.exit_code == 2
    assert message in result.output


def test_bench_grouped_gemm(tmp_path):
    """Times, rates and ratios fit each other, and the file has them."""
    path = tmp_path / "results" / "grouped_gemm.json"
    result = invoke("bench", "grouped-gemm", "--device", "cpu", "--seconds", "60", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        size = row["shape"]
        assert row["error"] <= 1e-5
        assert row["teraflops"] == pytest.approx(
            2e-9 * size["num_rows"] * size["num_inner"] * size["num_columns"] / row["milliseconds"]
        )
        assert (row["name"] == "dense") == (row["ratio_to_dense"] == 1.0)
        assert f"{row['milliseconds']:9.4f} ms" in result.output
    assert "torch: " in result.output


def test_bench_grouped_gemm_gives_no_time_to_a_wrong_result(monkeypatch):
    from tilecrew.benchmark import grouped_gemm

    product = tilecrew.grouped_gemm

    def wrong(x, w, offs, **options):
        result = product(x, w, offs, **options)
        result[0, 0] += 1
        return result

    monkeypatch.setattr(tilecrew, "grouped_gemm", wrong)
    for shape in grouped_gemm.CASES["small"]:
        rows = grouped_gemm.measure(shape, torch.device("cpu"), 0.0)
        refused = {row.name: row.refused for row in rows if row.milliseconds is None}
        assert set(refused) == {"tilecrew", "tilecrew transposed", "tilecrew notifying"}
        assert all("is above 1e-05" in reason for reason in refused.values())
    result = invoke("bench", "grouped-gemm", "--device", "cpu", "--seconds", "60")
    assert result.exit_code == 1
    assert "REFUSED AssertionError: error" in result.output


def test_bench_grouped_gemm_says_what_it_left_out():
    result = invoke("bench", "grouped-gemm", "--device", "cpu", "--seconds", "0")
    assert result.exit_code == 1
    assert "E 4 M 256 K 64 N 128: no time left" in result.output
    result = invoke("bench", "grouped-gemm", "--device", "cpu", "--cases", "huge")
    assert result.exit_code == 2
    assert "--cases must be one of targets, large, few-rows, small, got 'huge'" in result.output


def test_doctor_reports_versions_device_implementations_and_integrations():
    result = invoke("doctor", "--no-ranks")
    assert result.exit_code == 0, result.output
    assert torch.__version__.split("+")[0] in result.output
    for word in ("roles (prefill)", "portable (prefill)", "chunked (prefill)", "recurrent (decode)", "torch (decode)"):
        assert word in result.output
    assert "the kernel has no backward" in result.output
    if not torch.cuda.is_available():
        assert "Triton has no compiler for cpu tensors" in result.output


def test_doctor_says_why_an_integration_is_not_available(monkeypatch):
    without(monkeypatch, "transformers")
    result = invoke("doctor", "--no-ranks")
    assert result.exit_code == 0
    assert "needs the transformers package" in result.output


def test_main_without_the_extra(monkeypatch):
    without(monkeypatch, "typer")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert "typer" in stop.value.code
    assert "tilecrew[cli,transformers]" in stop.value.code


def test_demo_without_its_packages(monkeypatch):
    without(monkeypatch, "matplotlib")
    result = invoke("demo")
    assert result.exit_code == 2
    assert "the demo needs matplotlib" in result.output


def test_demo_on_an_unknown_device():
    result = invoke("demo", "--device", "abacus")
    assert result.exit_code == 2
    assert "'abacus'" in result.output


def test_choose_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="torch sees no GPU"):
        cli.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.choose_device("auto").type == "cuda"
    assert cli.choose_device("cpu").type == "cpu"
