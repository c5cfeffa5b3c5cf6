"""Launches by plans beside launches by Triton: `python -m tests.device.direct_launches FOLDER COMPILER` prints what
differs, {"triton": version, "differences": {case: [differences]}, ...}, as JSON. Nothing needs a GPU.

A process of its own, because a process has one version of Triton and one driver.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from triton import knobs

from tests.device.fake_driver import FakeDriver
from tests.grouped_gemm.problems import make
from tilecrew._hardware import Hardware
from tilecrew._launches import LaunchMemory
from tilecrew._plans import Recording
from tilecrew.device import launch
from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_portable, kernel_recurrent
from tilecrew.gated_delta_rule.operators import problem_of
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.gated_delta_rule.schedule import pick
from tilecrew.grouped_gemm import Bias, CountGate, NotifyRowBlock, kernel_grouped_gemm
from tilecrew.grouped_gemm.schedule import Problem, hopper_tiles, mma_sync_tiles
from tilecrew.moe import kernel_dispatch_gemm, one_rank
from tilecrew.moe.schedule import ring_options
from tilecrew.testing import random_arguments

HOPPER = Hardware("cuda", "cuda", (9, 0), 132, 232448, "NVIDIA H200")
KERNELS = {"scan": kernel_forward_scan, "roles": kernel_forward_roles, "portable": kernel_portable}
BF16 = torch.bfloat16
CASES = {
    "scan": {"dtype": BF16},
    "scan, norms, packed, states": {
        "dtype": BF16,
        "use_qk_l2norm": True,
        "lengths": [60, 70],
        "with_initial_state": True,
        "output_final_state": True,
    },
    "roles, norms": {"dtype": BF16, "use_qk_l2norm": True},
    "portable, packed": {"dtype": torch.float16, "lengths": [60, 70]},
}
GROUPED = {
    "grouped GEMM": (hopper_tiles, False),
    "grouped GEMM, transposed, hooks": (hopper_tiles, True),
    "grouped GEMM, mma.sync, hooks": (lambda problem, num_sms: mma_sync_tiles(problem), True),
}


GATHERING = ("gather", "gather, one route")


def chunk_call(name: str, seed: int):
    arguments = random_arguments(1, 130, 2, 4, seed=seed, **CASES[name])
    implementation = name.split(",")[0]
    schedule = pick(problem_of(arguments, False), HOPPER, implementation)

    def call():
        result = KERNELS[implementation].forward(arguments, schedule)
        return result.o, result.final_state, result.h

    tensors = [value for value in vars(arguments).values() if isinstance(value, torch.Tensor)]
    return tensors, call


def recurrent_call(name: str, seed: int):
    x = random_arguments(3, 1, 2, 4, seed=seed, dtype=BF16)
    pool, indices = torch.randn(5, 4, 128, 128), torch.tensor([2, 0, 1])
    arguments = RecurrentArguments(
        *(x.q, x.k, x.v, x.g, x.beta, x.scale),
        initial_state=pool,
        state_indices=indices,
        inplace_state=True,
        output_final_state=True,
    )
    return [x.q, x.k, x.v, x.g, x.beta, pool, indices], lambda: kernel_recurrent.forward(arguments)


def grouped_call(name: str, seed: int):
    choose_tiles, has_hooks = GROUPED[name]
    x, w, offs = make([100, 0, 30], 3, 128, 512, transposed="transposed" in name, seed=seed)
    tensors, gate, epilogue = [x, w, offs], None, None
    if has_hooks:
        counters, rows, arrivals, bias = *torch.zeros(3, 8, dtype=torch.int32).unbind(), torch.zeros(3, 512)
        gate, epilogue = CountGate(counters), NotifyRowBlock(rows, arrivals, Bias(bias))
        tensors += [counters, rows, arrivals, bias]
    tiles = choose_tiles(Problem(16384, 3, 128, 512, "bfloat16", has_hooks, has_hooks), 132)

    def make_launch(out):
        hooks = kernel_grouped_gemm.hooks_of(gate, epilogue)
        return kernel_grouped_gemm.launch(x, w, offs, out, tiles, 4, hooks)

    return tensors, make_launch


def dispatch_launch(seed: int):
    """Rows of peers, of one shape and at other addresses for every seed."""
    halves = [torch.full((256, 64), float(seed), dtype=BF16) for _ in range(2)]
    x, rows, offsets = *halves, torch.zeros(2, dtype=torch.int64)
    indices, offs, counters, control = (torch.zeros(512, dtype=torch.int32) for _ in range(4))
    tensors = (x, offsets, rows, indices, offs, counters, control)
    options = ring_options(64, HOPPER)
    return list(tensors), lambda: launch.Launch(kernel_dispatch_gemm.dispatch_kernel, 3, (tensors, 8, 64), options)


def gather_launch(name: str, seed: int):
    """A product of tokens that are read where they are; a number that is 1 is no argument of the compiled kernel."""
    num_tokens, top_k = (140, 1) if "one route" in name else (70, 2)
    _, w, offs = make([100, 0, 30], 10, 128, 512, seed=seed)
    x, out = torch.full((num_tokens, 128), float(seed), dtype=BF16), torch.empty(140, 512, dtype=BF16)
    row_routes = torch.zeros(140, dtype=torch.int32)
    tensors = (x, row_routes, offs, w, out)
    return list(tensors), lambda: one_rank.gather_gemm_launch(*tensors, top_k, None)


def make_call(name: str, seed: int):
    if name in GROUPED:
        tensors, make_launch = grouped_call(name, seed)

        def call():
            out = tensors[0].new_empty(tensors[0].shape[0], 512)
            make_launch(out).run()
            return (out,)

        return tensors, call
    return recurrent_call(name, seed) if name == "recurrent" else chunk_call(name, seed)


def names_of(addresses: list[int]) -> dict[bytes, str]:
    return {address.to_bytes(8, "little"): f"tensor {slot}" for slot, address in enumerate(addresses)}


def names_of_addresses(tensors: list[torch.Tensor]) -> dict[bytes, str]:
    return names_of([tensor.data_ptr() for tensor in tensors])


def readable(log: list[bytes], names: dict[bytes, str]) -> list[str]:
    """Log entries as text, with addresses replaced by the tensors they are of."""
    return [f"{names.get(entry[:8], entry[:8].hex())} {entry[8:].hex()}" for entry in log]


def differences(name: str, driver: FakeDriver) -> list[str]:
    """Between what Triton launches for a call and what the plan of another call, recorded before, launches for it."""
    recorded_tensors, recorded_call = make_call(name, 0)
    with Recording(recorded_tensors) as recording:
        results = recorded_call()
    plan = recording.plan(results)
    tensors, call = make_call(name, 1)
    driver.take_log()
    with Recording(tensors) as recording:
        results = call()
    allocations = [recording._allocations[i] for numbers in recording._apart(results) for i in numbers]
    expected = readable(driver.take_log(), names_of_addresses([*tensors, *allocations]))

    made, addresses = list(tensors), [tensor.data_ptr() for tensor in tensors]
    assert plan.allocate(made, addresses)
    for repeated in plan.launches:
        repeated.run(addresses, repeated.surroundings())
    actual = readable(driver.take_log(), names_of(addresses))
    num_launches = len(plan.launches)
    if len(expected) <= 4 * num_launches or not any(entry.startswith("tensor") for entry in expected):
        return [f"too little was logged to compare: {expected}"]
    found = [f"{x} / {y}" for x, y in zip(expected, actual, strict=False) if x != y]
    return found + ([f"{len(expected)} / {len(actual)} entries"] if len(expected) != len(actual) else [])


def remembered_launch(name: str, seed: int):
    """The tensors of a launch, and what makes it."""
    if name == "dispatch":
        return dispatch_launch(seed)
    if name in GATHERING:
        return gather_launch(name, seed)
    tensors, make_launch = grouped_call(name, seed)
    out = tensors[0].new_empty(tensors[0].shape[0], 512)
    return [*tensors, out], lambda: make_launch(out)


def differences_of_remembered(name: str, driver: FakeDriver) -> list[str]:
    """Between what Triton launches and what a LaunchMemory that knows another launch of the key launches in its place.
    Then one of its tensors is not aligned, and one has another dtype: both are other launches."""
    memory, made = LaunchMemory(), []
    tensors, make = remembered_launch(name, 0)
    driver.describe(make().run())
    memory.run(name, tensors, make)
    tensors, make = remembered_launch(name, 1)
    driver.take_log()
    make().run()
    names = names_of_addresses(tensors)
    expected = readable(driver.take_log(), names)

    def noted():
        made.append(name)
        return make()

    memory.run(name, tensors, noted)
    actual = readable(driver.take_log(), names)
    found = [f"{x} / {y}" for x, y in zip(expected, actual, strict=False) if x != y]
    found += [f"{len(expected)} / {len(actual)} entries"] if len(expected) != len(actual) else []
    found += [f"made again: {made}"] if made else []
    found += ["too little was logged"] if len(expected) <= 4 else []
    for others in ([tensors[0].flatten()[1:], *tensors[1:]], [*tensors[:-1], tensors[-1].view(torch.uint8)]):
        before = len(made)
        memory.run(name, others, noted)
        found += [] if len(made) == before + 1 else ["not made anew"]
    return found


def hooks(driver: FakeDriver) -> list[str]:
    """What launch hooks see of a plan's launches."""
    tensors, call = recurrent_call("recurrent", 0)
    with Recording(tensors) as recording:
        results = call()
    plan = recording.plan(results)
    seen = []
    runtime = knobs.runtime

    def enter(metadata):
        seen.append(f"enter {metadata.get()['name']}")

    def leave(metadata):
        seen.append(f"exit {metadata.get()['name']}")

    runtime.launch_enter_hook.add(enter)
    runtime.launch_exit_hook.add(leave)
    plan.run(tensors, [tensor.data_ptr() for tensor in tensors])
    runtime.launch_enter_hook.remove(enter)
    runtime.launch_exit_hook.remove(leave)
    plan.run(tensors, [tensor.data_ptr() for tensor in tensors])
    return seen


