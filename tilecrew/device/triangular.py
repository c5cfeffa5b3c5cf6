"""Inverse of unit lower triangular 16x16 blocks in registers, one block a warp, in the accumulator layout of mma.sync.

The accumulator of a 16x16 block gives lane l (row r = l / 4, columns c = 2 (l mod 4) and c + 1) eight values:
    0, 1  top left      [r, c], [r, c + 1]
    2, 3  bottom left   [8 + r, c], [8 + r, c + 1]
    4, 5  top right     [r, 8 + c], [r, 8 + c + 1], zero because the block is lower triangular
    6, 7  bottom right  [8 + r, 8 + c], [8 + r, 8 + c + 1]
With I + L = [[T, 0], [M, B]] the inverse is [[T^-1, 0], [-B^-1 M T^-1, B^-1]]. T^-1 and B^-1 come by forward
substitution, one rank-1 update a column: X[r, :] -= L[r, j] X[j, :], which leaves rows up to j alone because L is
strictly lower. Values of other lanes come by warp shuffles: no shared memory, no barrier, float32 throughout.
"""

from tilecrew.device.compat import gl, gluon


def _shuffle(target: str, source: str, lane: str) -> str:
    return f"shfl.sync.idx.b32 {target}, {source}, {lane}, 31, 0xffffffff;"


def _inverse_ptx() -> str:
    lower = [f"${8 + i}" for i in range(8)]  # the operand, registers as in the table above
    code = [
        "{",
        ".reg .b32 lane, pair, quad, row, src; .reg .pred on0, on1;",
        ".reg .f32 t0, t1, b0, b1, m0, m1, lt, lm, lb, tj0, tj1, bj0, bj1, x, n0, n1;",
        "mov.u32 lane, %laneid; and.b32 pair, lane, 3; and.b32 quad, lane, 28; shr.u32 row, lane, 2;",
        # T^-1 (t) and B^-1 (b) start as the identity, M T^-1 (m) as zero
        "shl.b32 src, pair, 1; setp.eq.u32 on0, row, src; add.u32 src, src, 1; setp.eq.u32 on1, row, src;",
        "selp.f32 t0, 0f3F800000, 0f00000000, on0; selp.f32 t1, 0f3F800000, 0f00000000, on1;",
        "mov.f32 b0, t0; mov.f32 b1, t1; mov.f32 m0, 0f00000000; mov.f32 m1, 0f00000000;",
    ]
    for j in range(8):
        # column j of L for this lane's rows lies in its own quad; row j of X for its columns lies 4 j lanes up
        code.append(f"or.b32 src, quad, {j // 2};")
        if j < 7:
            code += [_shuffle("lt", lower[j % 2], "src"), _shuffle("lb", lower[6 + j % 2], "src")]
        code += [_shuffle("lm", lower[2 + j % 2], "src"), f"or.b32 src, pair, {4 * j};"]
        code += [_shuffle("tj0", "t0", "src"), _shuffle("tj1", "t1", "src")]
        if j < 7:
            code += [_shuffle("bj0", "b0", "src"), _shuffle("bj1", "b1", "src")]
            code += ["neg.f32 lt, lt; neg.f32 lb, lb;"]
            code += ["fma.rn.f32 t0, lt, tj0, t0; fma.rn.f32 t1, lt, tj1, t1;"]
            code += ["fma.rn.f32 b0, lb, bj0, b0; fma.rn.f32 b1, lb, bj1, b1;"]
        code.append("fma.rn.f32 m0, lm, tj0, m0; fma.rn.f32 m1, lm, tj1, m1;")
    code.append("mov.f32 n0, 0f00000000; mov.f32 n1, 0f00000000; neg.f32 m0, m0; neg.f32 m1, m1;")
    for j in range(8):  # bottom left: B^-1 times -(M T^-1)
        code += [f"or.b32 src, quad, {j // 2};", _shuffle("x", f"b{j % 2}", "src"), f"or.b32 src, pair, {4 * j};"]
        code += [_shuffle("tj0", "m0", "src"), _shuffle("tj1", "m1", "src")]
        code.append("fma.rn.f32 n0, x, tj0, n0; fma.rn.f32 n1, x, tj1, n1;")
    result = ["t0", "t1", "n0", "n1", "0f00000000", "0f00000000", "b0", "b1"]
    code += [f"mov.f32 ${i}, {value};" for i, value in enumerate(result)]
    return "\n".join([*code, "}"])


INVERSE_PTX = gl.constexpr(_inverse_ptx())
INVERSE_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))


@gluon.jit
def invert_diagonal_blocks(L):
    """(I + L)^-1 of every 16x16 block of L [64, 16] float32, strictly lower triangular blocks stacked, block w in warp
    w.

    L has the accumulator layout of mma.sync over 4 warps, where a thread holds exactly the eight values of the table
    above.
    """
    gl.static_assert(L.shape[0] == 64 and L.shape[1] == 16, "four stacked 16x16 blocks")
    return gl.inline_asm_elementwise(INVERSE_PTX, INVERSE_CONSTRAINTS, [L], dtype=gl.float32, is_pure=True, pack=8)
