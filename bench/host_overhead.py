"""Host time of an eager call, in microseconds, whole and by part.

    PYTHONPATH=. python bench/host_overhead.py --json bench/results/host_overhead.json

Small problems, whose kernels take less time than the host needs to launch them: a prompt of 64 tokens with 16 / 32
heads, with norms inside and with unit keys from the caller, and one decode step of 8 sequences; and 4096 tokens with 2
and 8 heads, which are cut into pieces: five kernels. And a grouped GEMM of 64 rows over 8 groups, with SwiGLU and
notifications in its epilogue, and without hooks. Each number is the median over repeats of the mean of 50 calls that
begin with an idle GPU, which never fill its queue; the least of several rounds over all cases, because a host that
others use too is slow for seconds at a time.

    call                a call of a known signature, by its plan
    call: inference     the same under torch.inference_mode
    call: new           a call of a signature that was never seen
    call: operator      a call that torch's dispatcher sees, as under a mode
    signature, find     of a call of a known signature: what tells it apart, and the look-up of its plan
    plan                the rest of it; of that:
    plan: allocations
    plan: launches
    checks              of a new signature, or through the operator: the checks of the arguments,
    schedule            the choice of the implementation,
    arguments           allocations and the arguments of the launches,
    launches            the launches through Triton

Without a GPU, CPU tensors stand for those of an H200 and nothing is launched: the parts of launches are missing, and
calls do not contain them.
"""

import argparse
import contextlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from tilecrew import _eager as eager
from tilecrew import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, grouped_gemm
from tilecrew._hardware import Hardware
from tilecrew._plans import active_recording
from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule import checks, operators, recurrent_operators
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.grouped_gemm import NotifyRowBlock, SwiGLU
from tilecrew.grouped_gemm import checks as grouped_checks
from tilecrew.grouped_gemm import operators as grouped_operators
from tilecrew.testing import random_arguments

CALLS = 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = Hardware("cuda", "cuda", (9, 0), 132, 232448, "NVIDIA H200")


class NothingLaunched:
    @staticmethod
    def circumstances():
        return None

    @staticmethod
    def surroundings():
        return None

    def run(self, addresses, surroundings):
        pass


def launch_nothing(launch: Launch) -> None:
    if active_recording() is not None:
        active_recording().add_launch(lambda locate: NothingLaunched())


def pretend_to_have_a_gpu() -> None:
    eager.DEVICE_TYPES = ("cpu",)
    for module in (operators, recurrent_operators, grouped_operators):
        module.hardware_of = lambda device: H200
    torch.cuda.device = lambda device: contextlib.nullcontext()
    grouped_checks.check_offsets = lambda offs, num_rows: None  # which reads them on a CPU, and only there
    Launch.run = launch_nothing


def microseconds(function: Callable[[], object], repeats: int) -> float:
    def synchronise():
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(repeats + 1):
        synchronise()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    synchronise()
    return round(statistics.median(times[1:]), 2)


def chunk_case(norms: bool, num_tokens: int = 64, heads: tuple[int, int] = (16, 32)) -> dict:
    arguments = random_arguments(1, num_tokens, *heads, dtype=torch.bfloat16, device=DEVICE, use_qk_l2norm=norms)
    x = arguments
    return {
        "module": operators,
        "call": lambda: chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, use_qk_l2norm_in_kernel=norms),
        "check": lambda: checks.check_forward(arguments),
        "schedule": lambda: operators.schedule_of(arguments, False, None),
        "kernel": lambda: operators._checked_forward(arguments, False, None),
    }


def decode_case() -> dict:
    x = random_arguments(8, 1, 16, 32, dtype=torch.bfloat16, device=DEVICE, with_initial_state=True)
    arguments = RecurrentArguments(
        *(x.q, x.k, x.v, x.g, x.beta, x.scale),
        initial_state=x.initial_state,
        inplace_state=True,
        output_final_state=True,
        use_qk_l2norm=True,
    )
    options = {"initial_state": x.initial_state, "inplace_state": True, "use_qk_l2norm_in_kernel": True}
    return {
        "module": recurrent_operators,
        "call": lambda: fused_recurrent_gated_delta_rule(x.q, x.k, x.v, x.g, beta=x.beta, **options),
        "check": lambda: checks.check_recurrent(arguments),
        "schedule": lambda: recurrent_operators.pick_recurrent(
            recurrent_operators.recurrent_problem_of(arguments), recurrent_operators.hardware_of(DEVICE), None
        ),
        "kernel": lambda: recurrent_operators._checked_forward(arguments, None),
    }


