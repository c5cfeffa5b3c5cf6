"""Kernels that use every function of device/signal.py, in Gluon and in plain Triton, compiled for sm_90 without a GPU:
`python -m tests.device.signal_launches` prints {"triton": version, "ptx": {name: PTX, or the error's traceback}}."""

import json
import sys
import traceback

import torch
import triton
import triton.language as tl

from tilecrew.device import aot, signal
from tilecrew.device.compat import barrier, gl, gluon
from tilecrew.device.launch import Launch


@triton.jit
def plain_kernel(flags, out, target, timeout, SCOPE: tl.constexpr):
    status, seen = signal.wait_until_reached(flags, target, flags + 1, timeout, SCOPE)
    signal.fence(SCOPE)
    tl.store(out, seen)
    tl.debug_barrier()
    before = signal.add_acquire_release(flags + 2, 1, SCOPE)
    if before == 3:
        signal.store_release(flags + 3, target, SCOPE)
    signal.add_release(flags + 4, 1, SCOPE)
    if status != signal.REACHED:
        signal.trap()


@gluon.jit
def worker_role(flags, out, target, timeout, SCOPE: gl.constexpr):
    status, seen = signal.wait_until_reached(flags, target, flags + 1, timeout, SCOPE)
    signal.fence_proxy_async()
    barrier()
    gl.store(out, seen + status)
    barrier()
    before = signal.add_acquire_release(flags + 2, 1, SCOPE)
    if before == 3:
        signal.store_release(flags + 3, target, SCOPE)


@gluon.jit
def other_role(flags, SCOPE: gl.constexpr):
    signal.add_release(flags + 4, 1, SCOPE)


@gluon.jit
def role_kernel(flags, out, target, timeout, SCOPE: gl.constexpr):
    gl.warp_specialize(
        [(other_role, (flags, SCOPE)), (worker_role, (flags, out, target, timeout, SCOPE))],
        [1],
        [40],
    )


LAUNCHES = {
    f"{kind}, {scope}, {num_warps} warps": (kernel, scope, num_warps)
    for kind, kernel in (("plain", plain_kernel), ("roles", role_kernel))
    for scope in ("gpu", "sys")
    for num_warps in ((1, 4) if kind == "plain" else (4,))
}


def main() -> None:
    flags = torch.zeros(8, dtype=torch.int32)
    ptx = {}
    for name, (kernel, scope, num_warps) in LAUNCHES.items():
        try:
            launch = Launch(kernel, 1, (flags, flags, 7, 10**9, scope), {"num_warps": num_warps})
            ptx[name] = aot.compile_launch(launch).asm["ptx"]
        except Exception:  # the test of this launch shows it; those of the others still run
            ptx[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "ptx": ptx}, sys.stdout)


if __name__ == "__main__":
    main()
