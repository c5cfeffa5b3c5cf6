"""The Hopper grouped GEMM compiles for sm_90 without spills, with MMAs in flight, and into the shared memory that its
schedule counts on; with the installed Triton and with those under .triton/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.grouped_gemm.gluon_launches import LAUNCHES

ROOT = Path(__file__).parents[2]
# Folders that `make test` unpacks, named after the version in them.
OTHER_VERSIONS = sorted(path.parent.name for path in (ROOT / ".triton").glob("*/triton"))
INSTALLED = "installed"
SHARED_MEMORY_OF_A_BLOCK = 232_448  # bytes, compute capability 9.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Version -> what gluon_launches printed. One process a version, all at once, each with a cache of its own."""
    children = {}
    for version in (INSTALLED, *OTHER_VERSIONS):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
        environment.pop("TRITON_INTERPRET", None)
        if version != INSTALLED:
            paths = [str(ROOT / ".triton" / version), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        children[version] = subprocess.Popen(
            [sys.executable, "-m", "tests.grouped_gemm.gluon_launches"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    reports = {}
    for version, child in children.items():
        output, errors = child.communicate()
        assert child.returncode == 0, f"triton {version}:\n{errors}"
        reports[version] = json.loads(output)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("version", [INSTALLED, *OTHER_VERSIONS])
@pytest.mark.parametrize("name", LAUNCHES)
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
