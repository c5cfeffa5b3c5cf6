"""The watchdog of tests with ranks, on the CPU: it says where host and ranks are, and ends the process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import watchdog

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tilecrew.moe.workspace import MoESizes, MoEWorkspace
from tilecrew.parallel import World, host_signal, on_every_rank
from tilecrew.parallel.control import Record

HANGS = """
import time
from tests.watchdog import watch
from tilecrew.moe.workspace import MoESizes, MoEWorkspace
from tilecrew.parallel import World, on_every_rank
import torch
worlds = World.emulated(2, device="cpu")
on_every_rank(worlds, MoEWorkspace, MoESizes(4, 2, 4, 16, 8, torch.bfloat16))
worlds[1].workspaces[MoESizes(4, 2, 4, 16, 8, torch.bfloat16)].epoch.fill_(17)
with watch(worlds, "the case", seconds=0.5):
    time.sleep(60)
"""


def test_a_hang_is_described_and_ended():
    child = subprocess.run(
        [sys.executable, "-c", HANGS],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == watchdog.EXIT_CODE
    assert "the case has not ended after 0.5 s" in child.stderr
    assert 'File "<string>", line 11 in <module>' in child.stderr
    assert "rank 1: epoch of capacity 4, K = 2, E = 4, H = 16, I = 8, torch.bfloat16: [17]" in child.stderr


def test_flags_are_those_of_now():
    worlds = World.emulated(2, device="cpu", first_epoch=5)
    sizes = MoESizes(4, 2, 4, 16, 8, torch.bfloat16)
    on_every_rank(worlds, MoEWorkspace, sizes)
    flags = watchdog.Flags(worlds)
    assert "rank 0: abort 0, barriers passed 5, barrier slots [5, 5], failed waits" in flags.lines()[0]
    on_every_rank(worlds, World.barrier)
    worlds[1].workspaces[sizes].counters[0] = 128
    host_signal.publish(worlds[0], Record(3, 1, 9, 8))
    lines = flags.lines()
    assert lines[0].startswith("rank 0: abort 1, barriers passed 6, barrier slots [6, 6]")
    assert lines[0].endswith("{0: [3, 1, 9, 8]}")
    assert any(line.startswith("rank 1: counters") and "[128, 0" in line for line in lines)


def test_what_ends_in_time_is_left_alone():
    worlds = World.emulated(1, device="cpu")
    ended = []
    with watchdog.watch(worlds, "nothing", seconds=60, end=ended.append):
        pass
    assert not ended
