from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tilecrew.simulator.ptx import elementwise, run

THREADS = 128


@dataclass(frozen=True)
class Layout:
    kind: str
    parameters: dict[str, Any]


def mma(version, instruction):
    parameters = {"versionMajor": version, "versionMinor": 0, "warpsPerCTA": [4, 1], "instrShape": instruction}
    return Layout("nvidia_mma", parameters)


ACCUMULATOR = mma(3, [16, 64, 16])
HALF_ACCUMULATOR = mma(3, [16, 32, 16])
WARP_ACCUMULATOR = mma(2, [16, 8])


@pytest.fixture(scope="module")
def assembly():
    pytest.importorskip("triton")
    from tilecrew.device import triangular

    names = ["INVERSE_PTX", "INVERSE_BY_PRODUCTS_PTX", "INVERSE_CONSTRAINTS", "OWN_BLOCKS_PTX", "OWN_DIAGONAL_PTX"]
    names += ["SQUARE_CONSTRAINTS", "CAUSAL_PTX", "CAUSAL_CONSTRAINTS"]
    return {name: getattr(triangular, name).value for name in names}


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("half", [0, 1])
def test_causal(half, assembly):
    x = random((64, 64))
    x[0, 63] = x[0, 31] = np.nan
    columns = slice(32 * half, 32 * half + 32)
    assembly, constraints = assembly["CAUSAL_PTX"][half], assembly["CAUSAL_CONSTRAINTS"]
    result = elementwise(assembly, constraints, 16, [x[:, columns]], HALF_ACCUMULATOR, 4)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.tril(x)[:, columns])


@pytest.mark.parametrize(("name", "tolerance"), [("INVERSE_PTX", 1e-5), ("INVERSE_BY_PRODUCTS_PTX", 1e-3)])
def test_inverse_of_blocks(name, tolerance, assembly):
    L = np.tril(random((4, 16, 16)), -1) / 4
    minus = -L.reshape(64, 16)
    result = elementwise(assembly[name], assembly["INVERSE_CONSTRAINTS"], 8, [minus], WARP_ACCUMULATOR, 4)
    result = result.reshape(4, 16, 16)
    expected = np.linalg.inv(np.eye(16) + L.astype(np.float64))
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    np.testing.assert_array_equal(result, np.tril(result))


def test_own_blocks(assembly):
    x = random((64, 64))
    result = elementwise(assembly["OWN_BLOCKS_PTX"], assembly["SQUARE_CONSTRAINTS"], 32, [x], ACCUMULATOR, 4)
    blocks = np.stack([x[16 * w : 16 * w + 16, 16 * w : 16 * w + 16] for w in range(4)])
    np.testing.assert_array_equal(result[:, :16], np.tril(blocks, -1).reshape(64, 16))
    assert not result[:, 16:].any()


def test_own_diagonal(assembly):
    x = random((64, 64))
    result = elementwise(assembly["OWN_DIAGONAL_PTX"], assembly["SQUARE_CONSTRAINTS"], 32, [x], ACCUMULATOR, 4)
    np.testing.assert_array_equal(result[:, :16].sum(1), np.diag(x))
    assert np.count_nonzero(result) == 64


def test_warps_count_from_the_first_thread(assembly):
    x = random((64, 32))
    arguments = (assembly["CAUSAL_PTX"][0], assembly["CAUSAL_CONSTRAINTS"], 16, [x], HALF_ACCUMULATOR, 4)
    np.testing.assert_array_equal(elementwise(*arguments, first_thread=256), np.tril(x))
    assert (elementwise(*arguments, first_thread=32) != np.tril(x)).any()


def unary(body, x, out="=r", into="r"):
    return run(body, f"{out},{into}", [x], len(x))[0]