def ended_plans() -> dict[str, bool]:
    """Which changes end a plan."""
    tensors, call = recurrent_call("recurrent", 0)
    addresses = [tensor.data_ptr() for tensor in tensors]
    with Recording(tensors) as recording:
        results = call()
    plan = recording.plan(results)
    ended = {"nothing": plan.run(tensors, addresses) is None}
    knobs.runtime.debug = True
    ended["debug"] = plan.run(tensors, addresses) is None
    knobs.runtime.debug = False
    active = triton.runtime.driver.active
    current = active.get_current_device
    active.get_current_device = lambda: 1
    ended["device"] = plan.run(tensors, addresses) is None
    active.get_current_device = current
    return ended


def main() -> None:
    driver = FakeDriver(Path(sys.argv[1]), sys.argv[2])
    one_rank.hardware_of = lambda device: HOPPER
    run = launch.Launch.run

    def described_run(self):
        compiled = run(self)
        driver.describe(compiled)
        return compiled

    # Every kernel once, to learn its parameters: the logs begin behind that.
    launch.Launch.run = described_run
    names, remembered = (*CASES, "recurrent", *GROUPED), (*GROUPED, "dispatch", *GATHERING)
    for name in names:
        make_call(name, 0)[1]()
    launch.Launch.run = run
    report = {
        "triton": triton.__version__,
        "differences": {name: differences(name, driver) for name in names},
        "remembered": {name: differences_of_remembered(name, driver) for name in remembered},
        "hooks": hooks(driver),
        "ended": ended_plans(),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
