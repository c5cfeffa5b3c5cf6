"""The benchmark on the CPU: what it measures, what it refuses, what it writes."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tilecrew.benchmark import peers, report
from tilecrew.benchmark.cases import DECODE, FORWARD, PEAKS, DecodeCase, ForwardCase
from tilecrew.benchmark.measure import OURS, Row, measure_decode, measure_forward
from tilecrew.benchmark.peers import PEERS, Peer, choose
from tilecrew.benchmark.run import settings_of
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.gates import apply_gates

CPU = torch.device("cpu")
TINY = ForwardCase(2, 70, 1, 2)


def exact(arguments):
    result = reference.recurrent_gated_delta_rule(arguments)
    return lambda: (result.o, result.final_state)


def wrong(arguments):
    result = reference.recurrent_gated_delta_rule(replace(arguments, scale=arguments.scale * 1.001))
    return lambda: (result.o, result.final_state)


def broken(arguments):
    raise RuntimeError("no such device")


def not_a_number(arguments):
    result = reference.recurrent_gated_delta_rule(arguments)
    return lambda: (result.o * float("nan"), result.final_state)


def peer(name, prepare):
    return Peer(name, "torch", "torch", prepare)


@pytest.mark.parametrize("inside", [False, True])
def test_wrong_results_get_no_time(inside):
    others = [peer("good", exact), peer("bad", wrong), peer("absent", broken), peer("nan", not_a_number)]
    rows = {row.name: row for row in measure_forward(TINY, inside, others, torch.float32, CPU, 0.0)}
    assert list(rows) == [OURS, "good", "bad", "nan", "absent"]
    for name in (OURS, "good"):
        assert rows[name].error < 1e-5
        assert rows[name].eager_milliseconds > 0
        assert rows[name].graph_milliseconds is None
        assert not rows[name].refused
    assert rows[OURS].chosen.startswith("chunked")
    reasons = {"bad": "above 1.0e-04", "nan": "error nan above", "absent": "RuntimeError: no such device"}
    for name, reason in reasons.items():
        assert rows[name].milliseconds is None
        assert reason in rows[name].refused
    assert rows["bad"].error == pytest.approx(1e-3, rel=0.01)
    assert math.isnan(rows["absent"].error)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_decode(num_sequences):
    (row,) = measure_decode(DecodeCase(num_sequences, 1, 2), torch.float32, CPU, 0.0)
    assert row.error < 1e-5
    assert row.eager_milliseconds > 0
    assert not row.refused


def test_floors_on_an_h200():
    """Products of 1x32768, 16/64 take half a millisecond there; 512 sequences' states of 2 MiB half a millisecond."""
    (name,) = PEAKS
    assert ForwardCase(1, 32768, 16, 64).floor_milliseconds(name) == pytest.approx(0.435, abs=0.01)
    # Few heads on long sequences read more than they multiply in no case of the targets.
    assert ForwardCase(8, 1024, 8, 32).floor_milliseconds(name) < 0.06
    assert DecodeCase(512).floor_milliseconds(name) == pytest.approx(2 * 512 * 2**21 / 4.27e12 * 1e3)
    assert ForwardCase(1, 64, 1, 1).floor_milliseconds("cpu") is None


def test_peers_are_named_or_an_error(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert choose("installed") == []
    assert choose("") == []
    with pytest.raises(ValueError, match=r"--peers flashqla: flash_qla is not installed \(pip install flash-qla\)"):
        choose("flashqla")
    with pytest.raises(ValueError, match=r"--peers must be 'installed' or some of flashqla, flashinfer, fla, got 'x'"):
        choose("x")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    assert choose("installed") == list(PEERS.values())
    assert choose(" fla, flashqla") == [PEERS["fla"], PEERS["flashqla"]]


def test_settings(tmp_path):
    settings = settings_of(CPU, "", "", tmp_path, 0.0)
    assert settings.forward == tuple(FORWARD["small"])
    assert settings.decode == tuple(DECODE["small"])
    assert settings.dtype == torch.float32
    with pytest.raises(ValueError, match=r"--cases must be one of targets, small, got 'large'"):
        settings_of(CPU, "large", "", tmp_path, 0.0)


def test_gates_of_the_peers_are_those_of_the_operator():
    for inside in (False, True):
        arguments = TINY.arguments(torch.float32, CPU, inside)
        assert (arguments.A_log is not None) == arguments.use_beta_sigmoid == arguments.use_qk_l2norm == inside
        applied = apply_gates(arguments)
        g, beta = peers.gates_of(arguments, lambda g, beta: (g.exp(), beta.half()))()
        torch.testing.assert_close(g, applied.g.exp())
        torch.testing.assert_close(beta, applied.beta.half())


def test_norm_of_the_peers_is_that_of_the_operator():
    x = torch.randn(2, 3, 128, dtype=torch.float32)
    torch.testing.assert_close(peers.normalised(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def rows():
    ours = Row("forward", "1x64, 1/1", False, OURS, "scan: why", 1.0, 2.0, 3e-3, 0.5, "")
    return [
        ours,
        replace(ours, name="slow", graph_milliseconds=4.0, chosen=""),
        replace(ours, name="eager", graph_milliseconds=None, eager_milliseconds=3.0, chosen=""),
        replace(ours, name="bad", graph_milliseconds=None, eager_milliseconds=None, refused="error 1 above 0.01"),
        replace(ours, operator="decode", case="1, 1/1", floor_milliseconds=None),
    ]


def test_ratio_is_to_the_fastest_other_library():
    forward, decode = report.groups(rows()).values()
    assert report.ratio_to_best_other(forward) == 3.0
    assert report.ratio_to_best_other(decode) is None
    first, slow, eager, bad = report.cells(forward)
    assert first == ("forward", "1x64, 1/1", "", OURS, "1.000", "2.000", "3.00", "50 %", "3.0e-03")
    assert slow[4:8] == ("4.000", "2.000", "", "12 %")
    assert eager[4:8] == ("", "3.000", "", "17 %")
    assert bad[4:8] == ("", "refused", "", "")


def test_files(tmp_path):
    report.write_json(rows(), {"device": "x"}, tmp_path / "bench.json")
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert record["device"] == "x"
    assert [row["name"] for row in record["rows"]] == [OURS, "slow", "eager", "bad", OURS]
    lines = report.markdown(rows()).splitlines()
    assert len(lines) == 2 + len(rows())
    assert {line.count("|") for line in lines} == {len(report.COLUMNS) + 1}
    pytest.importorskip("matplotlib")
    report.draw(rows(), "subtitle", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
