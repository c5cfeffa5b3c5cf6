"""Device functions of the gates: `wait(row_block, num_rows, tensors)`, called by the load role (see hooks.Gate)."""

from tilecrew.device.compat import gluon
from tilecrew.device.signal import fence_proxy_async, load_acquire, nanoseconds, trap


@gluon.jit
def no_gate(row_block, num_rows, tensors):
    pass


@gluon.jit
def no_mover(slots, tensors):
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
