"""Which tiles a block of the grouped GEMM computes, in which order, its shared memory, and the roles beside the GEMM.

Row blocks never cross groups: group e has ceil(rows / block_m) of them, numbered group after group. The rows behind
the last offset are one more group, whose tiles are zeros. Example: offs 130, 130, 200 and 256 rows in blocks of 128
give row blocks 0 (rows 0 to 127), 1 (128, 129), 2 (130 to 199) and 3 (200 to 255, zeros).
"""

from tilecrew.device.compat import aggregate, barrier, gl, gluon, mbarrier, mma_v2, reinterpret, tma_store_wait
from tilecrew.device.mma import (
    accumulator_layout,
    operand_layout,
    tile_layout,
    vector_layout,
    warp_accumulator_layout,
)
from tilecrew.device.ring import Ring, remainder
from tilecrew.device.signal import fence_proxy_async
from tilecrew.device.tiles import matrix_view, wait_until_stores_complete
from tilecrew.grouped_gemm.schedule import PIECE, STORED_TILES

STORED = gl.constexpr(STORED_TILES)
SEARCH = gl.constexpr(128)  # row-block ends that a search reads at once: four registers of a lane


@gluon.jit
def add(a, b):
    return a + b


@gluon.constexpr_function
def search_layout(num_warps):
    """A vector that every warp of a role holds as a whole, so that a reduction needs no other warp."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, SEARCH.value // 32], [1, 32], [num_warps, 1], [1, 0]))


@gluon.jit
def only_element(vector):
    return gl.sum(vector.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@aggregate
class Tile:
    """One output tile.

    group           its group; the number of groups for rows behind the last offset
    row_block       number of its row block
    row, num_rows   first row, and rows up to the end of the group (more than the tile has where other tiles follow)
    column          first column of the accumulator
    num_steps       steps along K: 0 behind the last offset
    """

    group: gl.tensor
    row_block: gl.tensor
    row: gl.tensor
    num_rows: gl.tensor
    column: gl.tensor
    num_steps: gl.tensor

    @gluon.constexpr_function
    def __init__(self, group, row_block, row, num_rows, column, num_steps):
        self.group, self.row_block, self.row = group, row_block, row
        self.num_rows, self.column, self.num_steps = num_rows, column, num_steps


@aggregate
class TileWalk:
    """The tiles of the grid in order; block b computes the tiles b, b + blocks, b + 2 * blocks, ...

    begins            [P] int32 in shared memory: first row of each group, of the rows behind the last, and M
    ends              [P] int32 in shared memory: row blocks up to and with each group
    num_rows, num_groups, num_row_blocks, num_column_blocks, steps_per_tile
    """

    begins: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    num_rows: gl.tensor
    num_groups: gl.tensor
    num_row_blocks: gl.tensor
    num_column_blocks: gl.tensor
    steps_per_tile: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begins, ends, num_rows, num_groups, num_row_blocks, num_column_blocks, steps_per_tile):
        self.begins, self.ends, self.num_rows, self.num_groups = begins, ends, num_rows, num_groups
        self.num_row_blocks, self.num_column_blocks = num_row_blocks, num_column_blocks
        self.steps_per_tile = steps_per_tile

    @gluon.jit
    def create(offs, x_desc, w_desc, out_desc, num_columns, config: gl.constexpr):
        """Counts the row blocks of every group; all warps of the first role, before the roles start."""
        # Rows that are gathered lie anywhere: how many there are is the output's to say.
        num_rows = (out_desc if config.gathers else x_desc).shape[0].to(gl.int32)
        num_inner = x_desc.shape[1].to(gl.int32)
        num_groups = w_desc.shape[0].to(gl.int32)
        LENGTH: gl.constexpr = config.table_length
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        group = gl.arange(0, LENGTH, layout)
        end = gl.load(offs + group, mask=group < num_groups, other=0)
        begin = gl.load(offs + group - 1, mask=(group > 0) & (group <= num_groups), other=0)
        # Offsets outside of the rows, or that decrease, are the caller's fault; they must not reach past the tensors.
        end = gl.where(group < num_groups, gl.minimum(gl.maximum(end, 0), num_rows), num_rows)
        begin = gl.where(group <= num_groups, gl.minimum(gl.maximum(begin, 0), num_rows), num_rows)
        blocks = gl.cdiv(gl.maximum(end - begin, 0), config.block_m)
        if not config.writes_tail:
            blocks = gl.where(group < num_groups, blocks, 0)
        counts = gl.associative_scan(blocks, 0, add)
        begins = gl.allocate_shared_memory(gl.int32, [LENGTH], vector_layout())
        ends = gl.allocate_shared_memory(gl.int32, [LENGTH], vector_layout())
        begins.store(begin)
        ends.store(counts)
        barrier()  # the tables are written
        num_column_blocks, num_steps = gl.cdiv(num_columns, config.block_n), gl.cdiv(num_inner, config.block_k)
        return TileWalk(begins, ends, num_rows, num_groups, gl.max(counts, 0), num_column_blocks, num_steps)

    @gluon.jit
    def num_tiles(self):
        return self.num_row_blocks * self.num_column_blocks

    @gluon.jit
    def tile(self, index, config: gl.constexpr):
        """Tile number `index`. Few row blocks and all their columns come together: their rows and the columns of
        their weights then stay in the L2 cache. Where rows are scattered a row block that is mostly padding takes less
        time, and each band begins one row block further on than the band before: a block of a grid that is a multiple
        of it would otherwise have the same place in every band, and, say of groups with two row blocks, only first or
        only second ones."""
        tiles_of_band = self.num_column_blocks * config.band
        band = index // tiles_of_band
        first_row_block = band * config.band
        height = gl.minimum(self.num_row_blocks - first_row_block, config.band)
        index_in_band = index - band * tiles_of_band
        column_block = index_in_band // height
        place = index_in_band - column_block * height
        if config.scatters:
            place += gl.where(height == config.band, remainder(band, config.band), 0)
            place = gl.where(place < height, place, place - height)
        row_block = first_row_block + place
        # The group is the number of groups that end before; its first block is where the last of these ends.
        group = row_block * 0
        first_block = row_block * 0
        LENGTH: gl.constexpr = config.table_length
        for first in gl.static_range(0, LENGTH, SEARCH):
            ends = self.ends.slice(first, SEARCH).load(search_layout(gl.num_warps()))
            before = (ends <= row_block).to(gl.int32)
            group += gl.sum(before, 0)
            first_block = gl.maximum(first_block, gl.max(ends * before, 0))
        begins = reinterpret(self.begins, gl.int32, [LENGTH, 1], vector_layout())
        row = only_element(begins.index(group)) + (row_block - first_block) * config.block_m
        num_rows = only_element(begins.index(group + 1)) - row
        num_steps = gl.where(group < self.num_groups, self.steps_per_tile, 0)
        return Tile(group, row_block, row, num_rows, column_block * config.block_n, num_steps)


@aggregate
class GemmTiles:
    """Shared memory: `x` [stages * consumers, rows of a consumer, block_k], `w` [stages, 1, block_k, block_n] (its last
    dimensions exchanged where the weights are transposed), `output` [consumers * buffers, rows of a consumer, columns
    of a piece], or None where there are no staging tiles."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    output: gl.shared_memory_descriptor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, w, output):
        self.x, self.w = x, w
        self.output = gl.constexpr(None) if output is None else output

    @gluon.jit
    def create(x_desc, w_desc, out_desc, config: gl.constexpr):
        num_x: gl.constexpr = config.num_stages * config.num_consumers
        num_outputs: gl.constexpr = config.num_consumers * config.num_output_buffers
        ROWS: gl.constexpr = config.consumer_rows
        W_SHAPE: gl.constexpr = w_desc.block_type.shape
        x = gl.allocate_shared_memory(x_desc.dtype, [num_x, ROWS, config.block_k], x_desc.layout)
        w = gl.allocate_shared_memory(w_desc.dtype, [config.num_stages] + W_SHAPE, w_desc.layout)
        output = None
        if num_outputs > 0:
            shape: gl.constexpr = [num_outputs, ROWS, config.piece_columns]
            output = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
        return GemmTiles(x, w, output)

    @gluon.jit
    def weight_matrix(self, stage, config: gl.constexpr):
        """[block_k, block_n]"""
        if config.weights_are_transposed:
            layout: gl.constexpr = tile_layout([config.block_n, config.block_k], self.w.dtype)
            tile = matrix_view(self.w.index(stage), config.block_n, config.block_k, layout).permute((1, 0))
        else:
            layout: gl.constexpr = tile_layout([config.block_k, config.block_n], self.w.dtype)
            tile = matrix_view(self.w.index(stage), config.block_k, config.block_n, layout)
        return tile


