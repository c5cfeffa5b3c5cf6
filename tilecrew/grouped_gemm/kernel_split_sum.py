"""The grouped GEMM with K split over blocks, and the kernel behind it: sum of the parts, epilogue, stores.

Computes, for every row m of group e:    out[m, :] = epilogue(sum_s partials[s, m, :])    and zeros behind the last
with partials[s] [M, N] float32, what x W_e sums to over part s of K; added in the order of s.

Roles        one warp a block: one row by PIECE columns, so that no block meets two groups
Timeline     group of the row from offs -> the kernel before has ended -> loads of all parts -> sum -> epilogue, store

The kernel is launched to start early: its blocks need little and fit beside those of the GEMM. They read offs
meanwhile, which the GEMM does not write; the GEMM itself starts when everything before has ended.

Epilogues get a row in the layout that a row of the GEMM's accumulator has: a lane holds the same columns, so that what
they may do with them without another lane's help is the same. Eight groups of four lanes then compute the same.
"""

from dataclasses import dataclass

import torch

from tilecrew.device.compat import gl, gluon
from tilecrew.device.launch import Launch
from tilecrew.device.tiles import wait_for_kernel_before
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.crew_grouped_gemm import store_rows
from tilecrew.grouped_gemm.schedule import PIECE, Schedule

PIECE_COLUMNS = gl.constexpr(PIECE)


@dataclass(frozen=True)
class SumConfig:
    """What the kernel is compiled for; table_length as in TileSizes, the others as in GemmConfig and Hooks."""

    table_length: int
    splits: int
    shrink: int
    epilogue_constants: tuple


def launches(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    hooks: kernel_grouped_gemm.Hooks,
) -> tuple[Launch, Launch]:
    """The two launches for arguments as those of kernel_grouped_gemm.launch, one behind the other on a stream.

    hooks: an epilogue at most. The workspace is a new one, so that calls on other streams have their own.
    """
    assert schedule.tiles is not None
    splits, num_rows, num_columns = schedule.splits, x.shape[0], w.shape[2]
    partials = torch.empty((splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    products = kernel_grouped_gemm.launch(
        x, w, offs, out, schedule.tiles, schedule.num_programs, writes_tail=False, partials=partials
    )
    config = SumConfig(schedule.tiles.table_length, splits, hooks.shrink, hooks.epilogue_constants)
    args = (
        partials,
        offs,
        out,
        hooks.epilogue_tensors,
        num_rows,
        num_columns,
        w.shape[0],
        out.stride(0),
        hooks.epilogue,
        config,
    )
    num_programs = num_rows * -(-num_columns // PIECE)
    return products, Launch(split_sum_kernel, num_programs, args, {"num_warps": 1, "launch_pdl": True})


@gluon.constexpr_function
def pair_layout():
    """A row of PIECE columns or fewer: two neighbours a lane."""
    return gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])


@gluon.constexpr_function
def epilogue_layout():
    """A row of PIECE columns, spread over four lanes as an accumulator of wgmma is."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32]],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[1, PIECE],
    )


@gluon.jit
def split_sum_kernel(
    partials,
    offs,
    out,
    tensors,
    num_rows,
    num_columns,
    num_groups,
    row_stride,
    epilogue: gl.constexpr,
    config: gl.constexpr,
):
    layout: gl.constexpr = epilogue_layout()
    LENGTH: gl.constexpr = config.table_length
    CONSTANTS: gl.constexpr = config.epilogue_constants
    SPLITS: gl.constexpr = config.splits
    SHRINK: gl.constexpr = config.shrink
    pieces = gl.cdiv(num_columns, PIECE_COLUMNS)
    row = gl.program_id(0) // pieces
    first_column = (gl.program_id(0) - row * pieces) * PIECE_COLUMNS
    # The group is the number of groups that end before.
    number = gl.arange(0, LENGTH, gl.BlockedLayout([1], [32], [1], [0]))
    ends = gl.load(offs + number, mask=number < num_groups, other=num_rows)
    group = gl.sum((ends <= row).to(gl.int32), 0)
    is_behind = group == num_groups
    # Hooks may index with these: all exist, and what is computed for those that do not is not stored.
    rows = row + gl.arange(0, 1, gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, PIECE_COLUMNS, gl.SliceLayout(0, layout))
    columns = gl.where(columns < num_columns, columns, 0)
    wait_for_kernel_before()
    # Nobody has written sums of rows behind the last offset.
    num_valid = gl.where(is_behind, 0, num_columns - first_column)
    split_stride = gl.to_tensor(num_rows).to(gl.int64) * num_columns
    first = partials + row.to(gl.int64) * num_columns + first_column
    accumulator = load_piece(first, num_valid)
    for split in gl.static_range(1, SPLITS):
        accumulator += load_piece(first + split * split_stride, num_valid)
    accumulator = gl.convert_layout(accumulator, layout)
    value = epilogue(accumulator, gl.where(is_behind, 0, group), rows, columns, tensors, CONSTANTS)
    value = gl.where(is_behind, gl.zeros_like(value), value).to(out.dtype.element_ty)
    first_output = first_column // SHRINK
    first = out + row.to(gl.int64) * row_stride + first_output
    store_rows(
        gl.convert_layout(value, pair_layout()),
        pair_layout(),
        first,
        row_stride,
        1,
        num_columns // SHRINK - first_output,
    )


@gluon.jit
def load_piece(first, num_columns):
    """The first columns of a piece of a row, zeros behind them. Columns come by eights: a lane's two are one load."""
    column = gl.arange(0, PIECE_COLUMNS, gl.SliceLayout(0, pair_layout()))[None, :]
    pointer = gl.multiple_of(first + column, [1, 16])
    return gl.load(pointer, mask=column // 8 < num_columns // 8, other=0.0)
