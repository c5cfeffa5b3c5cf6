"""Grouped GEMM on Hopper: one persistent kernel with a gate before and an epilogue behind the products.

Computes, for every row m of group e:    out[m, :] = epilogue(x[m, :] W_e)    and zeros behind the last group
with W_e = w[e] [K, N], products of bfloat16 or float16 summed in float32. A tile is block_m rows of one group, 64 for
each consumer, by block_n columns; the grid has one block an SM, and each walks its tiles (TileWalk).

Roles                 warps  registers  job
    consumer 0 (default)  4     232     rows 0 to 63 of the tile: products, epilogue, stores
    consumer 1            4     232     rows 64 to 127 (absent where block_m is 64)
    load                  1      40     gate; TMA of x and w. Where a source tells where the rows of x lie: 4 warps, 72
                                        registers, consumers with 216; asynchronous copies of x (crew_gather)
    mover                 1      40     brings rows of x into place for all blocks (only where the caller gives one)
    notify                1      40     tells others what has landed (only where the epilogue has a `landed`)

Ring         producer -> consumers     full by            empty by            bytes x stages (128 x 256 tile)
    inputs   load -> consumer 0, 1     1 arrival + TMA    1 arrival each      48 KiB x 4 (one arrival more of a gather)
    stored   consumer 0, 1 -> notify   1 arrival each     1 arrival           no bytes, 4 tiles

Hand-offs    none else: each consumer stores its own rows. Its staging tile of 64 rows by 64 columns (two of them where
             shared memory allows) is free again when its TMA store has read it (bulk groups of the storing thread).

Timeline     [tile]
    load        gate -> [k] wait inputs empty -> TMA. It runs num_stages steps ahead, so the loads of the next tile
                pass while the consumers are in their epilogue.
    consumer    [k] wait inputs -> product of step k runs, that of k - 1 ends -> release its stage
                [piece of 64 columns] epilogue in float32 -> wait until the staging tile is free -> TMA store, or,
                where the group ends within these 64 rows, ordinary stores of the rows that belong to it; where a
                destination tells where rows go, ordinary stores of each to its address (crew_scatter)
    notify      [tile] wait until both consumers' rows are in global memory -> landed

A consumer says that its rows are there behind the products of its next tile: its stores are over by then, and it waits
for nothing. Behind a gate it says so at once, because the next tile may wait for those who wait for this one.

A consumer without rows in a group's last tile multiplies nothing and only passes the stages on. Rows of x behind the
end of a group belong to others and make rows of the accumulator that are not stored. Columns behind K and N arrive as
zeros: x, w and out have tensor maps with their true sizes, w one of three dimensions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

from tilecrew.device.compat import (
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
from tilecrew.device.descriptors import matrix_descriptor, stack_descriptor, with_row_stride
from tilecrew.device.launch import Launch
from tilecrew.device.mma import accumulator_layout
from tilecrew.device.ring import Ring
from tilecrew.grouped_gemm.crew_gather import gather_role
from tilecrew.grouped_gemm.crew_grouped_gemm import (
    STORED,
    GemmTiles,
    TileWalk,
    copy_layout,
    halves,
    hand_over,
    mma_sync_products,
    mover_role,
    mover_slots,
    notify_role,
    piece_layout,
    registers_of_roles,
    release_before,
    store_rows,
    strip_layout,
    warps_of_roles,
)
from tilecrew.grouped_gemm.crew_scatter import addresses_of_rows, entries_of_rows, no_destination, scatter_rows
from tilecrew.grouped_gemm.kernel_epilogues import identity, nothing_landed
from tilecrew.grouped_gemm.kernel_gates import brings_nothing, no_gate
from tilecrew.grouped_gemm.schedule import PIECE, TileSizes

PIECE_COLUMNS = gl.constexpr(PIECE)


@dataclass(frozen=True)
class GemmConfig:
    """What the kernel is compiled for. block_m is consumer_rows * num_consumers; piece_columns are those of a stored
    piece, after the epilogue; table_length as in TileSizes; writes_tail: rows behind the last offset become zeros;
    notifies_late: a tile is handed over behind the products of the next one; mover_slots, mover_columns: slots of the
    mover, 0 without one, and their elements; has_gate: it may wait; gathers, scatters: hooks tell where rows of x lie,
    and where rows of the output go."""

    table_length: int
    num_consumers: int
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_output_buffers: int
    band: int
    consumer_rows: int
    uses_wgmma: bool
    notifies: bool
    notifies_late: bool
    scatters: bool
    piece_columns: int
    weights_are_transposed: bool
    keeps_zero: bool
    epilogue_constants: tuple
    load_registers: int
    consumer_registers: int
    writes_tail: bool
    mover_slots: int
    mover_columns: int
    has_gate: bool
    gathers: bool


class Pointers(NamedTuple):
    """output [M, columns], offs [E], and the tensors of the hooks."""

    output: torch.Tensor
    offs: torch.Tensor
    gate: tuple
    epilogue: tuple
    landed: tuple
    mover: tuple
    source: tuple
    destination: tuple


class Hooks(NamedTuple):
    """Device functions of a gate and an epilogue, and what they get.

    shrink       accumulator columns per output column
    keeps_zero   the epilogue makes zeros of zeros, so that rows behind the last offset need no selection
    landed       what is called behind the stores of a tile; None: nothing, and nothing waits for them
    mover        mover(slots, mover_tensors): what a warp of its own does in every block; slots: elements of x in shared
                 memory, [mover_slots, mover_columns]. Only in kernels of two consumers, whose tiles leave that room.
    source       source(rows, source_tensors) -> int64: where each of these rows of x begins, a multiple of 16 bytes; 0:
                 a row of zeros (crew_gather). Only in kernels of two consumers without a mover or notifications.
    destination  destination(entries, destination_tensors) -> int64: where each row goes, instead of to `out`, maybe
                 another GPU's memory; a multiple of 16 bytes. entries: what destination_tensors[0] [M] int32 has for
                 these rows; one whose entry is negative is not stored (crew_scatter). Not in a kernel with a source.
    """

    gate: object = no_gate
    gate_tensors: tuple = ()
    epilogue: object = identity
    epilogue_tensors: tuple = ()
    epilogue_constants: tuple = ()
    shrink: int = 1
    keeps_zero: bool = True
    landed: object = None
    landed_tensors: tuple = ()
    mover: object = None
    mover_tensors: tuple = ()
    mover_slots: int = 0
    mover_columns: int = 0
    source: object = None
    source_tensors: tuple = ()
    destination: object = None
    destination_tensors: tuple = ()


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
        if epilogue.landed is not None:
            landed = _device_function("epilogue.landed", epilogue.landed)
            hooks = hooks._replace(landed=landed, landed_tensors=epilogue.landed_tensors)
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
    writes_tail: bool = True,
) -> Launch:
    """The launch for x [M, K], w [E, K, N] with a contiguous K or N, offs [E] int32, out [M, N / shrink].

    writes_tail: False leaves rows behind the last offset as they are, which costs nothing where M is a bound. Where the
    hooks have a source, x is any matrix of K columns and the right dtype, and is not read; where they have a
    destination, out is one of N columns, and is not written.
    """
    transposed = w.stride(2) != 1
    config = GemmConfig(
        table_length=sizes.table_length,
        num_consumers=sizes.block_m // sizes.consumer_rows,
        block_m=sizes.block_m,
        block_n=sizes.block_n,
        block_k=sizes.block_k,
        num_stages=sizes.num_stages,
        num_output_buffers=sizes.num_output_buffers,
        band=sizes.band,
        consumer_rows=sizes.consumer_rows,
        uses_wgmma=sizes.uses_wgmma,
        notifies=hooks.landed is not None,
        notifies_late=hooks.landed is not None and hooks.gate is no_gate,
        piece_columns=PIECE // hooks.shrink,
        weights_are_transposed=transposed,
        keeps_zero=hooks.keeps_zero,
        epilogue_constants=hooks.epilogue_constants,
        load_registers=sizes.load_registers,
        consumer_registers=sizes.consumer_registers,
        writes_tail=writes_tail,
        mover_slots=hooks.mover_slots,
        mover_columns=hooks.mover_columns,
        has_gate=hooks.gate is not no_gate,
        gathers=hooks.source is not None,
        scatters=hooks.destination is not None,
    )
    of_roles = (hooks.landed_tensors, hooks.mover_tensors, hooks.source_tensors, hooks.destination_tensors)
    args = (
        matrix_descriptor(with_row_stride(x), sizes.consumer_rows, sizes.block_k),
        stack_descriptor(w, sizes.block_k, sizes.block_n, transposed),
        matrix_descriptor(with_row_stride(out), sizes.consumer_rows, config.piece_columns),
        Pointers(out, offs, hooks.gate_tensors, hooks.epilogue_tensors, *of_roles),
        w.shape[2],
        hooks.gate,
        hooks.epilogue,
        nothing_landed if hooks.landed is None else hooks.landed,
        hooks.mover or hooks.source or brings_nothing,
        no_destination if hooks.destination is None else hooks.destination,
        config,
    )
    options = {"num_warps": sizes.consumer_warps, "maxnreg": sizes.entry_registers}
    return Launch(grouped_gemm_kernel, num_programs, args, options)


@gluon.jit
def grouped_gemm_kernel(
    x_desc,
    w_desc,
    out_desc,
    pointers,
    num_columns,
    gate: gl.constexpr,
    epilogue: gl.constexpr,
    landed: gl.constexpr,
    brings: gl.constexpr,
    destination: gl.constexpr,
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    walk = TileWalk.create(pointers.offs, x_desc, w_desc, out_desc, num_columns, config)
    tiles = GemmTiles.create(x_desc, w_desc, out_desc, config)
    inputs = Ring.create(config.num_stages, 2 if config.gathers else 1, config.num_consumers)
    stored = Ring.create(STORED, config.num_consumers, 1) if config.notifies else inputs
    shared = (tiles, inputs, stored, walk, out_desc, pointers, num_columns)
    loads = (tiles, inputs, walk, x_desc, w_desc, pointers)
    WARPS: gl.constexpr = warps_of_roles(config)
    REGISTERS: gl.constexpr = registers_of_roles(config)
    if config.gathers:
        gl.warp_specialize(
            [
                (consumer_role, (shared, epilogue, destination, 0, config)),
                (consumer_role, (shared, epilogue, destination, 1, config)),
                (gather_role, (loads, gate, brings, config)),
            ],
            WARPS,
            REGISTERS,
        )
    elif config.mover_slots > 0:
        gl.warp_specialize(
            [
                (consumer_role, (shared, epilogue, destination, 0, config)),
                (consumer_role, (shared, epilogue, destination, 1, config)),
                (load_role, (loads, gate, config)),
                (mover_role, (mover_slots(x_desc.dtype, config), pointers, brings)),
            ],
            WARPS,
            REGISTERS,
        )
    elif config.notifies and config.num_consumers == 2:
        gl.warp_specialize(
            [
                (consumer_role, (shared, epilogue, destination, 0, config)),
                (consumer_role, (shared, epilogue, destination, 1, config)),
                (load_role, (loads, gate, config)),
                (notify_role, (stored, walk, pointers, landed, config)),
            ],
            WARPS,
            REGISTERS,
        )
    elif config.notifies:
        gl.warp_specialize(
            [
                (consumer_role, (shared, epilogue, destination, 0, config)),
                (load_role, (loads, gate, config)),
                (notify_role, (stored, walk, pointers, landed, config)),
            ],
            WARPS,
            REGISTERS,
        )
    elif config.num_consumers == 2:
        gl.warp_specialize(
            [
                (consumer_role, (shared, epilogue, destination, 0, config)),
                (consumer_role, (shared, epilogue, destination, 1, config)),
                (load_role, (loads, gate, config)),
            ],
            WARPS,
            REGISTERS,
        )
    else:
        gl.warp_specialize(
            [(consumer_role, (shared, epilogue, destination, 0, config)), (load_role, (loads, gate, config))],
            WARPS,
            REGISTERS,
        )


@gluon.jit
def load_role(loads, gate: gl.constexpr, config: gl.constexpr):
    tiles, inputs, walk, x_desc, w_desc, pointers = loads
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
                tma_load(x_desc, [tile.row + config.consumer_rows * consumer, k * config.block_k], full, x_tile)
            if config.weights_are_transposed:
                tma_load(w_desc, [tile.group, tile.column, k * config.block_k], full, tiles.w.index(stage))
            else:
                tma_load(w_desc, [tile.group, k * config.block_k, tile.column], full, tiles.w.index(stage))
            step += 1


@gluon.jit
def consumer_role(
    shared, epilogue: gl.constexpr, destination: gl.constexpr, CONSUMER: gl.constexpr, config: gl.constexpr
):
    tiles, inputs, stored, walk, out_desc, pointers, num_columns = shared
    ROWS: gl.constexpr = config.consumer_rows
    if config.uses_wgmma:
        # Without a wait for an MMA in front of the loop, ptxas takes the loop for divergent code and serialises its
        # MMAs.
        warpgroup_mma_wait(0, deps=(gl.zeros([64, 8], gl.float32, accumulator_layout(8)),))
    step = 0
    num_stored = 0
    for index in range(gl.program_id(0), walk.num_tiles(), gl.num_programs(0)):
        tile = walk.tile(index, config)
        if tile.num_rows > CONSUMER * ROWS:
            entries = entries_of_rows(tile, pointers, CONSUMER, config)
            if config.uses_wgmma:
                accumulator = wgmma_products(tiles, inputs, step, tile.num_steps, CONSUMER, config)
            else:
                accumulator = mma_sync_products(tiles, inputs, step, tile.num_steps, config)
            step += tile.num_steps
            if config.notifies_late:
                hand_over(stored, num_stored - 1, num_stored > 0)
            addresses = addresses_of_rows(entries, pointers, destination, config)
            of_tile = (tile, addresses, tiles, out_desc, pointers, (walk.num_rows, num_columns))
            store_tile(accumulator, of_tile, epilogue, CONSUMER, config)
        else:
            for _ in range(tile.num_steps):
                inputs.wait(step)
                inputs.release(step)
                step += 1
            if config.notifies_late:
                hand_over(stored, num_stored - 1, num_stored > 0)
        if config.notifies and not config.notifies_late:
            hand_over(stored, num_stored, True)
        num_stored += 1
    if config.notifies_late:
        hand_over(stored, num_stored - 1, num_stored > 0)
    tma_store_wait(0)


@gluon.jit
def wgmma_products(tiles, inputs, first_step, num_steps, CONSUMER: gl.constexpr, config: gl.constexpr):
    """The accumulator [64, block_n] of a consumer's rows: one product a step, one step in flight."""
    BLOCK_N: gl.constexpr = config.block_n
    accumulator = gl.zeros([64, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    step = first_step
    for k in range(num_steps):
        inputs.wait(step)
        stage = inputs.stage(step)
        x = tiles.x.index(stage * config.num_consumers + CONSUMER)
        accumulator = warpgroup_mma(x, tiles.weight_matrix(stage, config), accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(1, deps=(accumulator,))
        release_before(inputs, step, k > 0)
        step += 1
    accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
    release_before(inputs, step, num_steps > 0)
    return accumulator


@gluon.jit
def store_tile(accumulator, of_tile, epilogue: gl.constexpr, CONSUMER: gl.constexpr, config: gl.constexpr):
    """Epilogue and stores, PIECE columns after the others: a whole tile in float32 twice would not fit registers.

    of_tile: the tile, addresses of the consumer's rows or 0, the shared memory, descriptor of the output, pointers,
    rows of x and columns of the accumulator."""
    if config.num_output_buffers > 0 and not config.scatters:
        tma_store_wait(0)  # the stores of the tile before: long over
    pieces = halves(accumulator)
    if config.block_n == 4 * PIECE_COLUMNS:
        left, right = pieces
        pieces = halves(left) + halves(right)
    NUM_PIECES: gl.constexpr = config.block_n // PIECE_COLUMNS
    for piece in gl.static_range(NUM_PIECES):
        store_piece(pieces[piece], of_tile, epilogue, CONSUMER, piece, config)


@gluon.jit
def store_piece(
    piece,
    of_tile,
    epilogue: gl.constexpr,
    CONSUMER: gl.constexpr,
    NUMBER: gl.constexpr,
    config: gl.constexpr,
):
    tile, addresses, tiles, out_desc, pointers, sizes = of_tile
    total_rows, num_columns = sizes
    layout: gl.constexpr = piece_layout(config)
    SHRINK: gl.constexpr = PIECE_COLUMNS // config.piece_columns
    BUFFERS: gl.constexpr = config.num_output_buffers
    ROWS: gl.constexpr = config.consumer_rows
    CONSTANTS: gl.constexpr = config.epilogue_constants
    piece = gl.convert_layout(piece, layout)
    row = tile.row + CONSUMER * ROWS
    num_rows = tile.num_rows - CONSUMER * ROWS
    first_column = tile.column + NUMBER * PIECE_COLUMNS
    # Hooks may index with these: all exist, and what is computed for rows and columns that do not is not stored.
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    rows = gl.where(rows < total_rows, rows, 0)
    columns = first_column + gl.arange(0, PIECE_COLUMNS, gl.SliceLayout(0, layout))
    columns = gl.where(columns < num_columns, columns, 0)
    is_behind = tile.num_steps == 0  # the last group
    group = gl.where(is_behind, 0, tile.group)
    value = epilogue(piece, group, rows, columns, pointers.epilogue, CONSTANTS).to(out_desc.dtype)
    # Not for nothing: ptxas takes a selection of bare accumulators for a use of MMAs in flight and serialises them.
    if not config.keeps_zero:
        value = gl.where(is_behind, gl.zeros_like(value), value)
    first_output = first_column // SHRINK
    output_columns = num_columns // SHRINK - first_output
    first = pointers.output + row.to(gl.int64) * out_desc.strides[0] + first_output
    if config.scatters:
        staging = tiles.output.index(CONSUMER * BUFFERS + NUMBER % BUFFERS)
        scatter_rows(value, staging, pointers.output, addresses, first_output, output_columns, config)
    elif BUFFERS == 0:
        if SHRINK == 1:
            value = gl.convert_layout(value, strip_layout())
        LAYOUT: gl.constexpr = value.type.layout
        store_rows(value, LAYOUT, first, out_desc.strides[0], num_rows, output_columns)
    else:
        staging = tiles.output.index(CONSUMER * BUFFERS + NUMBER % BUFFERS)
        tma_store_wait(BUFFERS - 1)  # what this tile has stored from this staging tile has left it
        barrier()
        staging.store(value)
        fence_async_shared()
        barrier()
        if num_rows >= ROWS:
            tma_store(out_desc, [row, first_output], staging)
        else:
            LAYOUT: gl.constexpr = copy_layout(config.piece_columns, gl.num_warps())
            store_rows(staging.load(LAYOUT), LAYOUT, first, out_desc.strides[0], num_rows, output_columns)
