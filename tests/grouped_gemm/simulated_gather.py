"""The role that gathers, in words of the simulator, which knows neither asynchronous copies of a warp's own nor
addresses of numbers: copies are loads and stores here, and what stands for an address is a row's first element in the
one buffer, the first of the source's tensors, plus eight, in bytes."""

from triton.runtime.jit import JITFunction

from tests.simulator.plain_copies import copy_at_once, no_group, nothing_to_wait_for
from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm import crew_gather, kernel_grouped_gemm

FIRST_ADDRESS = 16


@gluon.jit
def pointers_into_one_buffer(address, pointers):
    return pointers.source[0] + (gl.maximum(address, 16) // 2 - 8)


def install(monkeypatch):
    monkeypatch.setattr(crew_gather, "pointers_of", pointers_into_one_buffer)
    monkeypatch.setattr(crew_gather, "async_copy_to_shared", copy_at_once)
    monkeypatch.setattr(crew_gather, "commit_copies", no_group)
    monkeypatch.setattr(crew_gather, "wait_for_copies", nothing_to_wait_for)
    # Triton keeps what a function is cached under: it must not be that of other words, here or in tests behind these.
    for function in (kernel_grouped_gemm.grouped_gemm_kernel, *vars(crew_gather).values()):
        if isinstance(function, JITFunction):
            monkeypatch.setattr(function, "hash", None)
