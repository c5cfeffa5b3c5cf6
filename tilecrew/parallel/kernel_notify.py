"""The epilogue's last step in a GEMM whose rows belong to other ranks: tells their owners what has landed.

Computes     nothing: flags only. A device function of hooks.Epilogue (`landed`), called by the notify role of the
             grouped GEMM.
Roles        those of the GEMM.
Hand-offs    arrivals[row block] (scope gpu): elects the call that brings a row block's last columns
             slots[row block][this rank] of each rank that owns rows of the block (scope sys) <- the epoch
Timeline     [tile] rows are in global memory -> count -> [last of the row block] fence -> release to its owners
"""

from tilecrew.device.compat import gl, gluon
from tilecrew.device.signal import fence, peer_pointer, store_release
from tilecrew.grouped_gemm.kernel_epilogues import is_last_call

ROW_BLOCK = gl.constexpr(128)


@gluon.jit
def notify_owners(row_block, column_block, num_rows, num_calls, tensors):
    """tensors: arrivals, epoch, slots, their offsets, and [4] int32: rank, number of ranks, rows of each owner, and the
    row block of all rows that is the first of this GEMM."""
    row_block += gl.load(tensors[4] + 3)
    if is_last_call(tensors[0] + row_block, num_calls):
        value = gl.load(tensors[1])
        rank = gl.load(tensors[4])
        size = gl.load(tensors[4] + 1)
        rows_of_owner = gl.load(tensors[4] + 2)
        first = row_block * ROW_BLOCK
        fence("sys")
        for owner in range(first // rows_of_owner, (first + num_rows - 1) // rows_of_owner + 1):
            store_release(peer_pointer(tensors[2] + row_block * size + rank, tensors[3], owner), value, "sys")
