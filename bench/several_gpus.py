"""Everything that needs several GPUs of one host, in one call: is it right, and how fast is it?

    PYTHONPATH=. python bench/several_gpus.py --seconds 400 --json-folder several-gpus
    PYTHONPATH=. torchrun --nproc-per-node 8 bench/several_gpus.py --seconds 400 --json-folder several-gpus

Stages, each in processes of its own with a part of the time that is left; one that fails, or whose time is over, is
reported, and the others still run:

    preflight          what `tilecrew doctor` checks between ranks
    tests              the tests marked multi_gpu
    moe-2048, -8192    bench/moe.py, that many tokens a rank, beside NCCL's all-to-all
    tensor-parallel    bench/tensor_parallel.py, beside NCCL's collectives

The folder gets summary.json, a JSON file of each stage and what it printed, and a table is printed at the end. Under
torchrun the first process does all this, with as many ranks as torchrun has; the others end. The exit code is 1 where a
stage is not right, and 2 where there are no two GPUs. `--device cpu` rehearses all of it on small problems.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Multicast needs a set-up by the fabric's manager that not every host has, and where it lacks, what tries it fails or
# hangs. Nothing here uses it. Read when torch is imported, and when NCCL and NVSHMEM start.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"

import torch

ROOT = Path(__file__).resolve().parents[1]
SHOWN_LINES = 40  # of what a stage that failed has printed
START_SHARE = 0.25  # of a measuring stage's time: imports, compilation, a case that is under way when time is over
GRACE_SECONDS = 10.0  # in which torchrun ends its processes, which are in sessions of their own
# How the names of variables begin that torchrun gives its processes: a torchrun of a stage must not read them.
OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")


@dataclass(frozen=True)
class Stage:
    """A command; weight: its share of the time."""

    name: str
    weight: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """is_right: its exit code was 0 in time; outcome: how it ended."""

    name: str
    is_right: bool
    outcome: str
    seconds: float
    log: str


def stages(options, num_ranks):
    """The commands, which write DIR/<name>.json. {seconds} becomes the time that a stage may measure."""
    folder, small = options.json_folder.resolve(), options.device == "cpu"
    python = sys.executable
    spread = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    common = ("--device", options.device, "--seconds", "{seconds}")

    def moe(name, tokens):
        script = str(ROOT / "bench" / "moe.py")
        return (*spread, script, *common, "--tokens", str(tokens), "--json", str(folder / f"{name}.json"))

    return [
        Stage("preflight", 2, (python, __file__, "--preflight", str(folder / "preflight.json"))),
        Stage(
            "tests",
            5,
            (python, "-m", "pytest", "-m", "multi_gpu", "-v", "--durations=0", "tests/parallel", "tests/moe"),
        ),
        Stage("moe-2048", 3, moe("moe-2048", 32 if small else 2048)),
        Stage("moe-8192", 3, moe("moe-8192", 128 if small else 8192)),
        Stage(
            "tensor-parallel",
            2,
            (
                *spread,
                str(ROOT / "bench" / "tensor_parallel.py"),
                *common,
                "--json",
                str(folder / "tensor-parallel.json"),
            ),
        ),
    ]


def run_stages(chosen, seconds, folder):
    """Runs one after the other; each may take its share, by weight, of the time that those before it have left."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + seconds, []
    for number, stage in enumerate(chosen):
        left = deadline - time.monotonic()
        limit = max(0.0, left) * stage.weight / sum(later.weight for later in chosen[number:])
        print(f"--- {stage.name}, at most {limit:.0f} s", flush=True)
        outcomes.append(run_stage(stage, limit, folder / f"{stage.name}.log"))
        if not outcomes[-1].is_right:
            lines = Path(outcomes[-1].log).read_text(errors="replace").splitlines()
            print("\n".join(lines[-SHOWN_LINES:]), flush=True)
        print(f"--- {stage.name}: {outcomes[-1].outcome} after {outcomes[-1].seconds:.0f} s", flush=True)
        summary = {"stages": [dataclasses.asdict(outcome) for outcome in outcomes]}
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return outcomes


