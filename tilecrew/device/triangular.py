"""Inverse of unit lower triangular 16x16 blocks in registers, one block a warp, in the accumulator layout of mma.sync.

The accumulator of a 16x16 block gives lane l (row r = l / 4, columns c = 2 (l mod 4) and c + 1) eight values:
    0, 1  top left      [r, c], [r, c + 1]
    2, 3  bottom left   [8 + r, c], [8 + r, c + 1]
    4, 5  top right     [r, 8 + c], [r, 8 + c + 1], zero because the block is lower triangular
    6, 7  bottom right  [8 + r, 8 + c], [8 + r, 8 + c + 1]
With I + L = [[T, 0], [M, B]] the inverse is [[T^-1, 0], [-B^-1 M T^-1, B^-1]]. T^-1 and B^-1 come by forward
substitution, one rank-1 update a column: X[r, :] -= L[r, j] X[j, :], which leaves rows up to j alone because L is
strictly lower. Values of other lanes come by warp shuffles: no shared memory, no barrier, float32 throughout.

Where fp16 is precise enough the same comes by MMA: 4x4 blocks by (I - N)^-1 = (I + N) (I + N^2), whose terms stay as
small as the blocks are, then merged twice. A series for larger blocks would cancel.
"""

from tilecrew.device.compat import gl, gluon
from tilecrew.device.mma import warp_accumulator_layout


def _shuffle(target: str, source: str, lane: str) -> str:
    return f"shfl.sync.idx.b32 {target}, {source}, {lane}, 31, 0xffffffff;"


def _update(rows: str, factor: str, row: str) -> str:
    return "".join(f"fma.rn.f32 {rows}{i}, {factor}, {row}{i}, {rows}{i};" for i in range(2))


_START = [
    "mov.u32 lane, %laneid; and.b32 pair, lane, 3; and.b32 quad, lane, 28; shr.u32 row, lane, 2;",
    # T^-1 (t) and B^-1 (b) start as the identity, -M T^-1 (m) as zero
    "shl.b32 src, pair, 1; setp.eq.u32 on0, row, src; add.u32 src, src, 1; setp.eq.u32 on1, row, src;",
    "selp.f32 t0, 0f3F800000, 0f00000000, on0; selp.f32 t1, 0f3F800000, 0f00000000, on1;",
    "mov.f32 b0, t0; mov.f32 b1, t1; mov.f32 m0, 0f00000000; mov.f32 m1, 0f00000000;",
]
_RESULT = [
    f"mov.f32 ${i}, {value};"
    for i, value in enumerate(["t0", "t1", "n0", "n1", "0f00000000", "0f00000000", "b0", "b1"])
]