@gluon.jit
def mma_sync_products(tiles, inputs, first_step, num_steps, config: gl.constexpr):
    """The accumulator [128, block_n] of eight warps, 16 rows each, in products of 16 along K: operands of more would
    not fit registers, because every warp reads all of the weights."""
    layout: gl.constexpr = warp_accumulator_layout(gl.num_warps())
    ROWS: gl.constexpr = config.consumer_rows
    BLOCK_N: gl.constexpr = config.block_n
    BLOCK_K: gl.constexpr = config.block_k
    SLICE: gl.constexpr = 16
    accumulator = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    step = first_step
    for _ in range(num_steps):
        inputs.wait(step)
        stage = inputs.stage(step)
        x, w = tiles.x.index(stage), tiles.weight_matrix(stage, config)
        for k in gl.static_range(0, BLOCK_K, SLICE):
            left = x.slice(k, SLICE, dim=1).load(operand_layout(layout, 0))
            right = w.slice(k, SLICE, dim=0).load(operand_layout(layout, 1))
            accumulator = mma_v2(left, right, accumulator)
        inputs.release(step)
        step += 1
    return accumulator


@gluon.jit
def mover_slots(dtype: gl.constexpr, config: gl.constexpr):
    """Shared memory of the mover, [slots, columns]."""
    return gl.allocate_shared_memory(dtype, [config.mover_slots, config.mover_columns], vector_layout())


