import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tilecrew.simulator.layouts import register_map, shared_addresses


@dataclass(frozen=True)
class Layout:
    kind: str
    parameters: dict[str, Any]


def blocked(size, threads, warps, order):
    names = ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")
    return Layout("blocked", dict(zip(names, (size, threads, warps, order), strict=True)))


def linear(register, lane, warp):
    return Layout("linear", {"register": register, "lane": lane, "warp": warp, "block": []})


def mma(version, warps, instruction):
    parameters = {"versionMajor": version, "versionMinor": 0, "warpsPerCTA": warps, "instrShape": instruction}
    return Layout("nvidia_mma", parameters)


def sliced(dim, parent):
    return Layout("slice", {"dim": dim, "parent": parent})


ACCUMULATOR = mma(3, [4, 1], [16, 64, 16])
WARP_ACCUMULATOR = mma(2, [4, 1], [16, 8])


def accumulator_map(rows, columns):
    """The documented order of an accumulator whose instruction has as many columns, written out."""
    result = []
    for thread in range(128):
        warp, r, c = thread // 32, thread % 32 // 4, 2 * (thread % 4)
        result.append(
            [
                (64 * repetition + 16 * warp + r + down) * columns + 8 * tile + c + right
                for repetition in range(rows // 64)
                for tile in range(columns // 8)
                for down in (0, 8)
                for right in (0, 1)
            ]
        )
    return np.array(result)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (ACCUMULATOR, (64, 64)),
        (ACCUMULATOR, (64, 128)),
        (ACCUMULATOR, (128, 128)),
        (WARP_ACCUMULATOR, (64, 16)),
        (WARP_ACCUMULATOR, (128, 32)),
    ],
)
def test_accumulators(layout, shape):
    result = register_map(layout, shape, 4)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(result, accumulator_map(*shape))


def test_blocked_by_hand():
    result = register_map(blocked([1, 2], [4, 8], [1, 2], [1, 0]), (8, 32), 2)
    lane, warp = np.arange(64) % 32, np.arange(64) // 32
    first = lane // 8 * 32 + 16 * warp + lane % 8 * 2
    np.testing.assert_array_equal(result, np.stack([first, first + 1, first + 128, first + 129], 1))


def test_a_slice_keeps_one_register_and_every_thread_of_equal_values():
    rows = register_map(sliced(1, ACCUMULATOR), (64,), 4)
    lane, warp = np.arange(128) % 32, np.arange(128) // 32
    np.testing.assert_array_equal(rows, (16 * warp + lane // 4)[:, None] + [0, 8])
    columns = register_map(sliced(0, ACCUMULATOR), (64,), 4)
    np.testing.assert_array_equal(columns, (2 * (lane % 4))[:, None] + [8 * n + a for n in range(8) for a in (0, 1)])


def test_a_tensor_smaller_than_its_layout_is_held_several_times():
    result = register_map(ACCUMULATOR, (64, 16), 4)
    assert result.shape == (128, 32)
    np.testing.assert_array_equal(result, np.tile(accumulator_map(64, 16), (1, 4)))


LANES = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
COMPARED = [
    (ACCUMULATOR, (64, 64)),
    (ACCUMULATOR, (256, 256)),
    (ACCUMULATOR, (8, 16)),
    (mma(3, [2, 2], [16, 64, 16]), (64, 256)),
    (mma(3, [8, 1], [16, 16, 16]), (64, 32)),
    (WARP_ACCUMULATOR, (64, 16)),
    (mma(2, [2, 2], [16, 8]), (64, 64)),
    (mma(2, [2, 2], [16, 8]), (8, 64)),
    (blocked([1, 2], [32, 1], [4, 1], [1, 0]), (256, 8)),
    (blocked([1, 8], [8, 4], [4, 1], [1, 0]), (64, 4)),
    (blocked([2, 8], [8, 4], [2, 2], [0, 1]), (8, 4)),
    (blocked([1, 1], [8, 4], [2, 2], [0, 1]), (128, 64)),
    (blocked([2, 2, 2], [2, 4, 4], [2, 1, 2], [2, 0, 1]), (16, 32, 32)),
    (blocked([4], [32], [4], [0]), (1024,)),
    (blocked([4], [32], [4], [0]), (1,)),
    (blocked([4], [32], [1], [0]), (256,)),
    (linear([[0, 8], [0, 1], [8, 0]], LANES, [[16, 0], [32, 0]]), (64, 16)),
    (linear([[0, 1], [0, 0], [8, 0]], LANES, [[16, 0], [32, 0]]), (128, 16)),
    (linear([[0, 1], [0, 0], [8, 0]], LANES, [[16, 0], [32, 0]]), (32, 4)),
    (linear([[0, 8], [0, 1], [8, 0]], LANES, [[16, 0], [32, 0]]), (8, 4)),
    (linear([[1, 0], [0, 8], [8, 0]], [[2, 0], [0, 4], [0, 1], [0, 2], [4, 0]], [[16, 0], [32, 0]]), (128, 32)),
    (linear([[8, 0]], [[2, 0], [0, 4], [0, 1], [0, 2], [4, 0]], [[16, 0], [1, 0]]), (128, 32)),
    (linear([], [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]], [[4, 0], [8, 0]]), (32, 32)),
    (linear([], [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]], [[8, 0], [0, 4]]), (32, 32)),
    (sliced(0, ACCUMULATOR), (64,)),
    (sliced(1, WARP_ACCUMULATOR), (8,)),
    (sliced(0, blocked([2, 8], [8, 4], [2, 2], [0, 1])), (8,)),
    (sliced(0, sliced(2, blocked([2, 2, 2], [2, 4, 4], [2, 1, 2], [2, 0, 1]))), (64,)),
    (sliced(1, blocked([2, 2, 2], [2, 4, 4], [2, 1, 2], [2, 0, 1])), (64, 16)),
    (sliced(1, linear([[0, 1], [0, 0], [8, 0]], LANES, [[16, 0], [32, 0]])), (128,)),
]


