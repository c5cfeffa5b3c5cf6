"""Every kind of Gluon launch, compiled for sm_90 without a GPU: `python -m tests.gated_delta_rule.gluon_launches`
prints {"triton": version, "resources": {name of the launch: what its cubin uses, or the error's traceback}} as JSON;
with --few only of those in FEW.

A process of its own, because a process has one version of Triton: PYTHONPATH chooses it, TRITON_CACHE_DIR must too.
"""

import dataclasses
import json
import sys
import traceback
from unittest import mock

import torch
import triton

from tilecrew.device import aot
from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare, kernel_states
from tilecrew.gated_delta_rule.chunk_flags import Placement
from tilecrew.testing import random_arguments

BF16, FP16 = torch.bfloat16, torch.float16
GATES = {"use_beta_sigmoid": True, "allow_neg_eigval": True, "A_log": torch.zeros(12), "dt_bias": torch.zeros(12)}
VARLEN = {"lengths": [60, 70]}
STATES = {"with_initial_state": True, "output_final_state": True}

# Number of value heads per query/key head: 1, 2 and 4 are groups of one program; 3 is three groups of one. "many": with
# the registers that a launch of many programs gets.
PREPARE = {
    "normalised, group 4": (12, BF16, {"use_qk_l2norm": True}),
    "normalised, group 4, float16, packed, gates": (12, FP16, {"use_qk_l2norm": True, **VARLEN, **GATES}),
    "normalised, group 2, packed": (6, BF16, {"use_qk_l2norm": True, **VARLEN}),
    "normalised, group 1, gates": (9, BF16, {"use_qk_l2norm": True, **GATES}),
    "normalised, group 4, many": (12, BF16, {"use_qk_l2norm": True, "many": True}),
    "gate inside, group 4, packed, many": (12, BF16, {"many": True, **VARLEN}),
    "gate inside, group 2, float16, many": (6, FP16, {"many": True}),
    "gate inside, group 4, packed": (12, BF16, VARLEN),
    "gate inside, group 2, float16": (6, FP16, {}),
    "gate inside, group 1, packed, gates": (3, BF16, {**VARLEN, **GATES}),
}

ROLES = {
    "V block 128": (128, BF16, {}),
    "V block 128, normalised, states": (128, BF16, {"use_qk_l2norm": True, **STATES}),
    "V block 128, float16, packed, states, h": (128, FP16, {"output_h": True, **VARLEN, **STATES}),
    "V block 128, normalised, packed, V first, h": (
        128,
        BF16,
        {"use_qk_l2norm": True, "state_v_first": True, "output_h": True, **VARLEN, **STATES},
    ),
    "V block 128, packed, pieces": (128, BF16, {"pieces": True, **VARLEN, **STATES}),
    "V block 64": (64, BF16, {}),
    "V block 64, float16, normalised, packed, states, h": (
        64,
        FP16,
        {"use_qk_l2norm": True, "output_h": True, **VARLEN, **STATES},
    ),
    "V block 64, V first, pieces": (64, BF16, {"pieces": True, "state_v_first": True, **STATES}),
    "V block 32, normalised": (32, BF16, {"use_qk_l2norm": True}),
    "V block 32, packed, states, h": (32, BF16, {"output_h": True, **VARLEN, **STATES}),
    "V block 32, float16, normalised, packed, V first, pieces": (
        32,
        FP16,
        {"use_qk_l2norm": True, "state_v_first": True, "pieces": True, **VARLEN, **STATES},
    ),
}

# For the scan. Without norms the kernel looks for long keys, whose merges it has twice then.
GATED = {
    "normalised, group 4, gates": (12, BF16, {"use_qk_l2norm": True, **GATES}),
    "normalised, group 2, packed": (6, BF16, {"use_qk_l2norm": True, **VARLEN}),
    "normalised, group 2, packed, many": (6, BF16, {"use_qk_l2norm": True, "many": True, **VARLEN}),
    "group 4, packed, many": (12, BF16, {"many": True, **VARLEN}),
    "group 4, packed": (12, BF16, VARLEN),
    "group 2": (6, BF16, {}),
    "group 1, gates": (3, BF16, GATES),
}

# The same beside the scan.
BESIDE = {
    "normalised, group 4, gates": (12, BF16, {"use_qk_l2norm": True, **GATES}),
    "group 2": (6, BF16, {}),
    "group 1, packed": (3, BF16, VARLEN),
}

# (block of V, element, options). h takes blocks of 64.
SCAN = {
    "V block 64": (64, BF16, {}),
    "V block 64, normalised, states": (64, BF16, {"use_qk_l2norm": True, **STATES}),
    "V block 64, packed, states, h": (64, BF16, {"output_h": True, **VARLEN, **STATES}),
    "V block 64, normalised, packed, V first, h": (
        64,
        BF16,
        {"use_qk_l2norm": True, "state_v_first": True, "output_h": True, **VARLEN, **STATES},
    ),
    "V block 64, normalised, packed, pieces": (64, BF16, {"use_qk_l2norm": True, "pieces": True, **VARLEN, **STATES}),
    "V block 64, beside prepare": (64, BF16, {"beside": True}),
    "V block 64, beside prepare, normalised, packed, V first, h": (
        64,
        BF16,
        {"beside": True, "use_qk_l2norm": True, "state_v_first": True, "output_h": True, **VARLEN, **STATES},
    ),
    "V block 128": (128, BF16, {}),
    "V block 128, normalised, states": (128, BF16, {"use_qk_l2norm": True, **STATES}),
    "V block 128, states, pieces": (128, BF16, {"pieces": True, **STATES}),
    "V block 128, packed, V first, final state": (
        128,
        BF16,
        {"state_v_first": True, "output_final_state": True, **VARLEN},
    ),
    "V block 128, normalised, packed, pieces": (
        128,
        BF16,
        {"use_qk_l2norm": True, "pieces": True, **VARLEN, **STATES},
    ),
}

