"""Device functions of the gates: `wait(row_block, num_rows, tensors)`, called by the load role (see hooks.Gate)."""

from tilecrew.device.compat import gl, gluon
from tilecrew.device.signal import fence_proxy_async, load_acquire, nanoseconds, trap
from tilecrew.grouped_gemm.schedule import BAND, ROW_BLOCK

BAND_BLOCKS = gl.constexpr(BAND)
BLOCK_ROWS = gl.constexpr(ROW_BLOCK)


@gluon.jit
def no_gate(row_block, num_rows, tensors):
    pass


@gluon.jit
def brings_nothing():
    """In the place of a mover, or of a source, in kernels without."""
    pass


@gluon.jit
def count_gate(row_block, num_rows, tensors):
    """tensors: counters, and the longest wait in nanoseconds."""
    counter = tensors[0] + row_block
    count = load_acquire(counter, "gpu")
    start = nanoseconds()
    while count < num_rows:
        if nanoseconds() - start > tensors[1]:
            trap()
        count = load_acquire(counter, "gpu")
    # The rows came by ordinary stores or by copies of others; TMA reads them through the asynchronous proxy.
    fence_proxy_async()


@gluon.jit
def band_gate(row_block, num_rows, tensors):
    """tensors: counters, the longest wait in nanoseconds, offs, their number."""
    counters, timeout, offs, num_groups = tensors
    end = gl.load(offs + num_groups - 1)
    number = gl.arange(0, BAND_BLOCKS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    block = gl.minimum(row_block // BAND_BLOCKS * BAND_BLOCKS + number, gl.cdiv(end, BLOCK_ROWS) - 1)
    expected = gl.minimum(end - block * BLOCK_ROWS, BLOCK_ROWS)
    missing = gl.max(expected - load_acquire(counters + block, "gpu"), 0)
    start = nanoseconds()
    while missing > 0:
        if nanoseconds() - start > timeout:
            trap()
        missing = gl.max(expected - load_acquire(counters + block, "gpu"), 0)
    fence_proxy_async()  # as above
