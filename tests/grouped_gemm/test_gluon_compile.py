"""The grouped GEMM with roles compiles without spills, with wgmma in flight or with mma.sync, and into the shared
memory that its schedule counts on: all launches with the installed Triton, some of them with those under .triton/."""

import json

import pytest

pytest.importorskip("triton")
from tests.grouped_gemm.gluon_launches import FEW, LAUNCHES, MMA_SYNC_FEW, MMA_SYNC_NAMES, properties_of
from tests.tritons import INSTALLED, cases, output_of_each

SHARED_MEMORY_OF_A_BLOCK = 232_448  # bytes, compute capability 9.0
SMALL_SHARED_MEMORY_OF_A_BLOCK = 101_376  # bytes, compute capability 12.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what gluon_launches printed."""
    outputs = output_of_each(tmp_path_factory.mktemp, "tests.grouped_gemm.gluon_launches", others=("--few",))
    return {version: json.loads(output) for version, output in outputs.items()}


@pytest.mark.parametrize(("few", "names"), [(FEW, LAUNCHES), (MMA_SYNC_FEW, MMA_SYNC_NAMES)])
def test_a_few_launches_have_every_property_of_all(few, names):
    assert len(set(few)) < len(names)
    assert set().union(*map(properties_of, few)) == set().union(*map(properties_of, names))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), cases(LAUNCHES, FEW))
def test_compiles(name, version, reports):
    assert version in (INSTALLED, reports[version]["triton"])
    resources = reports[version]["resources"][name]
    assert isinstance(resources, dict), resources
    assert resources["local_memory_instructions"] == 0
    assert resources["stack_bytes"] == 0
    assert resources["shared_memory_bytes"] <= resources["budget"] <= SHARED_MEMORY_OF_A_BLOCK
    # ptxas gives every wgmma a group of its own where it serialises them.
    assert 0 < resources["wgmma_groups"] == resources["products"] < resources["wgmma"]
    assert resources["tma"] > 0
    assert resources["overlaid_barriers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), cases(MMA_SYNC_NAMES, MMA_SYNC_FEW))
def test_compiles_with_mma_sync(name, version, reports):
    resources = reports[version]["resources"][name]
    assert isinstance(resources, dict), resources
    assert resources["local_memory_loads"] == 0
    # For sm_120 ptxas calls a function where a TMA copy would leave the block: 8 bytes of arguments.
    assert resources["stack_bytes"] <= (8 if name.endswith("sm_120") else 0)
    assert resources["shared_memory_bytes"] <= resources["budget"] <= SMALL_SHARED_MEMORY_OF_A_BLOCK
    # Each of 8 warps multiplies 16 rows by 128 columns and 64 inner elements in a step.
    assert resources["mma"] == 64
    assert resources["wgmma"] == 0
    assert resources["tma"] > 0
    assert resources["overlaid_barriers"] == 0