def test_integers():
    x = np.arange(-64, 64, dtype=np.int32) * 40_000_003
    bits = x.view(np.uint32)
    assert unary("mov.b32 $0, $1;", x).dtype == np.int32
    np.testing.assert_array_equal(unary("add.u32 $0, $1, 7;", x), x + np.int32(7))
    np.testing.assert_array_equal(unary("sub.s32 $0, $1, -5;", x), x + np.int32(5))
    np.testing.assert_array_equal(unary("mul.lo.s32 $0, $1, 12345;", x), x * np.int32(12345))
    np.testing.assert_array_equal(unary("shl.b32 $0, $1, 5;", x), x << 5)
    np.testing.assert_array_equal(unary("shl.b32 $0, $1, 32;", x), 0 * x)
    np.testing.assert_array_equal(unary("shr.u32 $0, $1, 5;", x).view(np.uint32), bits >> 5)
    np.testing.assert_array_equal(unary("shr.u32 $0, $1, 40;", x), 0 * x)
    np.testing.assert_array_equal(unary("shr.s32 $0, $1, 5;", x), x >> 5)
    np.testing.assert_array_equal(unary("shr.s32 $0, $1, 40;", x), x >> 31)
    np.testing.assert_array_equal(unary("xor.b32 $0, $1, 0xff00ff00;", x).view(np.uint32), bits ^ 0xFF00FF00)
    np.testing.assert_array_equal(unary("or.b32 $0, $1, 12;", x), x | 12)


@pytest.mark.parametrize(("kind", "dtype"), [("u32", np.uint32), ("s32", np.int32), ("f32", np.float32)])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(kind, dtype, name):
    x, y = (np.random.default_rng(seed).integers(-3, 3, THREADS).astype(dtype) for seed in (1, 2))
    if kind == "f32":
        x[:8] = np.nan
    letter = "f" if kind == "f32" else "r"
    asm = f".reg .pred p; setp.{name}.{kind} p, $1, $2; selp.b32 $0, 1, 0, p;"
    (result,) = run(asm, f"=r,{letter},{letter}", [x, y], THREADS)
    expected = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[name]
    if kind == "f32":
        expected[:8] = False  # every comparison with NaN, ne too
    np.testing.assert_array_equal(result, expected)


def test_floating_point():
    x, y, z = (random(THREADS, seed) for seed in (1, 2, 3))
    asm = """{ // product and sum, rounded once
        .reg .f32 t;
        neg.f32 t, $3;
        fma.rn.f32 $0, $1, $2, t;
    }"""
    (result,) = run(asm, "=f,f,f,f", [x, y, z], THREADS)
    np.testing.assert_array_equal(result, (x.astype(np.float64) * y - z).astype(np.float32))
    near = np.full(1, 1 + 2**-12, np.float32)
    (error,) = run("fma.rn.f32 $0, $1, $1, 0fBF801000;", "=f,f", [near], 1)  # minus the rounded square
    assert error[0] == np.float32(2**-24)
    np.testing.assert_array_equal(run("mul.f32 $0, $1, 0f40000000;", "=f,f", [x], THREADS)[0], 2 * x)


def test_exp2():
    x = np.array([0, -1, 3, -126, -126.5, -149, -np.inf, 200, np.nan, 1e-40], np.float32)
    result = unary("ex2.approx.ftz.f32 $0, $1;", x, "=f", "f")
    np.testing.assert_array_equal(result, np.array([1, 0.5, 8, 2.0**-126, 0, 0, 0, np.inf, np.nan, 1], np.float32))
    y = random(THREADS)
    tensor = elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", 1, [y], Layout("blocked", VECTOR), 4)
    np.testing.assert_allclose(tensor, np.exp2(y), rtol=2e-7)
    assert elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", 1, [np.float32(5)], None, 4) == 32


VECTOR = {"sizePerThread": [1], "threadsPerWarp": [32], "warpsPerCTA": [4], "order": [0]}