def _inverse_ptx() -> str:
    lower = [f"${8 + i}" for i in range(8)]  # the operand, -L: registers as in the table above
    code = [
        "{",
        ".reg .b32 lane, pair, quad, row, src; .reg .pred on0, on1;",
        ".reg .f32 t0, t1, b0, b1, m0, m1, lt, lm, lb, tj0, tj1, bj0, bj1, x, n0, n1;",
        *_START,
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
            code += [_update("t", "lt", "tj"), _update("b", "lb", "bj")]
        code.append(_update("m", "lm", "tj"))
    code.append("mov.f32 n0, 0f00000000; mov.f32 n1, 0f00000000;")
    for j in range(8):  # bottom left: B^-1 times -M T^-1
        code += [f"or.b32 src, quad, {j // 2};", _shuffle("x", f"b{j % 2}", "src"), f"or.b32 src, pair, {4 * j};"]
        code += [_shuffle("tj0", "m0", "src"), _shuffle("tj1", "m1", "src"), _update("n", "x", "tj")]
    return "\n".join([*code, *_RESULT, "}"])


def _product(target: str, left: tuple[str, ...], right: tuple[str, ...], start: str) -> str:
    """Code: target = start + left times right, of 8x8 tiles of fp16, right ones transposed. Where there are two,
    products of the first are values 0 and 1 of the accumulator, of the second 2 and 3."""
    results = ", ".join(f"{target}{i}" for i in range(4))
    depth = 8 * len(left)
    operands = f"{left[0]}, zero" if depth == 8 else f"{left[0]}, zero, zero, {left[1]}"
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.f16.f16.f32"
    added = {"0": "none, none, none, none", "I": "one0, one1, one0, one1"}.get(start, results)
    return f"{name} {{{results}}}, {{{operands}}}, {{{', '.join(right)}}}, {{{added}}};"


def _pack(target: str, source: str, first: int = 0) -> str:
    """Code: two neighbours of a row as fp16, the left one low."""
    return f"cvt.rn.f16x2.f32 {target}, {source}{first + 1}, {source}{first};"


def _inverse_by_products_ptx() -> str:
    # x stands for a tile of which a lane has two values as fp16, xq for its transposed: as a right operand of a product
    # a lane has the transposed tile in the places in which it has the tile as a left one. So with both of each factor
    # both of the product come by products, and only -L is transposed. t and b: of the two 8x8 blocks.
    tiles = [f"{name}{q}{block}" for name in "lnfsdex" for q in ("", "q") for block in "tb"]
    sums = [f"{name}{i}" for name in ("p", "pq", "r", "g") for i in range(4)]
    code = [
        "{",
        ".reg .b32 lane, next, column, row, zero, m, gq, " + ", ".join(tiles) + ";",
        ".reg .f32 none, one0, one1, " + ", ".join(sums) + ";",
        ".reg .pred on0, on1, inside;",
        "mov.u32 lane, %laneid; mov.b32 zero, 0; mov.f32 none, 0f00000000;",
        "shr.u32 row, lane, 2; and.b32 column, lane, 3; shl.b32 column, column, 1;",
        # The identity, and whether the values are in one of the 4x4 blocks on the diagonal
        "setp.eq.u32 on0, row, column; selp.f32 one0, 0f3F800000, 0f00000000, on0;",
        "add.u32 next, column, 1; setp.eq.u32 on1, row, next; selp.f32 one1, 0f3F800000, 0f00000000, on1;",
        "xor.b32 next, row, column; setp.lt.u32 inside, next, 4;",
        *(f"cvt.rn.f16x2.f32 {name}, ${9 + i}, ${8 + i};" for name, i in (("lt", 0), ("m", 2), ("lb", 6))),
    ]
    for block in "tb":
        code.append(f"movmatrix.sync.aligned.m8n8.trans.b16 lq{block}, l{block};")
        # N: in the 4x4 blocks, F: below them
        code.append(f"selp.b32 n{block}, l{block}, 0, inside; selp.b32 nq{block}, lq{block}, 0, inside;")
        code.append(f"selp.b32 f{block}, 0, l{block}, inside;")

    def product(name: str, sum: str, left: str, right: str, start: str) -> None:
        """name, sum = start + left times right, where `right` is the name of its transposed; as fp16 and in float32."""
        code.append(_product(sum, (f"{left}t", f"{left}b"), (f"{right}t", f"{right}b"), start))
        code.extend(_pack(f"{name}{block}", sum, first) for first, block in ((0, "t"), (2, "b")))

    product("s", "p", "n", "nq", "I")  # I + N^2
    product("sq", "pq", "nq", "n", "I")
    product("d", "p", "n", "sq", "same")  # D = (I - N)^-1 = (I + N^2) + N (I + N^2), as N^4 = 0
    product("dq", "pq", "sq", "n", "same")
    product("eq", "r", "dq", "f", "0")  # E = F D, of which only the transposed is needed
    product("x", "p", "d", "eq", "same")  # X = (I - N - F)^-1 = D + D E
    product("xq", "pq", "eq", "d", "same")
    # The block below T and B: X_B (-M X_T)
    code += [_product("g", ("xqt",), ("m",), "0"), _pack("gq", "g"), _product("g", ("xb",), ("gq",), "0")]
    result = ["p0", "p1", "g0", "g1", "0f00000000", "0f00000000", "p2", "p3"]
    code += [f"mov.f32 ${i}, {value};" for i, value in enumerate(result)]
    return "\n".join([*code, "}"])


INVERSE_PTX = gl.constexpr(_inverse_ptx())
INVERSE_BY_PRODUCTS_PTX = gl.constexpr(_inverse_by_products_ptx())
INVERSE_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))


