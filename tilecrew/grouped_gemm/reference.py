"""The grouped GEMM in plain torch, one group after the other: any device and dtype. Tests give it float64."""

import torch

from tilecrew.grouped_gemm.hooks import Epilogue


def grouped_gemm(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, epilogue: Epilogue | None = None
) -> torch.Tensor:
    """x [M, K], w [E, K, N], offs [E] -> [M, N / shrink] in the dtype of x; zeros behind the last offset."""
    accumulator = x.new_zeros(x.shape[0], w.shape[2])
    for group, (begin, end) in enumerate(bounds(offs)):
        accumulator[begin:end] = x[begin:end] @ w[group]
    if epilogue is None:
        return accumulator
    return apply_epilogue(epilogue, accumulator, offs, w.shape[0])


def weight_gradient(x: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [M, K], dy [M, N] -> [E, K, N]: the products x^T dy of each group; zeros for an empty one."""
    result = x.new_zeros(offs.shape[0], x.shape[1], dy.shape[1])
    for group, (begin, end) in enumerate(bounds(offs)):
        result[group] = x[begin:end].T @ dy[begin:end]
    return result


def bounds(offs: torch.Tensor) -> list[tuple[int, int]]:
    """First row, and row behind the last, of each group. Reads offs on the host."""
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def apply_epilogue(epilogue: Epilogue, accumulator: torch.Tensor, offs: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The torch twin of an epilogue on all rows, and zeros behind the last offset; offs may stay on a device."""
    rows = torch.arange(accumulator.shape[0], dtype=offs.dtype, device=offs.device)
    groups = torch.searchsorted(offs, rows, right=True)
    result = epilogue.reference(accumulator, groups.clamp_max(num_groups - 1))
    return torch.where((groups < num_groups)[:, None], result, torch.zeros_like(result))
