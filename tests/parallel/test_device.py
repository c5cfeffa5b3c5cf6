"""The kernels of tilecrew.parallel compile for sm_90 with every Triton, without spills, into the loads meant."""

import re

import pytest

from tests.interpreter import run_interpreted

pytest.importorskip("triton")
from tests.parallel.device_launches import LAUNCHES
from tests.tritons import INSTALLED, VERSIONS, report_of_each


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what device_launches printed."""
    return report_of_each(tmp_path_factory.mktemp, "tests.parallel.device_launches")


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
    if name in ("barrier", "notify", "put", "GEMM that notifies owners"):
        assert "st.release.sys.global.b32" in ptx
    if name in ("barrier", "wait", "reduce"):
        assert "ld.acquire.sys.global.b32" in ptx
        assert "%globaltimer" in ptx
    if name in ("pull", "reduce", "copy"):
        # 16 bytes at a time, never through the L1 cache.
        assert re.search(r"ld\.global\.cg\.v4\.b32", ptx)
        assert not re.search(r"ld\.global\.(v4|cg\.b16|nc)", ptx)
    if name == "pull":
        fence, release = ptx.rindex("fence.proxy.async"), ptx.rindex("gpu.release.add")
        assert fence < ptx.rindex("bar.sync", 0, release)


@pytest.mark.slow
@pytest.mark.interpreter
def test_kernels_under_the_interpreter():
    run_interpreted("parallel/interpreted_kernels.py")
