"""The simulator runs the Gluon kernels as every version of Triton compiles them: the installed one, those in .triton/.

`python -m tests.simulator.test_versions` simulates one launch of each kind and prints {"triton": version, "outputs":
{kind: {name: {"nan": how many, "values": some of the others}}}} as JSON. A process of its own, because a process has
one version of Triton: PYTHONPATH chooses it, TRITON_CACHE_DIR must too.
"""

import json
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton

from tests.simulator.conftest import run_under_seeds
from tests.tritons import INSTALLED, VERSIONS, report_of_each
from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare
from tilecrew.testing import random_arguments

STRIDE = 7  # of the values that a child prints: prime to the sizes of the tensors, so every row and column is there
UNWRITTEN = {("roles", "o"): 64 * 128}  # the piece begins behind the first chunk


def simulate_all():
    """Kind of launch -> name of its output -> what it holds; two seeds must agree in every bit."""
    arguments = random_arguments(
        1, 130, 1, 1, dtype=torch.bfloat16, use_qk_l2norm=True, with_initial_state=True, output_final_state=True
    )
    with_h = random_arguments(1, 130, 1, 1, dtype=torch.bfloat16, use_qk_l2norm=True, output_h=True)
    plain, gated = kernel_prepare.allocate(arguments), kernel_prepare.allocate_gated(with_h)
    without_h = replace(with_h, output_h=False)
    roles, scan, wide_scan = (kernel_forward_roles.allocate_result(x) for x in (arguments, with_h, without_h))
    piece = torch.tensor([[0, 1, 3]], dtype=torch.int32)
    # In this order: what is prepared is what the other kernels read.
    launches = {
        "prepare": (
            kernel_prepare.launch(arguments, plain, roles.o),
            {"inverse": plain.inverse, "gates": plain.gates},
        ),
        "prepare gated": (
            kernel_prepare.launch(with_h, gated, scan.o),
            {"inverse": gated.inverse, "factors": gated.factors, "scores": gated.scores},
        ),
        "roles": (
            kernel_forward_roles.launch(arguments, plain, roles, 32, piece),
            {"o": roles.o, "final_state": roles.final_state},
        ),
        "scan 64": (kernel_forward_scan.launch(with_h, gated, scan, 64), {"o": scan.o, "h": scan.h}),
        "scan 128": (kernel_forward_scan.launch(without_h, gated, wide_scan, 128), {"o": wide_scan.o}),
    }
    report = {}
    for kind, (launch, outputs) in launches.items():
        run_under_seeds(launch, list(outputs.values()), num_seeds=2)
        report[kind] = {
            name: {"nan": int(output.isnan().sum()), "values": output.nan_to_num().flatten()[::STRIDE].tolist()}
            for name, output in outputs.items()
        }
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what its child printed."""
    return report_of_each(tmp_path_factory.mktemp, "tests.simulator.test_versions")


# Missing versions are reported by tests/gated_delta_rule/test_gluon_compile.py.
@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_simulates_what_the_installed_version_does(version, reports):
    report, expected = reports[version], reports[INSTALLED]
    assert version in (INSTALLED, report["triton"])
    assert set(report["outputs"]) == {"prepare", "prepare gated", "roles", "scan 64", "scan 128"}
    for kind, outputs in report["outputs"].items():
        for name, output in outputs.items():
            assert output["nan"] == UNWRITTEN.get((kind, name), 0), (kind, name)
            values, truth = torch.tensor(output["values"]), torch.tensor(expected["outputs"][kind][name]["values"])
            assert truth.norm() > 0
            assert (values - truth).norm() <= 2e-2 * truth.norm(), (kind, name)


if __name__ == "__main__":
    json.dump({"triton": triton.__version__, "outputs": simulate_all()}, sys.stdout)