def grouped_case(has_hooks: bool) -> dict:
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    x, w = torch.randn(64, 256, **options), torch.randn(8, 256, 512, **options)
    offs = torch.arange(8, 65, 8, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    epilogue = NotifyRowBlock(rows, epilogue=SwiGLU(8)) if has_hooks else None
    out = x.new_empty(64, 256 if has_hooks else 512)
    return {
        "module": grouped_operators,
        "call": lambda: grouped_gemm(x, w, offs, epilogue=epilogue),
        "check": lambda: grouped_checks.check_call(x, w, offs, None, epilogue, None),
        "schedule": lambda: grouped_operators.schedule_of(x, w, None, epilogue, None),
        "kernel": lambda: grouped_operators.run(x, w, offs, out, None, None, epilogue),
    }


def whole_calls(case: dict, repeats: int) -> dict[str, float]:
    plans, call = case["module"].PLANS, case["call"]

    def new_call():
        plans.clear()
        call()

    row = {"call: new": microseconds(new_call, repeats)}
    device_types, eager.DEVICE_TYPES = eager.DEVICE_TYPES, ()
    row["call: operator"] = microseconds(call, repeats)
    eager.DEVICE_TYPES = device_types
    with torch.inference_mode():
        make_plan(case)
        row["call: inference"] = microseconds(call, repeats)
    make_plan(case)
    return {"call": microseconds(call, repeats), **row}


def make_plan(case: dict) -> None:
    """A plan of the case's call, and of no other."""
    case["module"].PLANS.clear()
    for _ in range(3):
        case["call"]()
    if case["module"].PLANS.num_plans != 1:
        raise RuntimeError("the call has no plan")


def parts_of_a_plan(case: dict, repeats: int) -> dict[str, float]:
    seen = []
    plain_call = eager.plain_call

    def noted(*arguments):
        seen.append(arguments)
        return plain_call(*arguments)

    eager.plain_call = noted
    case["call"]()
    eager.plain_call = plain_call
    call, plans = plain_call(*seen[0]), case["module"].PLANS
    plan = plans.find(call)
    addresses = list(call.addresses)
    made: list = []
    plan.allocate(made, addresses)

    def allocate():
        plan.allocate([], [])

    def launch():
        surroundings = plan.launches[0].surroundings()
        for x in plan.launches:
            x.run(addresses, surroundings)

    row = {
        "signature": microseconds(lambda: plain_call(*seen[0]), repeats),
        "find": microseconds(lambda: plans.find(call), repeats),
        "plan": microseconds(lambda: plan.run(call.tensors, call.addresses), repeats),
        "plan: allocations": microseconds(allocate, repeats),
    }
    return {**row, "plan: launches": microseconds(launch, repeats)} if DEVICE == "cuda" else row


def parts_without_a_plan(case: dict, repeats: int) -> dict[str, float]:
    row = {"checks": microseconds(case["check"], repeats), "schedule": microseconds(case["schedule"], repeats)}
    run, launches = Launch.run, []
    Launch.run = lambda launch: launches.append(launch)  # a function, to be bound
    case["kernel"]()
    Launch.run = lambda launch: None
    row["arguments"] = round(microseconds(case["kernel"], repeats) - row["schedule"], 2)
    Launch.run = run
    if DEVICE == "cuda":
        row["launches"] = microseconds(lambda: [launch.run() for launch in launches], repeats)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15, help="of 50 calls, in a round")
    parser.add_argument("--rounds", type=int, default=4, help="over all cases")
    options = parser.parse_args()
    if DEVICE == "cpu":
        pretend_to_have_a_gpu()
    cases = {"chunk, norms": chunk_case(True), "chunk, unit keys": chunk_case(False), "decode": decode_case()}
    cases["chunk, in pieces"] = chunk_case(False, 4096, (2, 8))
    cases |= {"grouped GEMM": grouped_case(False), "grouped GEMM, hooks": grouped_case(True)}
    report = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else f"none, {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "microseconds": {},
    }
    rows: dict[str, dict[str, float]] = {name: {} for name in cases}
    for _ in range(options.rounds):
        for name, case in cases.items():
            row = whole_calls(case, options.repeats)
            row |= parts_of_a_plan(case, options.repeats) | parts_without_a_plan(case, options.repeats)
            rows[name] = {part: min(value, rows[name].get(part, value)) for part, value in row.items()}
    report["microseconds"] = rows
    for name, row in rows.items():
        print(name, *(f"  {part:20} {value:8.1f}" for part, value in row.items()), sep="\n", file=sys.stderr)
    text = json.dumps(report, indent=2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
