"""`tilecrew trace` on a GPU: every role appears, for every chunk, and the chunks are in the pipeline's order."""

import json
from collections import defaultdict

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
pytest.importorskip("rich")

from tilecrew import cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0 (Hopper)",
    ),
]
LOADS = {
    "scan": ["load_query_key", "load_value", "load_prepared"],
    "roles": ["load_query_key", "load_value", "load_inverse"],
}
COMPUTES = {"scan": ["attention", "scan"], "roles": ["output", "state", "value"]}
LAST_STAGE = {"scan": ("scan", "S, O"), "roles": ("output", "O out")}
NUM_CHUNKS = 16


@pytest.mark.parametrize("pipeline", ["scan", "roles"])
def test_every_role_and_the_order_of_chunks(pipeline, tmp_path):
    from typer.testing import CliRunner

    arguments = ["trace", pipeline, "--tokens", str(64 * NUM_CHUNKS), "--output", str(tmp_path)]
    result = CliRunner().invoke(cli.build_app(), arguments)
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    roles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(roles.values()) == sorted([*LOADS[pipeline], *COMPUTES[pipeline], "store"])
    spans = defaultdict(dict)  # (role, stage) -> chunk -> (start, end)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["ts"] + event["dur"] < 1000  # a million cycles
            chunk = event["args"]["chunk"]
            spans[roles[event["tid"]], event["name"]][chunk] = (event["ts"], event["ts"] + event["dur"])
    for role in roles.values():
        assert any(len(by_chunk) == NUM_CHUNKS for (name, _), by_chunk in spans.items() if name == role)
    computed, stored = spans[LAST_STAGE[pipeline]], spans["store", "O"]
    for chunk in range(NUM_CHUNKS):
        for load in LOADS[pipeline]:
            assert spans[load, "issue"][chunk][0] < computed[chunk][0]  # a chunk is loaded before it is computed
        assert computed[chunk][0] < stored[chunk][1]  # and stored after that
        if chunk > 0:
            assert computed[chunk - 1][0] < computed[chunk][0]
    # While a chunk is computed, the next one has been asked for: the pipeline overlaps.
    assert all(spans["load_value", "issue"][chunk + 1][0] < computed[chunk][1] for chunk in range(NUM_CHUNKS - 1))
    assert (tmp_path / "trace.png").stat().st_size > 10_000
