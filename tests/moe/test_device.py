"""The kernels of expert parallelism compile for sm_90 with every Triton, without spills, into the accesses meant."""

import re

import pytest

pytest.importorskip("triton")
from tests.moe.device_launches import LAUNCHES
from tests.tritons import INSTALLED, VERSIONS, report_of_each

ASYNCHRONOUS_COPY = r"cp\.async\.cg\.shared\.global .*, 0x10, %r"
WIDE_LOAD = r"ld\.global\.cg\.v4\.b32"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what device_launches printed."""
    return report_of_each(tmp_path_factory.mktemp, "tests.moe.device_launches")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles(name, version, reports):
    assert version in (INSTALLED, reports[version]["triton"])
    found = reports[version]["found"][name]
    assert isinstance(found, dict), found
    assert found["resources"]["local_memory_instructions"] == 0
    assert found["resources"]["overlaid_barriers"] == 0
    ptx = found["ptx"]
    if name.startswith("combine"):
        # 16 bytes at a time, and nothing of other ranks through the L1 cache.
        assert re.search(WIDE_LOAD, ptx)
        assert re.search(r"st\.global\.v4\.b32", ptx)
        assert not re.search(r"ld\.global\.(cg\.b16|nc)", ptx)
    if name == "bring":
        assert len(re.findall(WIDE_LOAD, ptx)) == len(re.findall(r"st\.global\.v4\.b32", ptx)) == 8
        assert not re.search(r"ld\.global\.(ca|nc)", ptx)
    if name in ("dispatch", "pull"):
        # Four movers, whose 16 warps fill a multiprocessor's registers and shared memory: there is one block on it.
        assert found["resources"]["registers"] <= 128
        assert 232_448 // 2 < found["resources"]["shared_memory_bytes"] <= 232_448
        # Of a thread of each mover in a tile, and as many stores for NaN.
        assert len(re.findall(ASYNCHRONOUS_COPY, ptx)) == 4 * 8
        assert not re.search(r"cp\.async\.ca|cp\.async\.cg.*, 0x[48],", ptx)
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2 * 4 * 8
    if name == "dispatch":
        # Each mover's first thread, which is the one that adds, and not the block's.
        fences = re.findall(
            r"and\.b32 thread, thread, 127;\s+setp\.eq\.u32 first, thread, 0;\s+@first fence\.proxy", ptx
        )
        assert len(fences) == 4
        fence, release = ptx.rindex("@first fence.proxy.async"), ptx.rindex("gpu.release.add")
        assert ptx.rindex("bar.sync", 0, fence) < fence < release
        if version == INSTALLED:  # Triton 3.9 has a barrier of its own there
            assert "bar.sync" not in ptx[fence:release]
    if name == "pull" or (name.startswith("combine") and "behind" not in name):
        assert "ld.acquire.sys.global.b32" in ptx
        assert "st.release.sys.global.b32" in ptx  # where a wait fails
    if name == "combine":
        assert len(re.findall(WIDE_LOAD, ptx)) == 2 * 8  # unrolled, 16 columns a thread
    if name.startswith(("GEMM behind", "GEMM with movers")):
        assert "ld.acquire.gpu.global.b32" in ptx
    if name.startswith("GEMM"):
        resources = found["resources"]
        assert resources["shared_memory_bytes"] <= 232_448
        assert 0 < resources["wgmma_groups"] == resources["products"] < resources["wgmma"]
    if name.startswith("GEMM with movers"):
        assert re.search(ASYNCHRONOUS_COPY, ptx)  # 16 bytes, or zeros
        assert not re.search(r"cp\.async\.ca|cp\.async\.cg.*, 0x[48],", ptx)
        assert "gpu.release.add" in ptx
    if name == "GEMM with destination":
        # 16 bytes of a lane: four pieces of four rows by each of two consumers.
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2 * 4 * 4
        assert "cp.async.bulk.tensor.2d.global" not in ptx
    if name.startswith("GEMM with source"):
        assert len(re.findall(ASYNCHRONOUS_COPY, ptx)) == 8
        assert not re.search(r"cp\.async\.ca|cp\.async\.cg.*, 0x[48],", ptx)
    if name == "GEMM in front of combine":
        assert ptx.index("atom.global.gpu.acq_rel.add") < ptx.index("fence.acq_rel.sys") < ptx.index("st.release.sys")
