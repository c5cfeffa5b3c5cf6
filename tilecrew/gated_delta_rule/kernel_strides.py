"""How the kernels in plain Triton find a row of a strided input."""

import torch
import triton
import triton.language as tl


def leading_strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of the first three dimensions, for `offset_of`.

    0 where a dimension has one element: its stride may be anything, and would only make the compiler see one more case.
    """
    if x is None:
        return (0, 0, 0)
    batch, token, head = (0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return (batch, token, head)


@triton.jit
def offset_of(stride, batch, token, head):
    """Elements before [batch, token, head], in 64 bits: an input may span more than 2**31 elements."""
    zero = tl.zeros([], tl.int64)
    return (zero + batch) * stride[0] + (zero + token) * stride[1] + (zero + head) * stride[2]
