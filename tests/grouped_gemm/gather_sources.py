"""Sources for the grouped GEMM that gathers its rows: device functions that tell where they lie."""

from tilecrew.device.compat import gl, gluon


@gluon.jit
def from_table(rows, tensors):
    """tensors: addresses [M] int64."""
    return gl.load(tensors[0] + rows)


@gluon.jit
def from_ranks(rows, tensors):
    """tensors: x of this rank, offsets of all ranks' in bytes, (rank, row) [M, 2] or (-1, -1), bytes of a row."""
    x, offsets, places, row_bytes = tensors
    rank = gl.load(places + 2 * rows)
    row = gl.load(places + 2 * rows + 1)
    address = x.to(gl.int64) + gl.load(offsets + gl.maximum(rank, 0)) + row.to(gl.int64) * row_bytes
    return gl.where(rank >= 0, address, 0)
