"""The load role that gathers rows of x: products of rows that lie anywhere, without a sorted copy of them.

Computes     row p of x <- the K elements at the address that the source names for p; zeros where that is 0
Role         four warps, in place of the one that brings x by TMA (kernel_grouped_gemm). A thread has 8 of the tile's
             128 rows, and of each the same 16 bytes of the 128 that a step takes; 8 lanes read a row together.
Ring         inputs: full by the arrival + bytes of w by TMA, and one arrival for the role's own copies
Timeline     [tile] addresses to the lanes that need them -> drain and gate -> [k] wait inputs empty -> TMA of w,
             asynchronous copies of x -> wait for the copies of LAG steps before, proxy fence, barrier, arrival
             [first k] the next tile, and where its rows are

Copies are a thread's own, and wgmma reads through the asynchronous proxy: every thread waits for what it has copied and
fences, then the role meets, then one thread arrives for all. That happens LAG steps late, and steps are counted across
tiles: nothing drains between them, be they of one step. The consumers release a stage when they have the next one, so
LAG is at most num_stages - 2, or both would wait for each other. A gate may wait for what follows from steps before it
(another block's gate for this one's results), so all are handed over in front of it.

A thread asks the source for four rows, a tile ahead and in front of its gate: what names the rows is there before the
kernel, only they themselves may come later. It does so when the first step of a tile has set out: the consumers are in
the last steps or the epilogue of the tile before, and do not miss the role while it waits for what the source loads.
Copies go past the L1 cache. Rows behind the end of the group are not read.
"""

from tilecrew.device.compat import (
    async_copy_to_shared,
    barrier,
    commit_copies,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    wait_for_copies,
)
from tilecrew.device.mma import tile_layout
from tilecrew.device.ring import Ring, remainder

MOST_LAG = gl.constexpr(2)  # steps


@gluon.constexpr_function
def lag_of(config):
    return max(0, min(config.num_stages - 2, MOST_LAG.value))


@gluon.constexpr_function
def copy_layout():
    """[128, 64] elements of 16 bits by four warps: 16 bytes a thread, 4 rows a warp, 8 times."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def asking_layout():
    """128 rows, four a thread, each in the warp that copies it and known to four of its lanes: one exchange between
    lanes away from copy_layout, or it would go through shared memory, which is full."""
    return gl.DistributedLinearLayout(
        reg_bases=[[32], [64]],
        lane_bases=[[16], [0], [0], [1], [2]],
        warp_bases=[[4], [8]],
        block_bases=[],
        shape=[128],
    )


@gluon.jit
def gather_role(loads, gate: gl.constexpr, source: gl.constexpr, config: gl.constexpr):
    walk = loads[2]
    gl.static_assert(config.block_m == 128 and config.block_k == 64 and config.num_consumers == 2)
    if gl.program_id(0) < walk.num_tiles():
        gather_tiles(loads, gate, source, config)


@gluon.jit
def gather_tiles(loads, gate: gl.constexpr, source: gl.constexpr, config: gl.constexpr):
    tiles, inputs, walk, x_desc, w_desc, pointers = loads
    LAG: gl.constexpr = lag_of(config)
    LAYOUT: gl.constexpr = copy_layout()
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    num_inner = x_desc.shape[1].to(gl.int32)
    num_tiles = walk.num_tiles()
    asked = gl.arange(0, config.block_m, asking_layout())
    column = gl.arange(0, config.block_k, gl.SliceLayout(0, LAYOUT))
    next_tile = walk.tile(gl.program_id(0), config)
    next_address = addresses_of(next_tile, source, pointers, config)
    step, first = 0, 0  # the step that sets out next, and the first that has not been handed over
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = next_tile
        address = gl.convert_layout(gl.where(asked < tile.num_rows, next_address, 0), ROWS)
        exists = address != 0
        if tile.num_steps > 0:  # nobody brings rows behind the last group
            if config.has_gate:
                hand_over_all(inputs, step, first, LAG)
                first = step
            gate(tile.row_block, gl.minimum(tile.num_rows, config.block_m), pointers.gate)
        barrier()  # all threads have passed the gate, and have read the walk's tables for the first tile
        here = pointers_of(address, pointers)[:, None] + column[None, :]
        for k in range(gl.maximum(tile.num_steps, 1)):
            if tile.num_steps > 0:
                full = inputs.acquire(step)
                load_weights(tiles, inputs, w_desc, full, step, k, tile, config)
                is_inside = column // 8 < (num_inner - k * config.block_k) // 8
                mask = exists[:, None] & is_inside[None, :]
                x_tile = rows_of_stage(tiles, inputs.stage(step), config)
                async_copy_to_shared(x_tile, here, mask=mask, cache_modifier=".cg")
                commit_copies()
                here += config.block_k  # as they are, or every copy waits until the one before has read its address
                step += 1
                first = hand_over_step(inputs, step, first, LAG)
            if k == 0:
                next_index = gl.minimum(index + gl.num_programs(0), num_tiles - 1)
                next_tile = walk.tile(next_index, config)
                next_address = addresses_of(next_tile, source, pointers, config)
                barrier()  # all threads have read the walk's tables
    hand_over_all(inputs, step, first, LAG)


@gluon.jit
def addresses_of(tile, source: gl.constexpr, pointers, config: gl.constexpr):
    """What the source says of the tile's rows. It may index with all of them: those behind the group are its first."""
    row = gl.arange(0, config.block_m, asking_layout())
    return source(tile.row + gl.where(row < tile.num_rows, row, 0), pointers.source)


@gluon.jit
def pointers_of(address, pointers):
    """With what makes copies of 16 bytes of them. The elements of the output are of the type of x's."""
    return gl.multiple_of(address.to(pointers.output.dtype), 16)


@gluon.jit
def load_weights(tiles, inputs: Ring, w_desc, full, step, k, tile, config: gl.constexpr):
    stage = inputs.stage(step)
    mbarrier.expect(full, w_desc.block_type.nbytes)
    if config.weights_are_transposed:
        tma_load(w_desc, [tile.group, tile.column, k * config.block_k], full, tiles.w.index(stage))
    else:
        tma_load(w_desc, [tile.group, k * config.block_k, tile.column], full, tiles.w.index(stage))


@gluon.jit
def rows_of_stage(tiles, stage, config: gl.constexpr):
    """The consumers' tiles of a stage as one: swizzling repeats every 8 rows, so the bytes are the same."""
    STAGES: gl.constexpr = config.num_stages
    ROWS: gl.constexpr = config.block_m
    COLUMNS: gl.constexpr = config.block_k
    dtype: gl.constexpr = tiles.x.dtype
    x = reinterpret(tiles.x, dtype, [STAGES, ROWS, COLUMNS], tile_layout([ROWS, COLUMNS], dtype))
    return x.index(stage)


@gluon.jit
def hand_over_step(inputs: Ring, step, first, LAG: gl.constexpr):
    """Step `first` to the consumers where LAG steps have set out since; returns the first that has not been handed
    over."""
    is_due = step - first > LAG
    wait_for_copies(LAG)
    fence_async_shared()
    barrier()
    mbarrier.arrive(inputs.full.index(remainder(first, inputs.num_stages)), count=1, pred=is_due)
    return first + is_due.to(gl.int32)


@gluon.jit
def hand_over_all(inputs: Ring, step, first, LAG: gl.constexpr):
    """All steps before `step`."""
    wait_for_copies(0)
    fence_async_shared()
    barrier()
    for late in gl.static_range(LAG):
        stage = remainder(first + late, inputs.num_stages)
        mbarrier.arrive(inputs.full.index(stage), count=1, pred=first + late < step)