def warps_of(layout):
    if layout.kind == "slice":
        return warps_of(layout.parameters["parent"])
    return (
        1 << len(layout.parameters["warp"]) if layout.kind == "linear" else math.prod(layout.parameters["warpsPerCTA"])
    )


@pytest.fixture(scope="module")
def triton_map():
    """The same map by Triton's own linear layouts."""
    pytest.importorskip("triton")
    from triton._C.libtriton import gluon_ir, ir, nvidia

    from tilecrew.device.compat import gl

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    module = builder.create_module()

    def translate(layout):
        p = layout.parameters
        if layout.kind == "blocked":
            return gl.BlockedLayout(p["sizePerThread"], p["threadsPerWarp"], p["warpsPerCTA"], p["order"])
        if layout.kind == "slice":
            return gl.SliceLayout(p["dim"], translate(p["parent"]))
        if layout.kind == "nvidia_mma":
            version = [p["versionMajor"], p["versionMinor"]]
            return gl.NVMMADistributedLayout(version, p["warpsPerCTA"], p["instrShape"])
        levels = [p["register"], p["lane"], p["warp"]]
        shape = [1 << max(x[k] for level in levels for x in level).bit_length() for k in range(2)]
        return gl.DistributedLinearLayout(*levels, [], shape)

    def compute(layout, shape, num_warps, _alive=context):  # nothing else keeps the context
        module.set_attr("ttg.num-warps", builder.get_int32_attr(num_warps))
        result = builder.to_linear_layout(translate(layout)._to_ir(builder), list(shape))
        index = np.zeros((1, len(shape)), np.int64)
        for basis in [*result.reg_bases, *result.lane_bases, *result.warp_bases]:
            index = np.concatenate([index, index ^ np.array(basis)])
        return np.ravel_multi_index(index.T, shape).reshape(32 * num_warps, -1)

    return compute


@pytest.mark.parametrize(("layout", "shape"), COMPARED)
def test_against_triton(triton_map, layout, shape):
    num_warps = warps_of(layout)
    np.testing.assert_array_equal(register_map(layout, shape, num_warps), triton_map(layout, shape, num_warps))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout("dot_op", {"opIdx": 0}), "dot_op"),
        (mma(5, [4, 1], [64, 64]), "versions 2 and 3"),
        (mma(3, [8, 1], [16, 64, 16]), "8 warps"),
        (Layout("blocked", {}), "order"),
        (blocked([4], [32], [4], [0]), "1 dimensions"),
    ],
)
def test_unsupported_distributed_layouts(layout, message):
    with pytest.raises(ValueError, match=message):
        register_map(layout, (64, 64), 4)


def nvmma(swizzle, bits=16, **more):
    return Layout("nvmma_shared", {"swizzlingByteWidth": swizzle, "elementBitWidth": bits, "transposed": False} | more)


