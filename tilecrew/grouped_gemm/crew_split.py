"""What a consumer of the grouped GEMM does with its accumulator where K is split over blocks: see kernel_split_sum."""

from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm.crew_grouped_gemm import store_rows


@gluon.jit
def store_partial(accumulator, tile, partials, num_rows, num_columns, CONSUMER: gl.constexpr, config: gl.constexpr):
    """The rows of one consumer of one split, as they are, into partials [splits, M, N] float32.

    By ordinary stores from registers: four lanes write the 32 bytes of a sector, and rows of other groups, most of the
    64 where there are few, cost nothing.
    """
    LAYOUT: gl.constexpr = accumulator.type.layout
    row = tile.split.to(gl.int64) * num_rows + tile.row + CONSUMER * config.consumer_rows
    first = partials + row * num_columns + tile.column
    num_valid = tile.num_rows - CONSUMER * config.consumer_rows
    store_rows(accumulator, LAYOUT, first, num_columns, num_valid, num_columns - tile.column)
