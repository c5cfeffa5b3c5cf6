"""`tilecrew bench moe` on the CPU: what it measures, what it refuses, what it leaves out."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tilecrew
from tilecrew.moe import fused

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tilecrew.benchmark import moe, moe_cases, moe_measure, moe_torch
from tilecrew.benchmark.moe_cases import ALL_TO_ALL, GRAPH, LAYER, ONE_RANK, SHAPES, Case
from tilecrew.benchmark.moe_parts import PARTS, PROCESS_PARTS

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
FORMS = {"dispatch": None, "combine": None, "num_comm_blocks": None}


CALLS_OF_A_PART = 3 * 2  # before it is timed, on two ranks


def measure():
    return moe_measure.measure_emulated(Case("small", "skewed", 2, 40), CPU, FORMS, 0.0)


def settings(**options):
    return moe.settings_of(CPU, **options)


def test_command_measures_prints_and_writes(tmp_path, monkeypatch):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from tilecrew import cli

    monkeypatch.setattr(moe, "LONGEST_TIMING", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "results" / "moe.json"
    options = ("--device", "cpu", "--ranks", "1,3", "--tokens", "20", "--json", str(path))
    result = CliRunner().invoke(cli.build_app(), ["bench", "moe", *options])
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert [(row["routing"], row["num_ranks"]) for row in record["rows"]] == [
        ("uniform", 1),
        ("uniform", 3),
        ("skewed", 1),
        ("skewed", 3),
    ]
    assert not record["skipped"]
    shape = SHAPES["small"]
    for row in record["rows"]:
        times, ratios = row["milliseconds"], row["ratios"]
        assert set(times) == {LAYER, ONE_RANK, *PARTS}
        flops = 6 * row["num_ranks"] * 20 * shape.top_k * shape.hidden_size * shape.intermediate_size
        assert row["teraflops"][LAYER] == pytest.approx(1e-9 * flops / times[LAYER])
        bound = row["bounds"]["max(first_gemm, copy)"]
        assert bound == max(times["first_gemm"], times["copy"])
        assert ratios["dispatch_gemm / max(first_gemm, copy)"] == pytest.approx(times["dispatch_gemm"] / bound)
        assert ratios["torch, one rank / layer"] == pytest.approx(times[ONE_RANK] / times[LAYER])
        assert f"{times['combine']:9.4f} ms" in result.output
    for message, wrong in {
        "--shapes must be some of": ("--shapes", "large"),
        "--ranks must be positive numbers with commas, got '2,x'": ("--ranks", "2,x"),
        "--routing must be uniform, skewed or both, got 'hot'": ("--routing", "hot"),
        "--combine must be one of push, pull, got 'send'": ("--combine", "send"),
        "--dispatch must be one of warps, blocks, gather, got 'host'": ("--dispatch", "host"),
        "--tokens must be at least 1, got 0": ("--tokens", "0"),
    }.items():
        result = CliRunner().invoke(cli.build_app(), ["bench", "moe", "--device", "cpu", *wrong])
        assert result.exit_code == 2
        assert message in result.output


def test_wrong_results_get_no_time(monkeypatch):
    """Each of: the layer, moved rows, sums; and what else is right keeps its time."""
    layer, move, add = tilecrew.moe_forward, fused._dispatch_on_cpu, fused._combine_on_cpu

    def swapped(workspace, routing, rows):
        move(workspace, routing, rows)
        rows[:2] = rows[:2].flip(0)

    with monkeypatch.context() as patch:
        patch.setattr(tilecrew, "moe_forward", lambda *rest, **options: 1.001 * layer(*rest, **options))
        row = measure()
    assert "is above 1e-05" in row.failures[LAYER]
    assert {"copy", "dispatch_gemm"} <= set(row.milliseconds) and LAYER not in row.ratios

    with monkeypatch.context() as patch:
        patch.setattr(fused, "_dispatch_on_cpu", swapped)
        row = measure()
    assert {"copy", "dispatch_gemm"} <= set(row.failures)
    assert "rows are not those of the tokens of rank" in row.failures["copy"]
    assert not any(name.startswith("dispatch_gemm") for name in row.ratios)

    calls = []

    def wrong_later(*arguments):
        calls.append(None)
        return add(*arguments).mul_(1 if len(calls) <= CALLS_OF_A_PART else 2)  # the layer's are right

    with monkeypatch.context() as patch:
        patch.setattr(fused, "_combine_on_cpu", wrong_later)
        row = measure()
    assert set(row.failures) == {"gemm_combine", "combine"}
    assert "sums are not those of the layer" in row.failures["combine"]


def test_a_part_that_writes_nothing_is_noticed(monkeypatch):
    """Memory of the part before would hold the right results."""
    add, calls = fused._combine_on_cpu, []

    def lazy(*arguments):
        calls.append(None)
        return add(*arguments) if len(calls) <= 2 * CALLS_OF_A_PART else arguments[-1]

    monkeypatch.setattr(fused, "_combine_on_cpu", lazy)
    assert set(measure().failures) == {"combine"}


def test_torch_layer_is_checked_too(monkeypatch):
    right = moe_torch.one_rank_layer
    monkeypatch.setattr(moe_measure, "one_rank_layer", lambda *rest: right(*rest).roll(1, 0))
    row = measure()
    assert set(row.failures) == {ONE_RANK}
    assert "torch, one rank / layer" not in row.ratios


def test_skewed_routing_has_a_hot_expert():
    shape = SHAPES["Qwen3-Next"]
    shape = replace(shape, hidden_size=8)
    for routing, least, most in (("uniform", 1, 2), ("skewed", 10, 512 / 10)):
        x, ids, weights = moe_cases.tokens_of(shape, routing, 2000, CPU, torch.float32)
        assert x.shape == (2000, 8)
        assert (ids.sort(1).values.diff(dim=1) > 0).all()
        torch.testing.assert_close(weights.sum(1), torch.ones(2000))
        routes = moe_cases.routes_of_experts([ids[:500], ids[500:]], 512)
        assert routes.sum() == ids.numel()
        hottest, busiest = moe_cases.loads_of(routes, 8)
        assert least < hottest <= most
        assert 1 <= busiest < hottest


def test_loads():
    assert moe_cases.loads_of(torch.tensor([6, 1, 1, 0]), 2) == (3.0, 1.75)
    assert moe_cases.loads_of(torch.tensor([2, 2, 2]), 2) == (1.0, 4 / 3)


def test_ratios_of_what_is_there():
    times = {"copy": 2.0, "first_gemm": 4.0, "dispatch_gemm": 5.0, "combine": 3.0, LAYER: 8.0, GRAPH: 4.0}
    second = {"second_gemm": 2.0, "combine": 1.0, "transfer": 4.0, "gemm_combine": 5.0}
    assert moe_cases.ratios_of(second, gathers=False) == (
        {"max(second_gemm, combine, transfer)": 4.0},
        {"gemm_combine / max(second_gemm, combine, transfer)": 1.25},
    )
    bounds, ratios = moe_cases.ratios_of({**times, ALL_TO_ALL: 16.0}, gathers=False)
    assert bounds == {"max(first_gemm, copy)": 4.0}
    assert ratios == {
        "dispatch_gemm / max(first_gemm, copy)": 1.25,
        "all-to-all / layer": 2.0,
        "all-to-all / layer, graph": 4.0,
    }


def test_ratios_of_a_product_that_gathers():
    """It makes no copy of rows; the tables beside which tokens are brought are not its own."""
    times = {"copy": 9.0, "first_gemm": 4.0, "dispatch_gemm": 5.0}
    assert moe_cases.ratios_of(times, gathers=True) == ({"first_gemm": 4.0}, {"dispatch_gemm / first_gemm": 1.25})
    bounds, ratios = moe_cases.ratios_of({**times, "tables": 0.5, "bring": 2.0}, gathers=True)
    assert bounds == {"max(first_gemm, bring)": 4.0}
    assert ratios == {"(dispatch_gemm - tables) / max(first_gemm, bring)": 1.125}
    assert moe_cases.ratios_of({"dispatch_gemm": 5.0, "bring": 2.0}, gathers=True) == ({}, {})


def test_no_case_is_begun_when_the_time_is_over(tmp_path, monkeypatch):
    said = []
    path = tmp_path / "moe.json"
    assert not moe.run_benchmark(settings(seconds=0.0, json=path), said.append)
    record = json.loads(path.read_text())
    assert record["rows"] == []
    assert set(record["skipped"].values()) == {"no time left"}
    assert len(record["skipped"]) == 4
    assert "small, uniform routing, 1 ranks, 64 tokens each: no time left" in said


def test_a_case_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    measured, seen = moe_measure.measure_emulated, []
    path = tmp_path / "moe.json"

    def broken(case, *rest):
        # The file has what was measured before.
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else None)
        if case.num_ranks == 1:
            raise RuntimeError("no memory")
        return measured(case, *rest)

    monkeypatch.setattr(moe, "measure_emulated", broken)
    monkeypatch.setattr(moe, "LONGEST_TIMING", 0.0)
    assert not moe.run_benchmark(settings(tokens=8, json=path), lambda line: None)
    record = json.loads(path.read_text())
    assert seen == [None, 0, 1, 1]
    assert [row["num_ranks"] for row in record["rows"]] == [2, 2]
    assert set(record["skipped"].values()) == {"RuntimeError: no memory"}
    assert "no memory" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_beside_all_to_all(tmp_path):
    """The script under torchrun: the slowest rank's times, the same record."""
    path = tmp_path / "moe.json"
    script = [str(ROOT / "bench" / "moe.py"), "--device", "cpu", "--tokens", "24", "--seconds", "100"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [*command, "--json", str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads(path.read_text())
    assert record["ranks are"] == "processes"
    assert [row["routing"] for row in record["rows"]] == ["uniform", "skewed"]
    for row in record["rows"]:
        assert row["num_ranks"] == 2
        assert set(row["milliseconds"]) == {LAYER, ALL_TO_ALL, *PROCESS_PARTS}
        assert row["ratios"]["all-to-all / layer"] > 0
