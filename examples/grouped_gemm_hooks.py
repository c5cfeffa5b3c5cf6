"""A gate, an epilogue and a notification of one's own for the grouped GEMM, each with its twin in torch.

On a GPU of compute capability 9.0 or 12.x the device halves run inside the kernel, elsewhere the twins do.

python examples/grouped_gemm_hooks.py
"""

import torch

import tilecrew
from tilecrew.device.compat import gl, gluon
from tilecrew.device.signal import fence_proxy_async, load_acquire, nanoseconds, trap
from tilecrew.grouped_gemm import Epilogue, Gate, max_row_blocks
from tilecrew.grouped_gemm.kernel_epilogues import is_last_call

LONGEST_WAIT = 10_000_000_000  # nanoseconds


class RowsReady(Gate):
    """Holds a tile back until ready[row_block] is not 0. ready: int32, set with release semantics at gpu scope."""

    def __init__(self, ready):
        self.ready = ready

    @property
    def tensors(self):
        return self.ready, LONGEST_WAIT

    @gluon.jit
    def wait(row_block, num_rows, tensors):
        ready, longest_wait = tensors
        start = nanoseconds()
        while load_acquire(ready + row_block, "gpu") == 0:
            if nanoseconds() - start > longest_wait:
                trap()
        fence_proxy_async()  # others wrote the rows, and TMA reads them

    def check(self, num_rows_of_blocks):
        for block in range(len(num_rows_of_blocks)):
            if self.ready[block] == 0:
                raise RuntimeError(f"row block {block} is not ready, and nothing can bring it")


class SquaredReLU(Epilogue):
    """scale[group] * max(x, 0)^2; done[row_block] becomes 1 when all columns of a row block are in global memory."""

    def __init__(self, scale, done):
        self.scale, self.done = scale, done  # [E] float32, [row blocks] int32
        self.arrivals = torch.zeros_like(done)

    @property
    def tensors(self):
        return (self.scale,)

    @gluon.jit
    def apply(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
        positive = gl.maximum(accumulator, 0.0)
        return gl.load(tensors[0] + group) * positive * positive

    def reference(self, accumulator, groups):
        return self.scale[groups, None] * accumulator.relu().square()

    @property
    def landed_tensors(self):
        return self.done, self.arrivals

    @gluon.jit
    def landed(row_block, column_block, num_rows, num_calls, tensors):
        done, arrivals = tensors
        if is_last_call(arrivals + row_block, num_calls):
            gl.atomic_xchg(done + row_block, 1, sem="release", scope="gpu")

    def landed_reference(self, num_rows_of_blocks):
        self.done[: len(num_rows_of_blocks)] = 1


has_roles = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 12)
device, dtype = ("cuda", torch.bfloat16) if has_roles else ("cpu", torch.float32)
num_groups, num_inner, num_columns = 4, 128, 256
offs = torch.tensor([300, 300, 450, 512], dtype=torch.int32, device=device)
x = torch.randn(512, num_inner, device=device, dtype=dtype)
w = torch.randn(num_groups, num_inner, num_columns, device=device, dtype=dtype) / num_inner**0.5

ready, done = torch.zeros(2, max_row_blocks(512, num_groups), dtype=torch.int32, device=device).unbind()
epilogue = SquaredReLU(torch.rand(num_groups, device=device), done)
ready.fill_(1)  # here all at once; a kernel that runs beside this one would set them as rows come
out = tilecrew.grouped_gemm(x, w, offs, gate=RowsReady(ready), epilogue=epilogue)

wanted = torch.empty(512, num_columns, dtype=torch.float64)
for group, (begin, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
    products = x[begin:end].double().cpu() @ w[group].double().cpu()
    wanted[begin:end] = float(epilogue.scale[group]) * products.relu().square()
error = float((out.double().cpu() - wanted).norm() / wanted.norm())
print(tilecrew.explain_grouped_gemm(x, w, offs, gate=RowsReady(ready), epilogue=epilogue))
print("row blocks done:", done.tolist(), "of 300, 0, 150 and 62 rows in blocks of 128")
print(f"relative error: {error:.1e}")
if error > 1e-2 or done.tolist() != [1] * 6 + [0] * (len(done) - 6):
    raise SystemExit("the hooks did not do what they should")
