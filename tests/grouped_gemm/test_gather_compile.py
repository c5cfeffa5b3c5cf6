"""The grouped GEMM that gathers its rows compiles for sm_90 with every Triton, without spills, into 16-byte copies."""

import re

import pytest

pytest.importorskip("triton")
from tests.grouped_gemm.gather_launches import LAUNCHES
from tests.tritons import INSTALLED, VERSIONS, report_of_each

SHARED_MEMORY_OF_A_BLOCK = 232_448  # bytes, compute capability 9.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what gather_launches printed."""
    return report_of_each(tmp_path_factory.mktemp, "tests.grouped_gemm.gather_launches")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles(name, version, reports):
    assert version in (INSTALLED, reports[version]["triton"])
    found = reports[version]["found"][name]
    assert isinstance(found, dict), found
    resources = found["resources"]
    assert resources["local_memory_instructions"] == 0
    assert resources["stack_bytes"] == 0
    assert resources["overlaid_barriers"] == 0
    assert resources["shared_memory_bytes"] <= found["budget"] <= SHARED_MEMORY_OF_A_BLOCK
    # As without a source: the products of two consumers, none serialised.
    assert resources["wgmma_groups"] == resources["products"] == 2
    assert resources["wgmma"] == 8
    assert resources["tma"] > 0
    # 128 rows of 128 bytes by 128 threads, past the L1 cache; nothing narrower.
    assert found["copies"] == ["LDGSTS.E.BYPASS.128"] * 8
    ptx = found["ptx"]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10, %r", ptx)) == 8  # 16 bytes, or zeros
    # Own copies are over, then a proxy fence of every thread, then a barrier, then one arrival for all.
    first = ptx.index("cp.async.cg.shared.global")
    wait = ptx.index("cp.async.wait_group", first)
    fence = ptx.index("fence.proxy.async.shared::cta", wait)
    barrier = ptx.index("bar.sync", fence)
    arrival = ptx.index("mbarrier.arrive.shared::cta", wait)
    assert first < wait < fence < barrier < arrival
    assert "mbarrier.arrive" not in ptx[first:wait]
