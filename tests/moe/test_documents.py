"""The Python in docs/moe.md runs as it is printed, and its results are right."""

import re
from pathlib import Path

import torch

from tilecrew.moe import reference

ROOT = Path(__file__).parents[2]


def test_python_of_the_page():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "moe.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names, outputs = {}, []
    for block in blocks:
        exec(compile(block, "moe.md", "exec"), names)
        outputs.append(names["out"])
    routes = [names[name] for name in ("x", "topk_ids", "topk_weights")]
    wanted = reference.moe(*routes, names["gate"], names["up"], names["w_down"])
    torch.testing.assert_close(outputs[0], wanted, rtol=1e-4, atol=1e-4)
    gate, up = names["gate_up_proj"].transpose(1, 2).chunk(2, -1)
    wanted = reference.moe(*routes, gate, up, names["down_proj"].transpose(1, 2))
    torch.testing.assert_close(outputs[1], wanted, rtol=1e-4, atol=1e-4)


def test_pages_link_to_files_that_exist():
    path = ROOT / "tilecrew" / "moe" / "README.md"
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
