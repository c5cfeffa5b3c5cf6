"""The programs in examples/ and the Python in README.md run as they are printed."""

import re
import runpy
from pathlib import Path

import pytest

from tests.integrations.conftest import imported_fla, switched_off  # noqa: F401

ROOT = Path(__file__).parent.parent
NEEDS = {"flash_linear_attention.py": "fla", "qwen3_next.py": "transformers"}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 3


def test_python_in_the_readme(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("fla")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["state"].shape == (1, 4, 128, 128)
    assert re.match(r"(chunked|portable|roles|scan), V block", capsys.readouterr().out)


def test_documents_link_to_files_that_exist():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