@pytest.mark.parametrize("depth", [8, 16])
def test_products_of_warps(depth):
    """Every element of both operands and of what is added where PTX has it."""
    A, B, C = random((16, depth), 1), random((depth, 8), 2), random((16, 8), 3)
    A, B = A.astype(np.float16), B.astype(np.float16)
    rows, columns = np.arange(32) // 4, 2 * (np.arange(32) % 4)

    def pairs(matrix):
        halves = [matrix[rows, columns + i].view(np.uint16).astype(np.uint32) for i in range(2)]
        return (halves[0] | halves[1] << 16).view(np.int32)

    left = [pairs(A[8 * m : 8 * m + 8, 8 * k : 8 * k + 8]) for k in range(depth // 8) for m in range(2)]
    right = [pairs(B[8 * k : 8 * k + 8].T) for k in range(depth // 8)]
    added = [C[rows + 8 * m, columns + i] for m in range(2) for i in range(2)]
    number = 4 + len(left) + len(right)
    names = [f"${i}" for i in range(number + 4)]
    groups = [names[:4], names[4 : 4 + len(left)], names[4 + len(left) : number], names[number:]]
    asm = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.f16.f16.f32 " + ", ".join(
        f"{{{', '.join(group)}}}" for group in groups
    )
    constraints = ",".join(["=&f"] * 4 + ["r"] * (number - 4) + ["f"] * 4)
    result = run(asm + ";", constraints, [*left, *right, *added], 32)
    expected = (A.astype(np.float64) @ B.astype(np.float64) + C).astype(np.float32)
    for i, values in enumerate(result):
        np.testing.assert_array_equal(values, expected[rows + 8 * (i // 2), columns + i % 2])


def test_transposed_in_a_warp():
    matrix = np.arange(4 * 64, dtype=np.uint32).reshape(4, 8, 8)

    def pairs(tiles):
        return (tiles[..., ::2] | tiles[..., 1::2] << 16).reshape(-1).view(np.int32)

    result = unary("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", pairs(matrix))
    np.testing.assert_array_equal(result, pairs(matrix.swapaxes(1, 2)))


def test_pairs_of_half_precision():
    """The first operand above the second, rounded to nearest even, infinite beyond 65504; both come back exactly."""
    x, y = random(THREADS, 1), random(THREADS, 2)
    x[:6] = [1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 2**-24, -np.inf]
    asm = """.reg .b32 pair, upper; .reg .b16 half; cvt.rn.f16x2.f32 pair, $2, $3;
        shr.u32 upper, pair, 16; cvt.u16.u32 half, upper; cvt.f32.f16 $0, half;
        cvt.u16.u32 half, pair; cvt.f32.f16 $1, half;"""
    high, low = run(asm, "=&f,=&f,f,f", [x, y], THREADS)
    np.testing.assert_array_equal(high[:6], np.array([1, 1 + 2**-9, 65504, np.inf, 2**-24, -np.inf], np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(high, x.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(low, y.astype(np.float16).astype(np.float32))


def test_shuffles_stay_in_a_warp():
    x = np.arange(THREADS, dtype=np.int32)
    asm = ".reg .b32 a; mov.u32 a, %laneid; xor.b32 a, a, 5; shfl.sync.idx.b32 $0, $1, a, 31, 0xffffffff;"
    np.testing.assert_array_equal(unary(asm, x), x ^ 5)
    wrapped = ".reg .b32 a; mov.u32 a, %tid.x; add.u32 a, a, 1; shfl.sync.idx.b32 $0, $1, a, 31, 0xffffffff;"
    np.testing.assert_array_equal(unary(wrapped, x), x // 32 * 32 + (x + 1) % 32)


def test_what_has_no_effect_here_is_read_over():
    """Fences of global memory and waits for its stores, also in assembly without operands."""
    for text in ("fence.proxy.async", "cp.async.bulk.wait_group 0", "griddepcontrol.wait"):
        result = elementwise(f"{text}; mov.u32 $0, 7;", "=r", 1, [], None, 4)
        assert result.shape == ()
        assert result == 7


def test_packs_follow_the_registers_of_a_thread():
    """The second value of each pair goes to both: in a blocked layout with two values a thread, its neighbour."""
    parameters = {"sizePerThread": [2], "threadsPerWarp": [32], "warpsPerCTA": [4], "order": [0]}
    x = np.arange(512, dtype=np.int32)
    asm = "add.s32 $0, $3, $5; mov.b32 $1, $2;"
    result = elementwise(asm, "=&r,=&r,r,r,r,r", 2, [x, 1000 * x], Layout("blocked", parameters), 4)
    even = x[::2]
    np.testing.assert_array_equal(result[::2], even + 1 + 1000 * (even + 1))
    np.testing.assert_array_equal(result[1::2], even)


def test_holders_of_one_element_must_agree():
    x = np.arange(32, dtype=np.int32)
    layout = Layout("blocked", VECTOR)  # four warps hold the same 32 elements
    np.testing.assert_array_equal(elementwise("add.s32 $0, $1, 1;", "=r,r", 1, [x], layout, 4), x + 1)
    np.testing.assert_array_equal(elementwise("mov.u32 $0, %laneid;", "=r,r", 1, [x], layout, 4), x)
    with pytest.raises(ValueError, match=r"share element \[0\]"):
        elementwise("mov.u32 $0, %tid.x;", "=r,r", 1, [x], layout, 4)


@pytest.mark.parametrize(
    ("asm", "constraints", "message"),
    [
        ("frob.u32 $0, $1;", "=r,r", "'frob.u32 \\$0, \\$1'.*not known"),
        ("mov.b32 $0, nowhere;", "=r,r", "'mov.b32 \\$0, nowhere'.*nowhere"),
        ("mov.b32 $0, $2;", "=r,r", "operand '\\$2'"),
        ("mov.b32 $0, $1;", "=h,h", "constraint '=h'"),
        ("mov.b32 $0, $1;", "r,=r", "constraint '=r'"),
        ("add.u32 $0, $1;", "=r,r", "expected 2 operands"),
        ("add.u32 $0, $1, 0f3F800000;", "=r,r", "0f3F800000"),
        ("add.u32 $0, $1, 0x100000000;", "=r,r", "0x100000000"),
        ("add.u32 $0, $1, %laneid;", "=r,r", "%laneid"),
        (".reg .f32 a; mov.u32 a, $1; mov.u32 $0, 0;", "=r,r", "'a' is no register of type u32"),
        (".reg .b32 a; mov.b32 $0, a;", "=r,r", "a is read before it is written"),
        (".reg .f8 a; mov.b32 $0, $1;", "=r,r", "'.f8'"),
        (".reg .b16 a; mov.b32 $0, a;", "=r,r", "a is a register of type b16"),
        ("mov.b32 $0, $2;", "=r,=r,r", "\\$1 are never written"),
        ("mov.b32 $0, 1; mov.b32 $1, $2;", "=r,=r,r", "\\$2 is read after an output"),
        ("@p mov.b32 $0, $1;", "=r,r", "@p"),
        ("shfl.sync.idx.b32 $0, $1, 0, 15, 0xffffffff;", "=r,r", "clamp 31"),
        ("mov.f32 $0, 0f00000000;", "=f,f", "expected float32"),
    ],
)
def test_what_is_not_understood(asm, constraints, message):
    with pytest.raises(ValueError, match=message):
        run(asm, constraints, [np.zeros(32, np.int32)], 32)


def test_mismatched_tensors():
    x = np.zeros(128, np.float32)
    layout = Layout("blocked", VECTOR)
    with pytest.raises(ValueError, match="packs of 2"):
        elementwise("mov.f32 $0, $2; mov.f32 $1, $3;", "=&f,=&f,f,f", 2, [x], layout, 4)
    with pytest.raises(ValueError, match="shapes differ"):
        elementwise("add.f32 $0, $1, $2;", "=f,f,f", 1, [x, x[:64]], layout, 4)
    with pytest.raises(ValueError, match="need a layout"):
        elementwise("mov.f32 $0, $1;", "=f,f", 1, [x], None, 4)
    with pytest.raises(ValueError, match="whole warps"):
        elementwise("mov.u32 $0, %laneid;", "=r,f", 1, [np.float32(1)], None, 4)