# Of pieces, for context parallelism: (history tolerance, options).
PIECE_ENDS = {
    "plain": (0.0, {}),
    "normalised, packed, states, tolerance": (1e-4, {"use_qk_l2norm": True, **VARLEN, **STATES}),
}

TABLES = {
    "prepare": PREPARE,
    "prepare gated": GATED,
    "prepare beside": BESIDE,
    "roles": ROLES,
    "scan": SCAN,
    "states": PIECE_ENDS,
}
NAMES = [f"{kernel}: {name}" for kernel, cases in TABLES.items() for name in cases]

# What versions of Triton that are not installed compile: every kernel with every block of V, element, group and option,
# given and not given, but not every pair of them; and of each kind what needs the most registers.
FEW = [
    "prepare: normalised, group 4, float16, packed, gates",
    "prepare: normalised, group 1, gates",
    "prepare: normalised, group 4, many",
    "prepare: gate inside, group 2, float16, many",
    "prepare: gate inside, group 2, float16",
    "prepare: gate inside, group 1, packed, gates",
    "prepare gated: normalised, group 4, gates",
    "prepare gated: normalised, group 2, packed",
    "prepare gated: normalised, group 2, packed, many",
    "prepare gated: group 4, packed, many",
    "prepare gated: group 1, gates",
    "prepare beside: normalised, group 4, gates",
    "prepare beside: group 2",
    "prepare beside: group 1, packed",
    "roles: V block 128, normalised, packed, V first, h",
    "roles: V block 128, packed, pieces",
    "roles: V block 64",
    "roles: V block 32, float16, normalised, packed, V first, pieces",
    "scan: V block 64, normalised, packed, V first, h",
    "scan: V block 64, beside prepare, normalised, packed, V first, h",
    "scan: V block 128",
    "scan: V block 128, normalised, packed, pieces",
    "states: plain",
    "states: normalised, packed, states, tolerance",
]


def properties_of(name: str) -> set[tuple]:
    """What a launch is an example of: its kernel with one entry of the table, or with an option, given or not."""
    kernel, configuration = name.split(": ")
    *entries, options = TABLES[kernel][configuration]
    known = {option for *_, others in TABLES[kernel].values() for option in others}
    found = {(kernel, number, str(entry)) for number, entry in enumerate(entries)}
    return found | {(kernel, option, option in options) for option in known}


def arguments_of(num_value_heads, dtype, options):
    options = {name: value[:num_value_heads] if torch.is_tensor(value) else value for name, value in options.items()}
    return random_arguments(1, 130, 3, num_value_heads, dtype=dtype, **options)


def make_launch(name: str) -> Launch:
    kernel, configuration = name.split(": ")
    if kernel in ("prepare", "prepare gated"):
        is_gated = kernel == "prepare gated"
        num_value_heads, dtype, options = (GATED if is_gated else PREPARE)[configuration]
        options = dict(options)
        many = 0 if options.pop("many", False) else kernel_prepare.MANY_PROGRAMS
        arguments = arguments_of(num_value_heads, dtype, options)
        allocate = kernel_prepare.allocate_gated if is_gated else kernel_prepare.allocate
        with mock.patch.object(kernel_prepare, "MANY_PROGRAMS", many):
            return kernel_prepare.launch(arguments, allocate(arguments), torch.empty_like(arguments.v))
    if kernel == "prepare beside":
        arguments = arguments_of(*BESIDE[configuration])
        prepared = kernel_prepare.allocate_beside(arguments)
        return kernel_prepare.launch(arguments, prepared, torch.empty_like(arguments.v), Placement(100, 64, 132))
    if kernel == "scan":
        block_v, dtype, options = SCAN[configuration]
        options = dict(options)
        is_beside = options.pop("beside", False)
        pieces = torch.tensor([[0, 0, 1]], dtype=torch.int32) if options.pop("pieces", False) else None
        arguments = arguments_of(6, dtype, options)
        allocate = kernel_prepare.allocate_beside if is_beside else kernel_prepare.allocate_gated
        prepared = allocate(arguments)
        result = kernel_forward_roles.allocate_result(arguments)
        return kernel_forward_scan.launch(arguments, prepared, result, block_v, pieces)
    if kernel == "states":
        tolerance, options = PIECE_ENDS[configuration]
        arguments = arguments_of(6, BF16, options)
        pieces, ends = torch.tensor([[0, 0, 1]], dtype=torch.int32), kernel_states.allocate(arguments, 1)
        return kernel_states.launch(arguments, kernel_prepare.allocate_gated(arguments), pieces, ends, tolerance)
    block_v, dtype, options = ROLES[configuration]
    options = dict(options)
    pieces = torch.tensor([[0, 0, 1]], dtype=torch.int32) if options.pop("pieces", False) else None
    arguments = arguments_of(6, dtype, options)
    prepared = kernel_prepare.allocate(arguments)
    result = kernel_forward_roles.allocate_result(arguments)
    return kernel_forward_roles.launch(arguments, prepared, result, block_v, pieces)


def main() -> None:
    resources = {}
    for name in FEW if "--few" in sys.argv else NAMES:
        try:
            resources[name] = dataclasses.asdict(aot.resources(aot.compile_launch(make_launch(name))))
        except Exception:  # the test of this launch shows it; those of the others still run
            resources[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "resources": resources}, sys.stdout)


if __name__ == "__main__":
    main()
