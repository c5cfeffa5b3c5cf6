"""What aot reads from a disassembly: loops, wherever the compiler has put their parts."""

import pytest
import torch

pytest.importorskip("triton")
from tilecrew.device import aot
from tilecrew.device.compat import barrier, gl, gluon, mbarrier
from tilecrew.device.launch import Launch
from tilecrew.device.mma import vector_layout

DISPATCH = """\
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDL R0, [R1] ;
        /*0020*/                   BRX R2 -0x30                  (*"BRANCH_TARGETS .L_x_1,.L_x_9"*);
.L_x_1:
        /*0030*/                   MOV R4, RZ ;
.L_x_2:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4 ;
        /*0050*/              @!P1 BRA `(.L_x_7) ;
.L_x_3:
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
        /*0080*/                   STL [R1+0x4], R24 ;
        /*0090*/                   BRA `(.L_x_0) ;
.L_x_7:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4 ;
        /*00b0*/              @!P1 BRA `(.L_x_7) ;
        /*00c0*/                   BRA `(.L_x_3) ;
.L_x_9:
        /*00d0*/                   EXIT ;
.L_x_10:
        /*00e0*/                   BRA `(.L_x_10);
"""


def opcodes(loop):
    return [next(word for word in text.split() if word[0] not in "@!") for text in loop]


def test_a_loop_has_the_parts_that_lie_behind_it():
    """The retry of a wait lies behind the role and jumps back, over what follows the loop; the dispatch is no loop."""
    wait, last = (opcodes(loop) for loop in aot.loops(DISPATCH))
    assert wait[:4] == ["SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "HGMMA.64x64x16.F32.BF16", "BRA"]
    assert wait[4:] == ["SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "BRA"]
    assert last == ["BRA"]


def test_a_spill_in_the_loop_is_in_it():
    spilling = DISPATCH.replace("MOV R4, RZ ;\n.L_x_2:", "MOV R4, RZ ;\n.L_x_2:\n /*0038*/ LDL R5, [R1+0x8] ;")
    assert any("LDL" in text for text in aot.loops(spilling)[0])
    assert not any("LDL" in text or "STL" in text for loop in aot.loops(DISPATCH) for text in loop)


@gluon.jit
def waits_and_stores(out, KEEP: gl.constexpr, num_warps: gl.constexpr):
    """A barrier, and a tile of which only one use lies before the barrier's last."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, 128, layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.arrive(landed, count=1)
    mbarrier.wait(landed, 0)
    barrier()
    tile = gl.allocate_shared_memory(gl.float32, [128], vector_layout())
    tile.store(index.to(gl.float32))
    barrier()
    gl.store(out + index, tile.load(layout))
    if KEEP:
        landed._keep_alive()


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_of_a_barrier_given_to_a_tile(keeps):
    compiled = aot.compile_launch(Launch(waits_and_stores, 1, (torch.zeros(128), keeps), {"num_warps": 4}))
    assert aot.overlaid_barriers(compiled) == (0 if keeps else 1)
