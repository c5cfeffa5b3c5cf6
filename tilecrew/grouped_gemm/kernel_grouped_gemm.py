"""Grouped GEMM on Hopper: one persistent kernel with a gate before and an epilogue behind the products.

Computes, for every row m of group e:    out[m, :] = epilogue(x[m, :] W_e)    and zeros behind the last group
with W_e = w[e] [K, N], products of bfloat16 or float16 summed in float32. A tile is block_m rows of one group, 64 for
each consumer, by block_n columns; the grid has one block an SM, and each walks its tiles (TileWalk).

Roles                 warps  registers  job
    consumer 0 (default)  4     232     rows 0 to 63 of the tile: products, epilogue, stores
    consumer 1            4     232     rows 64 to 127 (absent where block_m is 64)
    load                  1      40     gate; TMA of x and w

Ring         producer -> consumers     full by            empty by            bytes x stages (128 x 256 tile)
    inputs   load -> consumer 0, 1     1 arrival + TMA    1 arrival each      48 KiB x 4

Hand-offs    none: each consumer stores its own rows. Its staging tile of 64 rows by 64 columns (two of them where
             shared memory allows) is free again when its TMA store has read it (bulk groups of the storing thread).

Timeline     [tile]
    load        gate -> [k] wait inputs empty -> TMA. It runs num_stages steps ahead, so the loads of the next tile
                pass while the consumers are in their epilogue.
    consumer    [k] wait inputs -> product of step k runs, that of k - 1 ends -> release its stage
                [piece of 64 columns] epilogue in float32 -> wait until the staging tile is free -> TMA store, or,
                where the group ends within these 64 rows, ordinary stores of the rows that belong to it

A consumer without rows in a group's last tile multiplies nothing and only passes the stages on. Rows of x behind the
end of a group belong to others and make rows of the accumulator that are not stored. Columns behind K and N arrive as
zeros: x, w and out have tensor maps with their true sizes, w one of three dimensions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

from tilecrew.device.compat import (
    TensorDescriptor,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilecrew.device.descriptors import DTYPES, matrix_descriptor
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout, tile_layout
from tilecrew.device.ring import Ring
from tilecrew.grouped_gemm.crew_grouped_gemm import GemmTiles, TileWalk, release_before
from tilecrew.grouped_gemm.kernel_epilogues import identity
from tilecrew.grouped_gemm.kernel_gates import no_gate
from tilecrew.grouped_gemm.schedule import PIECE, TileSizes

PIECE_COLUMNS = gl.constexpr(PIECE)


@dataclass(frozen=True)
class GemmConfig:
    """What the kernel is compiled for. block_m is 64 * num_consumers; piece_columns are those of a stored piece, after
    the epilogue; table_length as in TileSizes."""

    table_length: int
    num_consumers: int
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_output_buffers: int
    band: int
    piece_columns: int
    weights_are_transposed: bool
    keeps_zero: bool
    epilogue_constants: tuple
    load_registers: int
    consumer_registers: int


class Pointers(NamedTuple):
    """output [M, columns], offs [E], and the tensors of the hooks."""

    output: torch.Tensor
    offs: torch.Tensor
    gate: tuple
    epilogue: tuple


class Hooks(NamedTuple):
    """Device functions of a gate and an epilogue, and what they get.

    shrink       accumulator columns per output column
    keeps_zero   the epilogue makes zeros of zeros, so that rows behind the last offset need no selection
    """

    gate: object = no_gate
    gate_tensors: tuple = ()
    epilogue: object = identity
    epilogue_tensors: tuple = ()
    epilogue_constants: tuple = ()
    shrink: int = 1
    keeps_zero: bool = True


def hooks_of(gate, epilogue) -> Hooks:
    """What the kernel takes of a hooks.Gate and a hooks.Epilogue, or None. Raises TypeError where their device halves
    are no gluon.jit functions."""
    hooks = Hooks()
    if gate is not None:
        hooks = hooks._replace(gate=_device_function("gate.wait", gate.wait), gate_tensors=gate.tensors)
    if epilogue is not None:
        hooks = hooks._replace(
            epilogue=_device_function("epilogue.apply", epilogue.apply),
            epilogue_tensors=epilogue.tensors,
            epilogue_constants=epilogue.constants,
            shrink=epilogue.shrink,
            keeps_zero=epilogue.keeps_zero,
        )
    return hooks


def _device_function(name, function):
    # A function, and never a class: Triton would cache kernels under the name of a class, whatever its methods do.
    if not isinstance(function, JITFunction) or not function.is_gluon():
        raise TypeError(f"{name} must be a gluon.jit function, got {function!r}")
    return function


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    sizes: TileSizes,
    num_programs: int,
    hooks: Hooks = Hooks(),  # noqa: B008  (immutable)
) -> Launch:
    """The launch for x [M, K], w [E, K, N] with a contiguous K or N, offs [E] int32, out [M, N / shrink]."""
    transposed = w.stride(2) != 1
    config = GemmConfig(
        table_length=sizes.table_length,
        num_consumers=sizes.block_m // 64,
        block_m=sizes.block_m,
        block_n=sizes.block_n,
        block_k=sizes.block_k,
        num_stages=sizes.num_stages,
        num_output_buffers=sizes.num_output_buffers,
        band=sizes.band,
        piece_columns=PIECE // hooks.shrink,
        weights_are_transposed=transposed,
        keeps_zero=hooks.keeps_zero,
        epilogue_constants=hooks.epilogue_constants,
        load_registers=sizes.load_registers,
        consumer_registers=sizes.consumer_registers,
    )
    args = (
        matrix_descriptor(_with_row_stride(x), 64, sizes.block_k),
        _weight_descriptor(w, sizes, transposed),
        matrix_descriptor(_with_row_stride(out), 64, config.piece_columns),
        Pointers(out, offs, hooks.gate_tensors, hooks.epilogue_tensors),
        w.shape[2],
        hooks.gate,
        hooks.epilogue,
        config,
    )
    return Launch(grouped_gemm_kernel, num_programs, args, {"num_warps": 4, "maxnreg": sizes.entry_registers})


def _with_row_stride(x: torch.Tensor) -> torch.Tensor:
    """The stride of a dimension of size 1 means nothing, but TMA wants a multiple of 16 bytes from it."""
    return x if x.shape[0] > 1 else x.as_strided(x.shape, (x.shape[1], 1))


def _weight_descriptor(w: torch.Tensor, sizes: TileSizes, transposed: bool) -> TensorDescriptor:
    matrix = w.transpose(1, 2) if transposed else w
    tile = [1, sizes.block_n, sizes.block_k] if transposed else [1, sizes.block_k, sizes.block_n]
    layout = tile_layout(tile, DTYPES[w.dtype])
    strides = [stride if size > 1 else 8 for size, stride in zip(matrix.shape, matrix.stride(), strict=True)]
    return TensorDescriptor(matrix, list(matrix.shape), [*strides[:2], 1], tile, layout)


@gluon.jit
def grouped_gemm_kernel(
    x_desc,
    w_desc,
    out_desc,
    pointers,
    num_columns,
    gate: gl.constexpr,
    epilogue: gl.constexpr,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    num_rows = x_desc.shape[0].to(gl.int32)
    num_inner = x_desc.shape[1].to(gl.int32)
    num_groups = w_desc.shape[0].to(gl.int32)
    walk = TileWalk.create(pointers.offs, num_groups, num_rows, num_columns, num_inner, config)
    tiles = GemmTiles.create(x_desc, w_desc, out_desc, config)
    inputs = Ring.create(config.num_stages, 1, config.num_consumers)
    barrier()  # the table of the walk is written
    if config.num_consumers == 2:
        gl.warp_specialize(
            [
                (
                    consumer_role,
                    (tiles, inputs, walk, out_desc, pointers, num_columns, epilogue, 0, config),
                ),
                (
                    consumer_role,
                    (tiles, inputs, walk, out_desc, pointers, num_columns, epilogue, 1, config),
                ),
                (load_role, (tiles, inputs, walk, x_desc, w_desc, pointers, gate, config)),
            ],
            [4, 1],
            [config.consumer_registers, config.load_registers],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consumer_role,
                    (tiles, inputs, walk, out_desc, pointers, num_columns, epilogue, 0, config),
                ),
                (load_role, (tiles, inputs, walk, x_desc, w_desc, pointers, gate, config)),
            ],
            [1],
            [config.load_registers],
        )


@gluon.jit
def load_role(tiles, inputs, walk, x_desc, w_desc, pointers, gate: gl.constexpr, config: gl.constexpr):
    CONSUMERS: gl.constexpr = config.num_consumers
    BYTES: gl.constexpr = config.num_consumers * x_desc.block_type.nbytes + w_desc.block_type.nbytes
    step = 0
    for index in range(gl.program_id(0), walk.num_tiles(), gl.num_programs(0)):
        tile = walk.tile(index, config)
        if tile.num_steps > 0:  # nobody brings rows behind the last group
            gate(tile.row_block, gl.minimum(tile.num_rows, config.block_m), pointers.gate)
        barrier()  # all lanes have read the walk's tables and passed the gate
        for k in range(tile.num_steps):
            full = inputs.acquire(step)
            stage = inputs.stage(step)
            mbarrier.expect(full, BYTES)
            for consumer in gl.static_range(CONSUMERS):
                x_tile = tiles.x.index(stage * CONSUMERS + consumer)
                tma_load(x_desc, [tile.row + 64 * consumer, k * config.block_k], full, x_tile)
            if config.weights_are_transposed:
                tma_load(w_desc, [tile.group, tile.column, k * config.block_k], full, tiles.w.index(stage))
            else:
                tma_load(w_desc, [tile.group, k * config.block_k, tile.column], full, tiles.w.index(stage))
            step += 1


@gluon.jit
def consumer_role(
    tiles,
    inputs,
    walk,
    out_desc,
    pointers,
    num_columns,
    epilogue: gl.constexpr,
    CONSUMER: gl.constexpr,
    config: gl.constexpr,
):
    BLOCK_N: gl.constexpr = config.block_n
    layout: gl.constexpr = accumulator_layout(BLOCK_N)
    # Without a wait for an MMA in front of the loop, ptxas takes the loop for divergent code and serialises its MMAs.
    warpgroup_mma_wait(0, deps=(gl.zeros([64, 8], gl.float32, accumulator_layout(8)),))
    step = 0
    for index in range(gl.program_id(0), walk.num_tiles(), gl.num_programs(0)):
        tile = walk.tile(index, config)
        num_rows = tile.num_rows - CONSUMER * 64
        if num_rows > 0:
            accumulator = gl.zeros([64, BLOCK_N], gl.float32, layout)
            for k in range(tile.num_steps):
                inputs.wait(step)
                stage = inputs.stage(step)
                x = tiles.x.index(stage * config.num_consumers + CONSUMER)
                accumulator = warpgroup_mma(x, tiles.weight_matrix(stage, config), accumulator, is_async=True)
                accumulator = warpgroup_mma_wait(1, deps=(accumulator,))
                release_before(inputs, step, k > 0)
                step += 1
            accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
            release_before(inputs, step, tile.num_steps > 0)
            store_tile(accumulator, tile, tiles, out_desc, pointers, num_columns, epilogue, CONSUMER, config)
        else:
            for _ in range(tile.num_steps):
                inputs.wait(step)
                inputs.release(step)
                step += 1
    tma_store_wait(0)


@gluon.jit
def halves(x):
    """The left and the right half of the columns: registers only."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store_tile(
    accumulator,
    tile,
    tiles,
    out_desc,
    pointers,
    num_columns,
    epilogue: gl.constexpr,
    CONSUMER: gl.constexpr,
    config: gl.constexpr,
):
    """Epilogue and stores, PIECE columns after the others: a whole tile in float32 twice would not fit registers."""
    tma_store_wait(0)  # the stores of the tile before: long over
    left, right = halves(accumulator)
    if config.block_n == 4 * PIECE_COLUMNS:
        a, b = halves(left)
        c, d = halves(right)
        pieces = (a, b, c, d)
    else:
        pieces = (left, right)
    NUM_PIECES: gl.constexpr = config.block_n // PIECE_COLUMNS
    for piece in gl.static_range(NUM_PIECES):
        store_piece(pieces[piece], tile, tiles, out_desc, pointers, num_columns, epilogue, CONSUMER, piece, config)


