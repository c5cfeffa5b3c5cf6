"""bench/several_gpus.py without a GPU: stages that fail or hang do not stop the others, and the whole in small."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tilecrew.parallel import World, on_every_rank

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "several_gpus.py"
NO_MULTICAST = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS")


def imported(path, monkeypatch):
    for name in NO_MULTICAST:
        monkeypatch.setenv(name, "")  # what the script sets is taken back
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch):
    return imported(SCRIPT, monkeypatch)


def python(script, name, weight, program):
    return script.Stage(name, weight, (sys.executable, "-c", program))


def is_running(process):
    """Whether it is there, and not merely unburied."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stages_that_fail_or_hang_do_not_stop_the_others(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "GRACE_SECONDS", 0.5)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    hangs = (
        "import subprocess, sys, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    chosen = [
        python(script, "fails", 1, "import sys; print('the reason'); sys.exit(3)"),
        python(script, "hangs", 1, hangs),
        python(script, "works", 8, "import os; print(sorted(os.environ))"),
    ]
    begin = time.monotonic()
    outcomes = script.run_stages(chosen, 30.0, tmp_path / "folder")
    assert time.monotonic() - begin < 20
    assert [outcome.is_right for outcome in outcomes] == [False, False, True]
    assert outcomes[0].outcome == "failed with code 3"
    assert outcomes[1].outcome == "stopped: not done after 3 s"
    assert not is_running(int(Path(outcomes[1].log).read_text()))
    assert "the reason" in capsys.readouterr().out
    names = Path(outcomes[2].log).read_text()
    assert all(f"'{name}'" in names for name in (*NO_MULTICAST, "PYTHONPATH"))
    assert "RANK'" not in names
    record = json.loads((tmp_path / "folder" / "summary.json").read_text())
    assert [stage["name"] for stage in record["stages"]] == ["fails", "hangs", "works"]
    lines = script.table(outcomes, tmp_path / "folder")
    assert lines[0].startswith("fails") and lines[0].endswith("failed with code 3")
    assert "works: no figures" in lines


def test_a_stage_gets_the_time_that_others_have_left(script, tmp_path, capsys):
    chosen = [python(script, f"stage {number}", 1, "") for number in range(3)]
    outcomes = script.run_stages(chosen, 60.0, tmp_path)
    assert all(outcome.is_right for outcome in outcomes)
    limits = [int(line.split()[-2]) for line in capsys.readouterr().out.splitlines() if "at most" in line]
    assert limits[0] == 20 and limits[1] > 25 and limits[2] > 50


def test_multicast_is_off_before_torch_is_imported(script):
    assert all(os.environ[name] in ("0", "1") for name in NO_MULTICAST)
    text = SCRIPT.read_text()
    assert max(text.index(f'os.environ["{name}"]') for name in NO_MULTICAST) < text.index("\nimport torch")


def test_table_has_figures_and_what_is_wrong(script, tmp_path):
    outcome = script.Outcome("moe-2048", False, "failed with code 1", 3.0, str(tmp_path / "log"))
    row = {"shape": "x", "dispatch": None, "milliseconds": {"layer": 2.0}, "ratios": {"a / b": 0.5}}
    record = {"rows": [{**row, "failures": {"combine": "error"}}], "skipped": {"y": "no time left"}}
    (tmp_path / "moe-2048.json").write_text(json.dumps(record))
    lines = [" ".join(line.split()) for line in script.table([outcome], tmp_path)]
    for line in (
        "moe-2048: shape x",
        "layer 2.0000 ms",
        "a / b 0.5000 x",
        "combine REFUSED error",
        "moe-2048: left out y",
    ):
        assert line in lines
    outcome = script.Outcome("preflight", False, "failed with code 1", 3.0, str(tmp_path / "log"))
    checks = [{"name": f"GPU {n}", "is_right": n == 0, "detail": "counts"} for n in (0, 1)]
    (tmp_path / "preflight.json").write_text(json.dumps({"checks": checks}))
    assert script.table([outcome], tmp_path)[1:] == ["preflight WRONG  GPU 1: counts"]


def test_wrong_products_are_refused(monkeypatch):
    """The tensor-parallel pair on emulated ranks, a sampled row of either result changed."""
    script = imported(ROOT / "bench" / "tensor_parallel.py", monkeypatch)
    sums, ready = [None, None], threading.Barrier(2)
    worlds = World.emulated(2, device="cpu")

    def all_reduce(tensor):
        rank = current.rank
        sums[rank] = tensor.clone()
        ready.wait()
        tensor.copy_(sums[0] + sums[1])
        ready.wait()

    current = threading.local()
    monkeypatch.setattr(script.dist, "all_reduce", all_reduce)

    def compare(world):
        current.rank = world.rank
        layer = script.Layer(world, 20, 16, 32)
        calls = layer.calls()
        for name in script.PAIRS:
            call, places, wanted = calls[name]
            out = call()
            script.require_right(out, places, wanted)
            out[places[3]] *= 1.001
            with pytest.raises(AssertionError, match="is above 1e-05"):
                script.require_right(out, places, wanted)
            out[0, 0] = float("nan")
            with pytest.raises(AssertionError, match="not all values are finite"):
                script.require_right(out, places, wanted)

    on_every_rank(worlds, compare)


def run(*arguments, launcher=()):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


def test_options(tmp_path):
    ended = run("--device", "cpu", "--stages", "else", "--json-folder", str(tmp_path / "folder"))
    assert ended.returncode == 2
    assert "--stages must be some of preflight, tests, moe-2048, moe-8192, tensor-parallel, got 'else'" in ended.stderr
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_in_small_under_torchrun(tmp_path):
    """The first process does all, with as many ranks as torchrun has."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--device", "cpu", "--seconds", "300", "--json-folder", str(tmp_path))
    ended = run(*options, "--stages", "preflight", "moe-2048", "tensor-parallel", launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stages = json.loads((tmp_path / "summary.json").read_text())["stages"]
    assert [stage["outcome"] for stage in stages] == ["right"] * 3
    checks = json.loads((tmp_path / "preflight.json").read_text())["checks"]
    assert any(check["is_right"] for check in checks)
    assert {row["num_ranks"] for row in json.loads((tmp_path / "moe-2048.json").read_text())["rows"]} == {2}
    (row,) = json.loads((tmp_path / "tensor-parallel.json").read_text())["rows"]
    assert set(row["milliseconds"]) == {
        "AllGatherGemm",
        "all_gather, matmul",
        "GemmReduceScatter",
        "matmul, reduce_scatter",
    }
    assert not row["failures"]
    assert "all_gather, matmul / AllGatherGemm" in ended.stdout
