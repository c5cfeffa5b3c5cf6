"""Device functions of the gates: `wait(row_block, num_rows, tensors)`, called by the load role (see hooks.Gate)."""

from tilecrew.device.compat import gl, gluon


@gluon.jit
def no_gate(row_block, num_rows, tensors):
    pass


@gluon.jit
def count_gate(row_block, num_rows, tensors):
    """tensors: counters, and the longest wait in nanoseconds."""
    counter = tensors[0] + row_block
    count = load_acquire(counter)
    start = nanoseconds()
    while count < num_rows:
        if nanoseconds() - start > tensors[1]:
            gl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        count = load_acquire(counter)
    # The rows came by ordinary stores or by copies of others; TMA reads them through the asynchronous proxy.
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def nanoseconds():
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
