"""Every Gluon kernel compiles for sm_90 with its MMAs in flight and without spills, but for those that are counted
below: all launches with the installed Triton, some of each kernel with those under .triton/."""

import json
import os

import pytest

pytest.importorskip("triton")
from tests.gated_delta_rule.gluon_launches import FEW, NAMES, properties_of
from tests.tritons import INSTALLED, OTHER_VERSIONS, cases, output_of_each

SHARED_MEMORY_OF_A_BLOCK = 232_448  # bytes, compute capability 9.0
# The scan with 128 values has 216 registers for a thread of its scan role and 32 for one that loads or stores. Outside
# of loops with an MMA it spills what a piece ends with, the address of the dispatch, what rows behind the end take, and
# in the store role two operands of TMA that ptxas carries from turn to turn. The versions differ in which. That of 3.9
# needs more registers than the others, and reloads one value in the scan role's loop.
TIGHT = "scan: V block 128"
MOST_SPILLS = {"3.9.0": 40}
MOST_SPILLS_ELSEWHERE = 12
SPILLS_IN_WGMMA_LOOPS = {"3.9.0": 1}
# With 96 registers, for a fifth program on an SM, prepare spills outside of loops with wgmma, and is faster all the
# same (docs/notes/forward.md).
MANY_PROGRAMS = {
    "prepare gated: normalised, group 2, packed, many": 2,
    "prepare gated: group 4, packed, many": 15,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what gluon_launches printed."""
    outputs = output_of_each(tmp_path_factory.mktemp, "tests.gated_delta_rule.gluon_launches", others=("--few",))
    return {version: json.loads(output) for version, output in outputs.items()}


def test_other_versions_are_there():
    if not OTHER_VERSIONS:
        advice = "no other version of Triton under .triton/: `make test` puts them there"
        if os.environ.get("CI") == "true":
            pytest.fail(advice)
        pytest.skip(advice)


def test_a_few_launches_have_every_property_of_all():
    assert len(set(FEW)) < len(NAMES)
    assert set().union(*map(properties_of, FEW)) == set().union(*map(properties_of, NAMES))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), cases(NAMES, FEW))
def test_compiles_without_spills(name, version, reports):
    assert version in (INSTALLED, reports[version]["triton"])
    resources = reports[version]["resources"][name]
    assert isinstance(resources, dict), resources
    is_tight = name.startswith(TIGHT)
    most_spills = MOST_SPILLS.get(version, MOST_SPILLS_ELSEWHERE) if is_tight else MANY_PROGRAMS.get(name, 0)
    assert resources["local_memory_instructions"] <= most_spills
    assert resources["spills_in_wgmma_loops"] <= (SPILLS_IN_WGMMA_LOOPS.get(version, 0) if is_tight else 0)
    assert most_spills > 0 or resources["stack_bytes"] == 0
    assert resources["shared_memory_bytes"] <= SHARED_MEMORY_OF_A_BLOCK
    # ptxas gives every wgmma a group of its own where it serialises them.
    assert 0 < resources["wgmma_groups"] == resources["products"] < resources["wgmma"]
    assert resources["tma"] > 0
    assert resources["overlaid_barriers"] == 0
    if name.startswith("prepare"):
        assert resources["mma"] > 0