@gluon.jit
def invert_diagonal_blocks(minus_L, PRODUCTS: gl.constexpr):
    """(I + L)^-1 of every 16x16 block of -L [64, 16] float32, strictly lower triangular blocks stacked, block w in
    warp w.

    PRODUCTS: by products of fp16 tiles in place of 76 shuffles; else float32 throughout.

    -L has the accumulator layout of mma.sync over 4 warps, where a thread holds exactly the eight values of the table
    above.
    """
    gl.static_assert(minus_L.shape[0] == 64 and minus_L.shape[1] == 16, "four stacked 16x16 blocks")
    PTX: gl.constexpr = INVERSE_BY_PRODUCTS_PTX if PRODUCTS else INVERSE_PTX
    return gl.inline_asm_elementwise(PTX, INVERSE_CONSTRAINTS, [minus_L], dtype=gl.float32, is_pure=True, pack=8)


def _scale_columns_ptx() -> str:
    # Inputs: the block, $8 to $15, and factors of its rows, $16 to $23, of which a lane has those of rows r and 8 + r
    code = ["{", ".reg .b32 lane, even, odd; .reg .f32 t0, t1, b0, b1;"]
    code.append("mov.u32 lane, %laneid; and.b32 even, lane, 3; shl.b32 even, even, 3; or.b32 odd, even, 4;")
    code += [_shuffle("t0", "$16", "even"), _shuffle("t1", "$16", "odd")]  # of columns c and c + 1
    code += [_shuffle("b0", "$18", "even"), _shuffle("b1", "$18", "odd")]  # of columns 8 + c and 8 + c + 1
    factors = ["t0", "t1", "t0", "t1", "b0", "b1", "b0", "b1"]
    code += [f"mul.f32 ${i}, ${8 + i}, {factor};" for i, factor in enumerate(factors)]
    return "\n".join([*code, "}"])


SCALE_COLUMNS_PTX = gl.constexpr(_scale_columns_ptx())
SCALE_COLUMNS_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16))


@gluon.jit
def scale_columns(blocks, factors):
    """Four stacked 16x16 blocks [64, 16]: column c of block w times factor 16 w + c, of factors [64, 1] by rows."""
    return gl.inline_asm_elementwise(
        SCALE_COLUMNS_PTX, SCALE_COLUMNS_CONSTRAINTS, [blocks, factors], dtype=gl.float32, is_pure=True, pack=8
    )


# Selections in the accumulator of a 64x64 product: warp w owns rows 16 w to 16 w + 15, and lane l (r = l / 4,
# c = 2 (l mod 4)) holds of each of the eight 8-column tiles n the values 4 n + 0 to 3:
#     [r, 8 n + c], [r, 8 n + c + 1], [8 + r, 8 n + c], [8 + r, 8 n + c + 1]      (rows relative to 16 w)
# What a warp selects depends on its number, so masks over rows and columns would compare every element; here a warp
# compares once.


def _positions() -> list[str]:
    """Code: warp (0 to 3), row = r and column = c of the lane, and predicates warp1 to warp3."""
    return [
        ".reg .b32 warp, row, column; .reg .pred warp1, warp2, warp3;",
        "mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3;",
        "mov.u32 column, %laneid; shr.u32 row, column, 2; and.b32 column, column, 3; shl.b32 column, column, 1;",
        "setp.eq.u32 warp1, warp, 1; setp.eq.u32 warp2, warp, 2; setp.eq.u32 warp3, warp, 3;",
    ]


def _own(target: str, index: int) -> str:
    """Code: target = value `index` (0 to 7) of the two tiles on this warp's diagonal."""
    values = [f"${32 + 8 * warp + index}" for warp in range(4)]
    code = f"selp.f32 {target}, {values[1]}, {values[0]}, warp1;"
    return code + "".join(f"selp.f32 {target}, {values[warp]}, {target}, warp{warp};" for warp in (2, 3))


def _own_blocks_ptx() -> str:
    code = [
        "{",
        *_positions(),
        ".reg .pred below, below1; .reg .b32 next; .reg .f32 " + ", ".join(f"x{i}" for i in range(8)) + ";",
    ]
    code.append("add.u32 next, column, 1; setp.gt.u32 below, row, column; setp.gt.u32 below1, row, next;")
    code += [_own(f"x{i}", i) for i in (0, 1, 2, 3, 6, 7)]
    code += [f"selp.f32 x{i}, x{i}, 0f00000000, {'below1' if i % 2 else 'below'};" for i in (0, 1, 6, 7)]
    code.append("mov.f32 x4, 0f00000000; mov.f32 x5, 0f00000000;")
    code += [f"mov.f32 ${i}, {f'x{i}' if i < 8 else '0f00000000'};" for i in range(32)]
    return "\n".join([*code, "}"])


