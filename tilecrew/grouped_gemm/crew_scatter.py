"""Rows of the grouped GEMM that go anywhere, also to other GPUs: what consumers do instead of TMA stores.

    entries_of_rows      in front of a tile's products: the entries of its rows, whose loads the products hide
    addresses_of_rows    behind them: the hook `destination` makes addresses of the entries
    scatter_rows         of each piece: registers -> staging tile -> 16 bytes a lane, eight lanes a row, to its address

A row of a piece is 128 bytes, which is a line of the L2 cache, and of a link one packet. A consumer has the next piece
in the other staging tile while the stores of this one set out, and waits for none of them: the end of the kernel does,
for whoever comes behind it on the stream. A row with a negative entry, and one behind its group, is not stored.
"""

from tilecrew.device.compat import barrier, gl, gluon
from tilecrew.grouped_gemm.crew_grouped_gemm import copy_layout


@gluon.jit
def no_destination(entries, tensors):
    pass


@gluon.constexpr_function
def row_layout(config, num_warps):
    """Rows of a consumer as the stores of a piece have them."""
    return gl.SliceLayout(1, copy_layout(config.piece_columns, num_warps))


@gluon.jit
def entries_of_rows(tile, pointers, CONSUMER: gl.constexpr, config: gl.constexpr):
    """[rows of a consumer] int32, negative for rows that are not stored; just 0 where rows have no addresses."""
    if config.scatters:
        row = CONSUMER * config.consumer_rows + gl.arange(0, config.consumer_rows, row_layout(config, gl.num_warps()))
        exists = (row < tile.num_rows) & (tile.num_steps > 0)
        entries = gl.load(pointers.destination[0] + tile.row + row, mask=exists, other=-1)
    else:
        entries = 0
    return entries


@gluon.jit
def addresses_of_rows(entries, pointers, destination: gl.constexpr, config: gl.constexpr):
    """[rows of a consumer] int64, 0 for rows that are not stored; just 0 where rows have no addresses."""
    if config.scatters:
        addresses = gl.where(entries >= 0, destination(gl.maximum(entries, 0), pointers.destination), 0)
    else:
        addresses = 0
    return addresses


@gluon.jit
def rows_at(output, addresses):
    return addresses.to(output.dtype)


@gluon.jit
def scatter_rows(value, staging, output, addresses, first_column, num_columns, config: gl.constexpr):
    """value: a piece; num_columns: those that exist from its first column, number first_column of a row, on."""
    layout: gl.constexpr = copy_layout(config.piece_columns, gl.num_warps())
    if config.num_output_buffers == 1:
        barrier()  # with two, the barrier of the piece between says that all have read it
    staging.store(value)
    barrier()
    values = staging.load(layout)
    column = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))[None, :]
    pointer = rows_at(output, addresses)[:, None] + (first_column + column)
    is_stored = (addresses != 0)[:, None] & (column // 8 < num_columns // 8)
    gl.store(gl.multiple_of(pointer, [1, 16]), values, mask=is_stored)
