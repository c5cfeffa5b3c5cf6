"""The one place that knows the versions of Triton (3.6 to 3.9): every other module imports the kernel language from
here.

Names that moved between versions:
    aggregate   3.6 private in `triton.language.core`, public from 3.8 on
    barrier     3.6 `gl.thread_barrier`, from 3.8 on `gl.barrier`: all threads of the calling role
    tma_load    3.6 and 3.8 `tma.async_copy_global_to_shared`, 3.9 `tma.async_load`
    reinterpret 3.6 and 3.8 a private method of shared-memory descriptors, public in 3.9
    async_copy_to_shared    3.6 `async_copy.async_copy_global_to_shared`, from 3.8 on `async_copy.async_load`
    tma_store   3.6 and 3.8 `tma.async_copy_shared_to_global`, 3.9 `tma.async_store`
"""

import triton
from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource as GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as _tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language.core import builtin as builtin

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])

if hasattr(gluon, "aggregate"):
    aggregate = gluon.aggregate
else:
    from triton.language.core import _aggregate as aggregate  # noqa: F401  (re-exported)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = _tma.async_load if hasattr(_tma, "async_load") else _tma.async_copy_global_to_shared
tma_store = _tma.async_store if hasattr(_tma, "async_store") else _tma.async_copy_shared_to_global
tma_store_wait = _tma.store_wait
if hasattr(_async_copy, "async_load"):
    async_copy_to_shared = _async_copy.async_load
else:
    async_copy_to_shared = _async_copy.async_copy_global_to_shared
commit_copies = _async_copy.commit_group
wait_for_copies = _async_copy.wait_group

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return tile.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return tile._reinterpret(dtype, shape, layout)