@pytest.mark.parametrize(
    ("swizzle", "bits", "shape"),
    [
        (128, 16, (64, 128)),
        (64, 16, (64, 32)),
        (32, 16, (64, 16)),
        (128, 32, (16, 64)),
        (128, 16, (2, 8, 4, 128)),
        (128, 8, (512, 256)),
        (0, 32, (5, 64)),
        (0, 32, (3, 4, 512)),
        (0, 32, (1024,)),
    ],
)
def test_addresses_are_a_bijection(swizzle, bits, shape):
    addresses = shared_addresses(nvmma(swizzle, bits), shape, bits)
    assert addresses.shape == shape and addresses.dtype == np.int64
    size = bits // 8
    np.testing.assert_array_equal(np.sort(addresses, axis=None), np.arange(0, math.prod(shape) * size, size))


def test_swizzle_by_hand():
    addresses = shared_addresses(nvmma(128), (64, 128), 16)
    np.testing.assert_array_equal(addresses[0, :64], np.arange(0, 128, 2))
    assert addresses[1, 0] == 128 + 16 and addresses[1, 8] == 128 and addresses[1, 9] == 130
    assert addresses[7, 0] == 7 * 128 + 7 * 16 and addresses[8, 0] == 1024
    assert addresses[0, 64] == 64 * 128 and addresses[2, 64] == 64 * 128 + 2 * 128 + 32
    narrow = shared_addresses(nvmma(64), (64, 32), 16)[:, 0]
    np.testing.assert_array_equal(narrow[:9], [0, 64, 128 + 16, 192 + 16, 256 + 32, 320 + 32, 384 + 48, 448 + 48, 512])
    narrowest = shared_addresses(nvmma(32), (64, 16), 16)[:, 0]
    np.testing.assert_array_equal(narrowest[:9], [0, 32, 64, 96, 128 + 16, 160 + 16, 192 + 16, 224 + 16, 256])


def test_the_hardware_swizzles_address_bits():
    """Bits 4 and up of an address take the exclusive or with bits 7 and up: what the machine does for TMA and wgmma."""
    for width, bits in ((128, 7), (64, 3), (32, 1)):
        columns = width // 2
        plain = np.arange(64)[:, None] * width + 2 * np.arange(columns)
        expected = plain ^ ((plain >> 7 & bits) << 4)
        np.testing.assert_array_equal(shared_addresses(nvmma(width), (64, columns), 16), expected)


def test_other_views_of_a_tile():
    tile = shared_addresses(nvmma(128), (64, 128), 16)
    np.testing.assert_array_equal(shared_addresses(nvmma(128, transposed=True), (128, 64), 16), tile.T)
    np.testing.assert_array_equal(shared_addresses(nvmma(128), (2, 32, 128), 16), tile.reshape(2, 32, 128))


def test_rows_without_swizzle():
    np.testing.assert_array_equal(shared_addresses(nvmma(0, 32), (5, 64), 32), 4 * np.arange(320).reshape(5, 64))
    wide = shared_addresses(nvmma(0, 32), (4, 512), 32)
    assert wide[0, 255] == 255 * 4 and wide[1, 0] == 256 * 4 and wide[0, 256] == 4 * 256 * 4


def test_plain_shared_memory():
    def plain(order, shape):
        parameters = {"vec": 1, "perPhase": 1, "maxPhase": 1, "order": order}
        return shared_addresses(Layout("swizzled_shared", parameters), shape, 32)

    np.testing.assert_array_equal(plain([0], (64,)), 4 * np.arange(64))
    np.testing.assert_array_equal(plain([1, 0], (4, 8)), 4 * np.arange(32).reshape(4, 8))
    np.testing.assert_array_equal(plain([0, 1], (4, 8)), 4 * np.arange(32).reshape(8, 4).T)
    expected = 4 * np.arange(24).reshape(3, 2, 4).transpose(1, 2, 0)  # order: dimension 1, then 0, then 2
    np.testing.assert_array_equal(plain([1, 0, 2], (2, 4, 3)), expected)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        (nvmma(128), (64, 32), "whole blocks"),
        (nvmma(128), (4, 64), "8 rows"),
        (nvmma(128, 32), (64, 64), "16 bits"),
        (nvmma(0, transposed=True), (64, 64), "transposed"),
        (nvmma(128, transposed=True), (512, 64), "transposed"),
        (Layout("swizzled_shared", {"vec": 8, "perPhase": 1, "maxPhase": 8, "order": [1, 0]}), (8, 64), "maxPhase"),
        (Layout("shared_linear", {}), (8, 64), "shared_linear"),
    ],
)
def test_unsupported_shared_layouts(layout, shape, message):
    with pytest.raises(ValueError, match=message):
        shared_addresses(layout, shape, 16)