@gluon.jit
def mover_role(slots, pointers, mover: gl.constexpr):
    mover(slots, pointers.mover)


@gluon.jit
def hand_over(stored: Ring, step, pred):
    """A consumer's rows of its tile number `step` to the notify role, where pred: TMA stores are complete, ordinary
    ones ordered by the barrier and the arrival. No proxy fence, which every warp would wait for: that role has it."""
    if pred:
        tma_store_wait(0)
        wait_until_stores_complete()
        full = stored.acquire(step)
        barrier()  # one thread arrives for all
        mbarrier.arrive(full, count=1)


@gluon.jit
def notify_role(stored: Ring, walk, pointers, landed: gl.constexpr, config: gl.constexpr):
    """Tells the hook of every tile, when all consumers have handed it over: it is in global memory then, for whoever
    acquires what the hook releases, by ordinary loads, or through TMA after a proxy fence."""
    step = 0
    for index in range(gl.program_id(0), walk.num_tiles(), gl.num_programs(0)):
        tile = walk.tile(index, config)
        stored.wait(step)
        if tile.num_steps > 0:  # nobody waits for rows behind the last group
            fence_proxy_async()  # rows of a partial block came by ordinary stores, and TMA may read them elsewhere
            num_rows = gl.minimum(tile.num_rows, config.block_m)
            column_block = tile.column // config.block_n
            landed(tile.row_block, column_block, num_rows, walk.num_column_blocks, pointers.landed)
        stored.release(step)
        step += 1


@gluon.constexpr_function
def warps_of_roles(config):
    """Of the roles beside the first consumer."""
    has_both = config.mover_slots > 0 and (config.notifies or config.gathers)
    assert not has_both, "a kernel has a mover, or a notify role, or a source"
    assert config.num_consumers == 2 or not (config.mover_slots or config.gathers), "a mover or a source needs two"
    assert not (config.gathers and (config.notifies or config.scatters)), "a kernel that gathers only stores"
    others = (config.mover_slots > 0) + config.notifies
    return [4] * (config.num_consumers - 1) + [4 if config.gathers else 1] + [1] * others


@gluon.constexpr_function
def registers_of_roles(config):
    others = 1 + (config.mover_slots > 0) + config.notifies
    return [config.consumer_registers] * (config.num_consumers - 1) + [config.load_registers] * others


@gluon.jit
def release_before(ring: Ring, step, pred):
    """Ring.release of the step before `step`, where pred."""
    barrier()
    STAGES: gl.constexpr = ring.num_stages
    mbarrier.arrive(ring.empty.index(remainder(step + (STAGES - 1), STAGES)), count=1, pred=pred)


@gluon.jit
def halves(x):
    """The left and the right half of the columns: registers only."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def piece_layout(config):
    return accumulator_layout(PIECE) if config.uses_wgmma else warp_accumulator_layout(config.consumer_rows // 16)


@gluon.constexpr_function
def strip_layout():
    """128 rows of a piece as eight warps store them: 16 rows a warp, 32 bytes of a row by four lanes.

    One exchange between lanes away from accumulators: more would go through shared memory, which is full.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, PIECE],
    )


@gluon.constexpr_function
def copy_layout(num_columns, num_warps):
    """A piece of a staging tile as ordinary stores take it: 16 bytes a lane, whole rows a warp."""
    lanes = num_columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def store_rows(value, layout: gl.constexpr, first, row_stride, num_rows, num_columns):
    """The first rows and columns of a piece by ordinary stores. first: where element (0, 0) goes. Rows, and what there
    is of them, are multiples of 16 bytes: stated so that the compiler sees it, and stores more than an element at once.
    """
    row = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))[None, :]
    pointer = first + (row.to(gl.int64) * row_stride + column)
    gl.store(gl.multiple_of(pointer, [1, 16]), value, mask=(row < num_rows) & (column // 8 < num_columns // 8))
