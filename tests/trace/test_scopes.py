"""Scopes in a kernel with roles: under Proton's instrumentation they are compiled, without it nothing is."""

import pytest

pytest.importorskip("triton.profiler.language")

from tests.trace.instrumented import instrumentation, scopes_of
from tilecrew.device.aot import compile_launch
from tilecrew.device.compat import TRITON_VERSION, gl, gluon
from tilecrew.device.handoff import Handoff
from tilecrew.device.launch import Launch
from tilecrew.device.trace import switch_scope
from tilecrew.trace import run


@gluon.jit
def reading_role(tile, num_chunks, name: gl.constexpr):
    for i in range(num_chunks):
        switch_scope(name, None, "wait ready")
        tile.wait(i)
        switch_scope(name, "wait ready", "work")
        tile.release()
        switch_scope(name, "work", None)


@gluon.jit
def writing_role(tile, num_chunks):
    for i in range(num_chunks):
        tile.acquire(i)
        switch_scope("writing", None, "out [-1]")
        tile.publish()
        switch_scope("writing", "out [-1]", None)


@gluon.jit
def roles_kernel(num_chunks):
    tile = Handoff.create(2)
    gl.warp_specialize(
        [
            (reading_role, (tile, num_chunks, "first")),
            (reading_role, (tile, num_chunks, "second")),
            (writing_role, (tile, num_chunks)),
        ],
        [4, 1],
        [48, 48],
    )


LAUNCH = Launch(roles_kernel, 1, (7,), {"num_warps": 4})


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="the pinned version; Proton's inner interfaces change")
def test_scopes_are_compiled_under_instrumentation_only():
    plain = compile_launch(LAUNCH)
    with instrumentation(run.profile_mode(plain.metadata.num_warps, 64)):
        traced = compile_launch(LAUNCH)
    assert scopes_of(traced) == {
        *(f"{role}: {stage}" for role in ("first", "second") for stage in ("wait ready", "work")),
        "writing: out [-1]",
    }
    assert traced.metadata.profile_scratch_size > plain.metadata.num_warps * 64 * run.RECORD_BYTES_PER_CHUNK
    assert traced.metadata.shared == plain.metadata.shared  # records go to global memory
    for compiled in (plain, compile_launch(LAUNCH)):  # before a session, and behind one
        assert scopes_of(compiled) == set()
        assert compiled.metadata.profile_scratch_size == 0
