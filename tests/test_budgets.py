"""Rules of the sources that no linter knows: sizes, what may import what, what importing the package must not touch."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("tilecrew", "bench", "tests", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 12
PARALLEL = ROOT / "tilecrew" / "parallel"
MOE = ROOT / "tilecrew" / "moe"
FAMILIES = [ROOT / "tilecrew" / name for name in ("gated_delta_rule", "grouped_gemm")]
# Modules of each family that import no kernel language: mathematics, choices, and what a caller holds in his hands.
PLAIN_STEMS = {
    "gated_delta_rule": ("reference", "schedule", "gates", "chunked", "recurrent", "arguments"),
    "grouped_gemm": ("reference", "schedule", "hooks", "checks"),
}
# Modules that launch kernels, and import them where they do.
LAUNCHING_STEMS = {
    "gated_delta_rule": ("api", "operators", "recurrent_operators"),
    "grouped_gemm": ("api", "operators", "hooks"),
}


def modules_of(stems):
    return [family / f"{stem}.py" for family in FAMILIES for stem in stems[family.name]]


def family_of(path):
    return next((family for family in FAMILIES if path.is_relative_to(family)), None)


# Functions that may have more parameters, and why.
MANY_PARAMETERS = {
    "tilecrew/gated_delta_rule/api.py:chunk_gated_delta_rule": "keeps flash-linear-attention's signature",
    "tilecrew/gated_delta_rule/api.py:fused_recurrent_gated_delta_rule": "keeps flash-linear-attention's signature",
    "tilecrew/testing.py:random_arguments": "each optional keyword is one property of the problem",
}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def tree_of(path):
    return ast.parse(path.read_text(), filename=str(path))


def functions_of(path):
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def num_parameters(function):
    parameters = function.args
    named = (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)
    return len(named) + (parameters.vararg is not None) + (parameters.kwarg is not None)


def num_lines(function):
    """Of the function without its docstring, which may be as long as what it explains."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def imports_of(path, at_module_level_only=False):
    tree = tree_of(path)
    nodes = tree.body if at_module_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_triton(path):
    return any(name.split(".")[0] == "triton" or name.startswith("tilecrew.device") for name in imports_of(path))


def is_device_code(path):
    in_family = family_of(path) is not None or path.is_relative_to(PARALLEL) or path.is_relative_to(MOE)
    return path.is_relative_to(ROOT / "tilecrew" / "device") or (in_family and imports_triton(path))


def test_there_are_sources():
    for family in FAMILIES:
        assert family / "api.py" in FILES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for function in functions_of(path):
        assert num_lines(function) <= MAX_FUNCTION_LINES, function.name
        if f"{name_of(path)}:{function.name}" not in MANY_PARAMETERS:
            assert num_parameters(function) <= MAX_PARAMETERS, function.name


def test_exceptions_are_needed():
    for exception in MANY_PARAMETERS:
        file, name = exception.split(":")
        (function,) = (function for function in functions_of(ROOT / file) if function.name == name)
        assert num_parameters(function) > MAX_PARAMETERS


def test_one_module_knows_the_versions_of_triton():
    importing = [name_of(path) for path in FILES if any("triton.experimental" in name for name in imports_of(path))]
    assert importing == ["tilecrew/device/compat.py"]


def test_device_code_keeps_its_annotations():
    """Triton reads annotations at run time; `from __future__ import annotations` would make strings of them."""
    device_files = [path for path in FILES if is_device_code(path)]
    for family in FAMILIES:
        assert family / "kernel_portable.py" in device_files
    assert {MOE / "kernel_rows.py", MOE / "crew_mover.py"} <= set(device_files)
    for path in device_files:
        assert "__future__.annotations" not in imports_of(path), name_of(path)


@pytest.mark.parametrize("path", modules_of(PLAIN_STEMS), ids=name_of)
def test_mathematics_and_schedules_import_no_kernel_language(path):
    assert not imports_triton(path)
    assert not any(".kernel_" in name for name in imports_of(path, at_module_level_only=path.stem == "hooks"))


@pytest.mark.parametrize("path", modules_of(LAUNCHING_STEMS), ids=name_of)
def test_kernels_are_imported_where_they_are_launched(path):
    assert not any(".kernel_" in name for name in imports_of(path, at_module_level_only=True))
    assert any("kernel_" in line for line in path.read_text().splitlines()) or path.stem == "api"


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_schedules_import_no_torch(family):
    assert not any(name.split(".")[0] == "torch" for name in imports_of(family / "schedule.py"))


def test_families_do_not_know_each_other():
    for path in FILES:
        family = family_of(path)
        for other in FAMILIES if family is not None else ():
            if other != family:
                assert not any(name.startswith(f"tilecrew.{other.name}") for name in imports_of(path)), name_of(path)


@pytest.mark.parametrize("path", sorted(MOE.glob("*.py")), ids=name_of)
def test_mixture_of_experts_imports_kernels_where_they_are_launched(path):
    if path.stem.startswith(("kernel_", "crew_")):
        return
    assert not imports_triton(path)
    assert not any(".kernel_" in name for name in imports_of(path))


def test_routing_and_reference_import_no_layer():
    """The twin of the tables and the truth of the tests stand below what they judge."""
    for stem in ("routing", "reference"):
        imported = {name for name in imports_of(MOE / f"{stem}.py") if name.startswith("tilecrew.")}
        assert all(name.startswith(("tilecrew._", "tilecrew.moe.routing")) for name in imported), stem


def test_only_device_modules_and_kernels_import_device_code():
    device_stems = ("kernel_", "crew_", "chunk_")
    for path in FILES:
        in_family = family_of(path) is not None or path.is_relative_to(MOE)
        if in_family and any(name.startswith("tilecrew.device") for name in imports_of(path)):
            assert path.stem.startswith(device_stems), name_of(path)


def test_only_kernels_of_parallel_know_the_kernel_language():
    files = sorted(PARALLEL.glob("*.py"))
    kernels = [path for path in files if path.stem.startswith("kernel_")]
    assert [path.stem for path in kernels if not is_device_code(path)] == []
    assert len(kernels) >= 4
    for path in set(files) - set(kernels):
        assert not imports_triton(path), name_of(path)
        assert not any(".kernel_" in name for name in imports_of(path)), name_of(path)


def test_families_and_device_code_do_not_know_of_parallel():
    """tilecrew.parallel is built on the grouped GEMM and its hooks, not the other way round."""
    for path in FILES:
        if family_of(path) is not None or path.is_relative_to(ROOT / "tilecrew" / "device"):
            assert not any(name.startswith("tilecrew.parallel") for name in imports_of(path)), name_of(path)


def test_importing_loads_no_triton_and_starts_no_gpu():
    program = (
        "import torch\n"
        "before = set(__import__('sys').modules)\n"
        "import tilecrew, tilecrew.parallel, sys\n"
        "loaded = set(sys.modules) - before\n"
        "assert not any(name.split('.')[0] in ('triton', 'transformers', 'fla') for name in loaded), loaded\n"
        "assert not any('.kernel_' in name or name.startswith('tilecrew.device') for name in loaded), loaded\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=300)
