"""The flags compile for sm_90, in Gluon and in plain Triton, into the instructions meant, with every Triton."""

import json
import re

import pytest

pytest.importorskip("triton")
from tests.device.signal_launches import LAUNCHES
from tests.tritons import INSTALLED, VERSIONS, output_of_each


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what signal_launches printed."""
    outputs = output_of_each(tmp_path_factory.mktemp, "tests.device.signal_launches")
    return {version: json.loads(output) for version, output in outputs.items()}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_to_the_instructions_meant(name, version, reports):
    assert version in (INSTALLED, reports[version]["triton"])
    ptx = reports[version]["ptx"][name]
    scope = LAUNCHES[name][1]
    assert ".version" in ptx, ptx
    assert f"ld.acquire.{scope}.global.b32" in ptx
    assert "ld.acquire.sys.global.b32" in ptx  # the abort cell
    assert f"st.release.{scope}.global.b32" in ptx
    assert re.search(rf"@%p\d+ atom\.global\.{scope}\.acq_rel\.add", ptx)  # by one thread
    assert re.search(rf"@%p\d+ (atom|red)\.global\.{scope}\.release\.add", ptx)
    assert "%globaltimer" in ptx
    if name.startswith("plain"):
        assert f"fence.acq_rel.{scope}" in ptx
    else:
        assert "fence.proxy.async" in ptx


def test_an_unknown_scope_is_refused():
    import torch
    from triton.compiler.errors import CompilationError

    from tests.device.signal_launches import plain_kernel
    from tilecrew.device import aot
    from tilecrew.device.launch import Launch

    flags = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(CompilationError) as error:
        aot.compile_launch(Launch(plain_kernel, 1, (flags, flags, 7, 10**9, "cluster"), {"num_warps": 1}))
    assert "SCOPE must be 'gpu' or 'sys'" in str(error.value.__cause__.__cause__ or error.value.__cause__)
