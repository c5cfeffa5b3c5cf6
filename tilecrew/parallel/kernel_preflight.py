"""What the preflight runs on GPUs: copies from a peer by ordinary loads, and counting under load.

Computes     copy     target[i] = source[i]
             count    counter += num_adds, from every block, while it copies
Roles        every block does the same.
Hand-offs    none. Nothing waits.
Timeline     copy     [piece] load past the L1 cache -> store
             count    [add] add -> copy of the block's own piece
"""

import triton
import triton.language as tl


@triton.jit
def copy_piece(source, target, piece, num_elements, PIECE: tl.constexpr):
    elements = piece.to(tl.int64) * PIECE + tl.arange(0, PIECE)
    exists = elements < num_elements
    tl.store(target + elements, tl.load(source + elements, mask=exists, cache_modifier=".cg"), mask=exists)


@triton.jit
def copy_kernel(source, target, num_elements, PIECE: tl.constexpr):
    for piece in range(tl.program_id(0), tl.cdiv(num_elements, PIECE), tl.num_programs(0)):
        copy_piece(source, target, piece, num_elements, PIECE)


@triton.jit
def count_kernel(counter, num_adds, source, target, num_elements, SCOPE: tl.constexpr, PIECE: tl.constexpr):
    for _ in range(num_adds):
        tl.atomic_add(counter, 1, sem="relaxed", scope=SCOPE)
        copy_piece(source, target, tl.program_id(0), num_elements, PIECE)
