"""compute-sanitizer over sanitizer_cases.py: no bad access, and no race but those that racecheck cannot know better.

What tells that these are none: tests/simulator, which plants the faults that would make them so.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.racecheck import dispatch_lines, hazards_of, line_of, unexplained

ROOT = Path(__file__).parents[1]
FAMILY = ROOT / "tilecrew" / "gated_delta_rule"
ROLES, SCAN = FAMILY / "kernel_forward_roles.py", FAMILY / "kernel_forward_scan.py"
# Values behind the end of a sequence become zeros in load_value_role's one warp (beside the prepare kernel), and the
# scan role reads them when that has arrived.
ZEROS_IN_VALUES = (
    line_of(ROOT / "tilecrew" / "device" / "tiles.py", "zero_rows", "block.store("),
    line_of(SCAN, "scan_role", "V = tiles.value_matrix(stage)"),
)

REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at forward_roles_kernel+0x1a0 in /x/{name}:{entry}
=========     and Read access at forward_roles_kernel+0x2b0 in /x/{name}:{dispatch} [384 hazards]
=========
========= Warning: Race reported between Write access at forward_roles_kernel+0x1a0 in /x/{name}:{entry}
=========     and Read access at forward_roles_kernel+0x4c0 in /x/{other} [4 hazards]
=========     and Write access at forward_roles_kernel+0x5c0 in /x/{name}:{entry} [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""

ONE_WARP = """\
========= Error: Race reported between Write access at forward_scan_kernel+0x1810 in {zeros}:{line}
=========     and Read access at forward_scan_kernel+0x3ec0 in {name}:{number} [3472 hazards]
=========     and Read access at forward_scan_kernel+0x3ef0 in {name}:{number} [3968 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def report(other):
    source = ROLES.read_text().splitlines()
    entry = source.index("def forward_roles_kernel(") + 1
    (dispatch,) = (number for number, line in enumerate(source, start=1) if "gl.warp_specialize(" in line)
    assert {(ROLES.name, entry), (ROLES.name, dispatch)} <= dispatch_lines(ROLES)
    return REPORT.format(name=ROLES.name, entry=entry, dispatch=dispatch, other=other)


@pytest.mark.parametrize("other", [f"{ROLES.name}:1", "tiles.py:185", "unknown"])
def test_a_race_in_the_kernels_code_is_found(other):
    first, second = hazards_of(report(other))
    assert len(first.locations) == 2
    assert len(second.locations) == 3
    assert unexplained([first, second], [ROLES], ZEROS_IN_VALUES) == [second]


@pytest.mark.parametrize(("other", "is_found"), [(ZEROS_IN_VALUES[1], False), ((SCAN.name, 1), True)])
def test_zeros_of_one_warp_are_expected_where_the_scan_reads_values_only(other, is_found):
    (zeros, line), (name, number) = ZEROS_IN_VALUES[0], other
    (hazard,) = hazards_of(ONE_WARP.format(zeros=zeros, line=line, name=name, number=number))
    assert unexplained([hazard], [ROLES, SCAN], ZEROS_IN_VALUES) == ([hazard] if is_found else [])


@pytest.mark.parametrize(("old", "new"), [("SUMMARY: 2", "SUMMARY: 3"), ("RACECHECK SUMMARY", "")])
def test_a_report_that_is_not_understood_is_an_error(old, new):
    with pytest.raises(ValueError, match="read 2 hazards"):
        hazards_of(report("tiles.py:1").replace(old, new))


def sanitize(*options, cases=()):
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH: it comes with CUDA")
    # Allocations of their own, or an access past a tensor stays inside torch's pool and goes unseen.
    # And one kernel at a time: what spins on a barrier until another kernel has come on would fill racecheck's records.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    program = [sys.executable, "tests/sanitizer_cases.py", *cases]
    command = [tool, "--target-processes", "application-only", *options, *program]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(command, cwd=ROOT, env=environment, timeout=900, **output)
    if "Device not supported" in run.stdout:
        pytest.skip("compute-sanitizer does not support this device, or not under this runtime")
    return run


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("cases", [["--pieces", "--grouped"], ["--expert-parallel"]], ids=" ".join)
def test_no_bad_memory_access(cases):
    run = sanitize("--tool", "memcheck", "--error-exitcode", "9", cases=cases)
    assert run.returncode == 0, run.stdout
    assert "ERROR SUMMARY: 0 errors" in run.stdout, run.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_no_race_that_is_not_explained():
    run = sanitize("--tool", "racecheck", "--racecheck-report", "analysis", "--print-limit", "1000")
    assert run.returncode == 0, run.stdout
    found = unexplained(hazards_of(run.stdout), [ROLES, SCAN], ZEROS_IN_VALUES)
    assert not found, "\n".join(hazard.text for hazard in found)
