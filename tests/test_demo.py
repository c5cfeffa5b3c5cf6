"""`tilecrew demo` at its smallest: the picture appears, and a wrong operator makes it fail."""

import json

import pytest
import torch

import tilecrew
from tests.integrations.conftest import imported_fla, switched_off  # noqa: F401
from tilecrew import cli

for package in ("matplotlib", "rich", "tokenizers", "transformers", "typer"):
    pytest.importorskip(package)

SMALL = ("--device", "cpu", "--prompt-tokens", "70", "--new-tokens", "2", "--max-tokens", "128", "--repeats", "1")


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    from tilecrew.demo import model, run

    monkeypatch.setenv("COLUMNS", "200")
    size = model.ModelSize(hidden_size=64, num_layers=4, num_key_heads=1, num_value_heads=2)
    monkeypatch.setattr(run, "CPU_SIZE", size)


def invoke(*arguments: str):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.build_app(), ["demo", *SMALL, *arguments])


def test_demo_checks_measures_and_draws(tmp_path):
    result = invoke("--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "decode step 2" in result.output
    assert "disagrees" not in result.output
    assert "chunked: no kernel can run" in result.output
    picture = (tmp_path / "out" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    record = json.loads((tmp_path / "out" / "demo.json").read_text())
    names = [check["name"] for check in record["checks"]]
    assert names[-2:] == ["prefill, experts on 4 processes", "decode, 2 steps, experts on 4 processes"]
    assert len(names) == 5
    assert all(0 < check["error"] < 1e-5 for check in record["checks"])
    assert "(70, 52, 35, 17 tokens)" in result.output
    assert {(t["what"], t["path"], t["num_tokens"]) for t in record["timings"]} == {
        (what, path, 128) for what in ("operator", "model") for path in ("tilecrew", "transformers")
    }
    assert all(t["milliseconds"] > 0 for t in record["timings"])


def without_processes(monkeypatch, *errors):
    from tilecrew.demo import run
    from tilecrew.demo.agreement import Check

    checks = [Check(f"experts {number}", error, 1e-4) for number, error in enumerate(errors)]
    monkeypatch.setattr(run, "check_ranks", lambda *rest: checks)


def test_spread_experts_that_disagree_fail(monkeypatch, tmp_path):
    without_processes(monkeypatch, 1e-6, 1e-3)
    result = invoke("--output", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert "disagrees" in next(line for line in result.output.splitlines() if "experts 1" in line)
    assert not (tmp_path / "out").exists()


def test_processes_that_fail_are_shown(monkeypatch, tmp_path):
    from tilecrew.demo import run

    def fails(*rest):
        raise run.ProcessesError({2: "MemoryError"})

    monkeypatch.setattr(run, "check_ranks", fails)
    result = invoke("--output", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert "experts on 4 processes failed: rank 2: MemoryError" in result.output
    assert not (tmp_path / "out").exists()


def test_wrong_experts_are_noticed(monkeypatch):
    """What each process compares, here on the only rank of a World."""
    from tilecrew.demo import ranks
    from tilecrew.parallel import World

    size = {"hidden_size": 64, "num_layers": 4, "num_key_heads": 1, "num_value_heads": 2}
    (world,) = World.emulated(1, device="cpu")
    right = ranks.compare(world, size, [list(range(40))], 2)
    assert max(right.prefill, *right.decode) < 1e-5
    assert right.num_experts == 8
    layer = tilecrew.moe_forward
    monkeypatch.setattr(tilecrew, "moe_forward", lambda x, ids, *rest, **more: layer(x, ids.flip(1), *rest, **more))
    wrong = ranks.compare(world, size, [list(range(40))], 2)
    assert min(wrong.prefill, *wrong.decode) > 1e-4


def test_largest_error_of_processes():
    from tilecrew.demo.ranks import _largest

    assert _largest([1.0, 3.0, 2.0]) == 3.0
    for errors in ([float("nan"), 1.0], [1.0, float("nan")]):
        assert not _largest(errors) <= 1e9


def test_slow_machine_measures_short_prompts_only(monkeypatch, tmp_path):
    from tilecrew.demo import timing

    without_processes(monkeypatch, 1e-6)
    monkeypatch.setattr(timing, "TOTAL_SECONDS", 0.0)
    monkeypatch.setattr(timing, "POINT_SECONDS", 0.0)
    result = invoke("--max-tokens", "256", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "Prompts longer than 128 tokens were left out" in result.output
    timings = json.loads((tmp_path / "demo.json").read_text())["timings"]
    assert {t["num_tokens"] for t in timings} == {128}


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_wrong_operator_fails(monkeypatch, tmp_path, name):
    right = getattr(tilecrew, name)

    def wrong(*, beta, **arguments):
        return right(beta=0.9 * beta, **arguments)

    monkeypatch.setattr(tilecrew, name, wrong)
    result = invoke("--output", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert "disagrees" in result.output
    assert not (tmp_path / "out").exists()


def test_not_a_number_never_agrees():
    from tilecrew.demo.agreement import Check

    assert not Check("prefill", float("nan"), 1.0).agrees
    assert Check("prefill", 1e-5, 1e-4).agrees


def test_half_precision_is_judged_by_its_own_rounding(monkeypatch):
    from tilecrew.demo import model
    from tilecrew.demo.agreement import check_agreement

    size = model.ModelSize(hidden_size=64, num_layers=4, num_key_heads=1, num_value_heads=2)
    built = model.build_model(size, torch.bfloat16, torch.device("cpu"))
    text = model.read_text()
    prompt = model.token_ids(model.train_tokenizer(text), text, 200, torch.device("cpu"))
    checks, run = check_agreement(built, prompt, 4)
    assert [check.name for check in checks] == ["prefill", "decode, 4 steps together"]
    assert all(check.agrees for check in checks)
    assert 1e-3 < checks[0].allowed < 0.5
    assert len(run.tokens) == 4

    right = tilecrew.chunk_gated_delta_rule
    monkeypatch.setattr(tilecrew, "chunk_gated_delta_rule", lambda *, g, **rest: right(g=0 * g, **rest))
    checks, _ = check_agreement(built, prompt, 4)
    assert not checks[0].agrees


def test_measured_lengths_are_halves_of_the_longest(tmp_path):
    from tilecrew.demo.run import Settings

    assert Settings(torch.device("cpu"), tmp_path, max_tokens=1000).lengths == [250, 500, 1000]
    assert Settings(torch.device("cpu"), tmp_path, max_tokens=50).lengths == [50]


def test_tokens_round_trip():
    from tilecrew.demo.model import read_text, token_ids, train_tokenizer

    text = read_text()
    tokenizer = train_tokenizer(text)
    ids = token_ids(tokenizer, text, 3000, torch.device("cpu"))
    assert ids.shape == (1, 3000)
    assert tokenizer.decode(ids[0, :200].tolist()) == text[: len(tokenizer.decode(ids[0, :200].tolist()))]