@gluon.jit
def store_piece(
    piece,
    tile,
    tiles,
    out_desc,
    pointers,
    num_columns,
    epilogue: gl.constexpr,
    CONSUMER: gl.constexpr,
    NUMBER: gl.constexpr,
    config: gl.constexpr,
):
    layout: gl.constexpr = accumulator_layout(PIECE_COLUMNS)
    SHRINK: gl.constexpr = PIECE_COLUMNS // config.piece_columns
    BUFFERS: gl.constexpr = config.num_output_buffers
    CONSTANTS: gl.constexpr = config.epilogue_constants
    piece = gl.convert_layout(piece, layout)
    row = tile.row + CONSUMER * 64
    num_rows = tile.num_rows - CONSUMER * 64
    first_column = tile.column + NUMBER * PIECE_COLUMNS
    # Hooks may index with these: all exist, and what is computed for rows and columns that do not is not stored.
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    rows = gl.where(rows < out_desc.shape[0].to(gl.int32), rows, 0)
    columns = first_column + gl.arange(0, PIECE_COLUMNS, gl.SliceLayout(0, layout))
    columns = gl.where(columns < num_columns, columns, 0)
    is_behind = tile.num_steps == 0  # the last group
    group = gl.where(is_behind, 0, tile.group)
    staging = tiles.output.index(CONSUMER * BUFFERS + NUMBER % BUFFERS)
    value = epilogue(piece, group, rows, columns, pointers.epilogue, CONSTANTS).to(staging.dtype)
    # Not for nothing: ptxas takes a selection of bare accumulators for a use of MMAs in flight and serialises them.
    if not config.keeps_zero:
        value = gl.where(is_behind, gl.zeros_like(value), value)
    first_output = first_column // SHRINK
    tma_store_wait(BUFFERS - 1)  # what this tile has stored from this staging tile has left it
    barrier()
    staging.store(value)
    fence_async_shared()
    barrier()
    if num_rows >= 64:
        tma_store(out_desc, [row, first_output], staging)
    else:
        output_columns = num_columns // SHRINK - first_output
        first = pointers.output + row.to(gl.int64) * out_desc.strides[0] + first_output
        store_rows(staging, first, out_desc.strides[0], num_rows, output_columns)


@gluon.jit
def store_rows(tile, first, row_stride, num_rows, num_columns):
    """The first rows and columns of a staging tile by ordinary stores, 16 bytes a thread. first: where element (0, 0)
    goes."""
    WIDTH: gl.constexpr = tile.shape[1]
    LANES: gl.constexpr = WIDTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    value = tile.load(layout)
    pointer = first + (row.to(gl.int64) * row_stride + column)
    gl.store(pointer, value, mask=(row < num_rows) & (column < num_columns))