def run_stage(stage, limit, log):
    """Runs a stage's command in a session of its own, of which nothing is left when it has ended, or the limit is
    over."""
    begin = time.monotonic()
    measuring = str(round(max(1.0, (1 - START_SHARE) * limit), 1))
    command = [part.replace("{seconds}", measuring) for part in stage.command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment.setdefault("OMP_NUM_THREADS", "1")
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(limit)
            outcome = "right" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            code, outcome = None, f"stopped: not done after {limit:.0f} s"
        finally:
            end(child)
    return Outcome(stage.name, code == 0, outcome, round(time.monotonic() - begin, 1), str(log))


def end(child):
    """Asks the processes of a stage to end, then kills what is left of its group, whose id is its own until then."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def preflight(path):
    """The stage of that name, in a process of its own: checks as JSON and as text."""
    from tilecrew.parallel.preflight import run_preflight

    found = []
    for check in run_preflight():
        found.append(dataclasses.asdict(check))
        mark = {True: "right", False: "WRONG", None: ""}[check.is_right]
        print(f"{mark:<6}{check.name}: {check.detail}", flush=True)
        path.write_text(json.dumps({"checks": found}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(check["is_right"] is False for check in found) else 0


def table(outcomes, folder):
    """What came of each stage, and the figures of those that measure, as text."""
    lines = [f"{outcome.name:<16} {outcome.seconds:6.0f} s  {outcome.outcome}" for outcome in outcomes]
    for outcome in outcomes:
        path = folder / f"{outcome.name}.json"
        if outcome.name == "tests":
            printed = Path(outcome.log).read_text(errors="replace").splitlines()
            lines.append(f"tests: {printed[-1] if printed else 'nothing printed'}")
            continue
        if not path.exists():
            lines.append(f"{outcome.name}: no figures")
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        for check in record.get("checks", []):
            if check["is_right"] is False:
                lines.append(f"preflight WRONG  {check['name']}: {check['detail']}")
        for row in record.get("rows", []):
            sizes = ", ".join(
                f"{name} {value}" for name, value in row.items() if not isinstance(value, dict) and value is not None
            )
            lines.append(f"{outcome.name}: {sizes}")
            for kind, unit in (("milliseconds", "ms"), ("ratios", "x")):
                lines += [f"    {name:52} {value:9.4f} {unit}" for name, value in row[kind].items()]
            lines += [f"    {name:52} REFUSED {reason}" for name, reason in row["failures"].items()]
        lines += [f"{outcome.name}: left out {skipped}" for skipped in record.get("skipped", [])]
    return lines


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0, help="of all stages together")
    parser.add_argument("--json-folder", type=Path, default=Path("several-gpus"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--num-ranks", type=int, help="default: all GPUs; under torchrun as many as it has")
    parser.add_argument("--stages", nargs="+", help="some of those above; default: all")
    parser.add_argument("--preflight", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.preflight is not None:
        return preflight(options.preflight)
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    num_devices = torch.cuda.device_count()
    if options.device == "cuda" and num_devices < 2:
        print(f"this needs two GPUs, torch sees {num_devices}", file=sys.stderr)
        return 2
    num_ranks = options.num_ranks or int(os.environ.get("WORLD_SIZE", "0")) or max(num_devices, 2)
    chosen = stages(options, num_ranks)
    if options.stages is not None:
        names = [stage.name for stage in chosen]
        if unknown := [name for name in options.stages if name not in names]:
            print(f"--stages must be some of {', '.join(names)}, got {unknown[0]!r}", file=sys.stderr)
            return 2
        chosen = [stage for stage in chosen if stage.name in options.stages]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the stage under way
    outcomes = run_stages(chosen, options.seconds, options.json_folder)
    print("\n".join(table(outcomes, options.json_folder)), flush=True)
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
