"""The versions of Triton that tests run with: the installed one, and those that `make test` unpacks under .triton/.

A process has one version of Triton: PYTHONPATH chooses it, and each has a cache of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALLED = "installed"
# Folders, named after the version in them.
OTHER_VERSIONS = sorted(path.parent.name for path in (ROOT / ".triton").glob("*/triton"))
VERSIONS = [INSTALLED, *OTHER_VERSIONS]
LONGEST_SECONDS = 1800


def start(version: str, cache: Path, *arguments: str) -> subprocess.Popen:
    """`python -m arguments` with that version."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    if version != INSTALLED:
        paths = [str(ROOT / ".triton" / version), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(version: str, child: subprocess.Popen) -> str:
    """What it printed, when it has ended; an AssertionError with its errors where it failed or takes too long."""
    try:
        output, errors = child.communicate(timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        raise AssertionError(f"triton {version}: not done after {LONGEST_SECONDS} s") from None
    assert child.returncode == 0, f"triton {version}:\n{errors}"
    return output


def cases(names: Iterable[str], few: Iterable[str]) -> list[tuple[str, str]]:
    """(name, version): every name with the installed version, a few with each of the others."""
    return [(name, INSTALLED) for name in names] + [(name, version) for name in few for version in OTHER_VERSIONS]


def report_of_each(make_folder, *arguments: str) -> dict:
    """Version -> the JSON that `python -m arguments` printed."""
    return {version: json.loads(output) for version, output in output_of_each(make_folder, *arguments).items()}


def output_of_each(make_folder, *arguments: str, others: tuple[str, ...] = ()) -> dict[str, str]:
    """Version -> what `python -m arguments` printed, all at once. make_folder: pytest's tmp_path_factory.mktemp.

    others: arguments more for all but the installed version.
    """
    children = {
        version: start(version, make_folder("cache"), *arguments, *(() if version == INSTALLED else others))
        for version in VERSIONS
    }
    try:
        return {version: output_of(version, child) for version, child in children.items()}
    finally:
        for child in children.values():
            child.kill()