def _own_diagonal_ptx() -> str:
    code = ["{", *_positions(), ".reg .pred even, odd; .reg .b32 next; .reg .f32 x0, x1, x6, x7, top, bottom;"]
    code.append("add.u32 next, column, 1; setp.eq.u32 even, row, column; setp.eq.u32 odd, row, next;")
    code += [_own(f"x{i}", i) for i in (0, 1, 6, 7)]
    code.append("selp.f32 top, x1, 0f00000000, odd; selp.f32 top, x0, top, even;")
    code.append("selp.f32 bottom, x7, 0f00000000, odd; selp.f32 bottom, x6, bottom, even;")
    result = {0: "top", 2: "bottom"}
    code += [f"mov.f32 ${i}, {result.get(i, '0f00000000')};" for i in range(32)]
    return "\n".join([*code, "}"])


def _causal_ptx(first_column: int) -> str:
    # Of 32 columns from `first_column` on. Value [16 w + r + 8 b, 8 n + c + a] stays where
    # 16 w + r - c - a >= 8 (n - b).
    code = ["{", *_positions(), ".reg .b32 even, odd; .reg .pred " + ", ".join(f"e{k}, o{k}" for k in range(9)) + ";"]
    code.append("shl.b32 even, warp, 4; add.s32 even, even, row; sub.s32 even, even, column; sub.s32 odd, even, 1;")
    for k in range(9):
        code.append(f"setp.ge.s32 e{k}, even, {8 * (k - 1)}; setp.ge.s32 o{k}, odd, {8 * (k - 1)};")
    for i in range(16):
        tile, bottom, second = first_column // 8 + i // 4, (i // 2) % 2, i % 2
        code.append(f"selp.f32 ${i}, ${16 + i}, 0f00000000, {'o' if second else 'e'}{tile + 1 - bottom};")
    return "\n".join([*code, "}"])


OWN_BLOCKS_PTX = gl.constexpr(_own_blocks_ptx())
OWN_DIAGONAL_PTX = gl.constexpr(_own_diagonal_ptx())
CAUSAL_PTX = gl.constexpr((_causal_ptx(0), _causal_ptx(32)))
CAUSAL_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 16 + ["f"] * 16))
SQUARE_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 32))


@gluon.jit
def select_in_square(x, PTX: gl.constexpr):
    gl.static_assert(x.shape[0] == 64 and x.shape[1] == 64, "the accumulator of a 64x64 product over 4 warps")
    return gl.inline_asm_elementwise(PTX, SQUARE_CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def first_columns(x, COLUMNS: gl.constexpr):
    """The first COLUMNS columns, by halves, without moving data."""
    ROWS: gl.constexpr = x.shape[0]
    if x.shape[1] > COLUMNS:
        HALF: gl.constexpr = x.shape[1] // 2
        left, _ = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, HALF]), (0, 2, 1)))
        return first_columns(left, COLUMNS)
    else:
        return x


@gluon.jit
def left_and_middle(x):
    """The first half of the columns and the third quarter, without moving data."""
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, HALF]), (0, 2, 1)))
    return left, first_columns(right, HALF // 2)


@gluon.jit
def own_lower_blocks(x):
    """[64, 64] accumulator -> [64, 16]: the strictly lower parts of its diagonal 16x16 blocks, stacked."""
    layout: gl.constexpr = warp_accumulator_layout()
    return gl.convert_layout(first_columns(select_in_square(x, OWN_BLOCKS_PTX), 16), layout, assert_trivial=True)


@gluon.jit
def own_diagonal(x):
    """Diagonal of a [64, 64] accumulator, as a vector of its rows."""
    blocks = gl.convert_layout(
        first_columns(select_in_square(x, OWN_DIAGONAL_PTX), 16), warp_accumulator_layout(), assert_trivial=True
    )
    return gl.sum(blocks, 1)


@gluon.jit
def causal(x, FIRST_COLUMN: gl.constexpr):
    """Half a [64, 64] accumulator, [64, 32] from FIRST_COLUMN on, with zeros above the diagonal, whatever was there."""
    gl.static_assert(x.shape[0] == 64 and x.shape[1] == 32, "half the accumulator of a 64x64 product over 4 warps")
    PTX: gl.constexpr = CAUSAL_PTX[FIRST_COLUMN // 32]
    return gl.inline_asm_elementwise(PTX, CAUSAL_CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=16)
