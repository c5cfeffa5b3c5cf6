import math
import re

import pytest

from tilecrew.simulator import reader
from tilecrew.simulator.reader import DescriptorType, Layout, MemDescType, ScalarType, TensorType

BLOCKED = Layout("blocked", {"sizePerThread": [1, 8], "order": [1, 0]})
SHARED = Layout("nvmma_shared", {"swizzlingByteWidth": 128, "transposed": False, "elementBitWidth": 16})
I1, I32, I64, F32, INDEX = map(ScalarType, ("i1", "i32", "i64", "f32", "index"))
POINTER = ScalarType("!tt.ptr<f32>")
SLICE = Layout("slice", {"dim": 1, "parent": BLOCKED})
BARRIER_TEXT = "!ttg.memdesc<1xi64, #shared, #smem, mutable>"
BARRIER = MemDescType((1,), "i64", SHARED, None)
TILE_TEXT = "!ttg.memdesc<64x64xbf16, #shared, #smem, mutable>"
TILE = MemDescType((64, 64), "bf16", SHARED, None)
MATRIX_TEXT = "tensor<64x64xf32, #blocked>"
MATRIX = TensorType((64, 64), "f32", BLOCKED)

MODULE = """#blocked = #ttg.blocked<{{sizePerThread = [1, 8], order = [1, 0]}}>
#loc = loc(unknown)
#loc1 = loc("/a/folder/kernel.py":7:0)
#shared = #ttg.nvmma_shared<{{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}}>
#smem = #ttg.shared_memory
#loc2 = loc("x_desc"(#loc1))
module attributes {{ttg.maxnreg = 128 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90"}} {{
  tt.func public @kernel(%x: i32 {{tt.divisibility = 16 : i32}} loc("x_desc"(#loc1)), %x_0: f32 loc(#loc2), %y: i64) \
attributes {{noinline = false}} {{
{body}
    tt.return loc(#loc1)
  }} loc(#loc1)
}} loc(#loc1)
#loc3 = loc("/b/callee.py":3:11)
#loc4 = loc("name"(#loc3))
#loc5 = loc(callsite(#loc4 at #loc1))
#loc6 = loc(callsite(#loc at #loc5))
#loc7 = loc(fused[#loc, #loc1])
"""


def read_module(body):
    return reader.read(MODULE.format(body=body))


def read_one(line):
    operations = read_module(line).kernel.region.operations
    assert [operation.name for operation in operations[1:]] == ["tt.return"]
    return operations[0]


def check(line, name, operands, operand_types, result_types=(), results=None, **attributes):
    operation = read_one(line)
    if results is None:
        results = ("%r",) if result_types else ()
    assert operation.name == name
    assert operation.results == results
    assert operation.operands == operands
    assert operation.operand_types == operand_types
    assert operation.result_types == result_types
    assert operation.attributes == attributes
    return operation


def test_module():
    program = read_module("")
    assert program.attributes == {"ttg.maxnreg": 128, "ttg.num-warps": 4, "ttg.target": "cuda:90"}
    assert program.layouts == {"#blocked": BLOCKED, "#shared": SHARED, "#smem": Layout("shared_memory", {})}
    assert program.functions == {"kernel": program.kernel}
    assert program.kernel.name == "kernel"
    assert program.kernel.arguments == (("%x", I32), ("%x_0", F32), ("%y", I64))
    assert program.kernel.argument_names == ("x_desc", "x_desc", "y")
    assert program.kernel.region.arguments == program.kernel.arguments
    assert hash(Layout("a", {"b": 1, "c": 2})) == hash(Layout("a", {"c": 2, "b": 1}))


def test_types():
    text = (
        "%r = tt.call @f(%a, %b, %c, %d, %e) : (tensor<4x!tt.ptr<bf16>, #ttg.slice<{dim = 1, parent = #blocked}>>, "
        "!ttg.memdesc<16x64xf16, #shared, #smem, mutable, 64x64>, !tt.tensordesc<tensor<1x64xbf16, #shared>>, "
        "!ttg.async.token, tensor<4xi1>) -> index"
    )
    types = (
        TensorType((4,), "!tt.ptr<bf16>", SLICE),
        MemDescType((16, 64), "f16", SHARED, (64, 64)),
        DescriptorType((1, 64), "bf16", SHARED),
        ScalarType("!ttg.async.token"),
        TensorType((4,), "i1", None),
    )
    check(text, "tt.call", ("%a", "%b", "%c", "%d", "%e"), types, (INDEX,), callee="f")


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("#loc", ""),
        ("#loc1", "kernel.py:7"),
        ("#loc4", "callee.py:3"),
        ("#loc5", "callee.py:3"),
        ("#loc6", "callee.py:3"),
        ("#loc7", "kernel.py:7"),
        ('"z"("/c.py":5:1)', "c.py:5"),
        ("callsite(#loc at #loc1)", "kernel.py:7"),
        ('"z"', ""),
    ],
)
def test_locations(location, place):
    assert read_one(f"gpu.barrier loc({location})").location == place


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("-3 : i32", I32, -3),
        ("768 : index", INDEX, 768),
        ("true", I1, True),
        ("false", I1, False),
        ("0xFF800000 : f32", F32, -math.inf),
        ("0x7F80 : bf16", ScalarType("bf16"), math.inf),
        ("0xFC00 : f16", ScalarType("f16"), -math.inf),
        ("-1.000000e+02 : f32", F32, -100.0),
        ("9.99999997E-7 : f32", F32, 9.999999974752427e-07),
        ("1.44269502 : f32", F32, 1.4426950216293335),
        ("1.010000e+00 : bf16", ScalarType("bf16"), 1.0078125),
        ("0.1 : f64", ScalarType("f64"), 0.1),
    ],
)
def test_scalar_constants(text, kind, value):
    operation = check(f"%r = arith.constant {text}", "arith.constant", (), (), (kind,), value=value, dense=False)
    assert type(operation.attributes["value"]) is type(value)


def test_dense_constants():
    for text, element, value in (("0xFF800000", "f32", -math.inf), ("-4", "i64", -4), ("true", "i1", True)):
        kind = TensorType((2,), element, BLOCKED)
        line = f"%r = arith.constant dense<{text}> : tensor<2x{element}, #blocked>"
        check(line, "arith.constant", (), (), (kind,), value=value, dense=True)
    line = "%r = arith.constant dense<0x7FC0> : tensor<2xbf16, #blocked>"
    assert math.isnan(read_one(line).attributes["value"])


def test_arithmetic():
    check("%r = arith.addi %a, %b#1 : i32 loc(#loc)", "arith.addi", ("%a", "%b#1"), (I32, I32), (I32,))
    check(f"%r = arith.mulf %a, %b : {MATRIX_TEXT}", "arith.mulf", ("%a", "%b"), (MATRIX, MATRIX), (MATRIX,))
    line = "%r = arith.addi %a, %b overflow<nsw> : i32"
    check(line, "arith.addi", ("%a", "%b"), (I32, I32), (I32,), overflow="nsw")
    check("%r = math.rsqrt %a : f32", "math.rsqrt", ("%a",), (F32,), (F32,))
    check("%r = arith.extsi %a : i32 to i64", "arith.extsi", ("%a",), (I32,), (I64,))
    check("%r = arith.cmpi slt, %a, %b : i32", "arith.cmpi", ("%a", "%b"), (I32, I32), (I1,), predicate="slt")
    mask = TensorType((64, 64), "i1", BLOCKED)
    line = f"%r = arith.cmpf une, %a, %b : {MATRIX_TEXT}"
    check(line, "arith.cmpf", ("%a", "%b"), (MATRIX, MATRIX), (mask,), predicate="une")
    check("%r = arith.select %c, %a, %b : i32", "arith.select", ("%c", "%a", "%b"), (I1, I32, I32), (I32,))
    line = f"%r = arith.select %c, %a, %b : tensor<64x64xi1, #blocked>, {MATRIX_TEXT}"
    check(line, "arith.select", ("%c", "%a", "%b"), (mask, MATRIX, MATRIX), (MATRIX,))


def test_shapes():
    check("%r = tt.get_program_id y : i32", "tt.get_program_id", (), (), (I32,), axis="y")
    kind = TensorType((8,), "i32", SLICE)
    line = (
        "%r = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32, #ttg.slice<{dim = 1, parent = #blocked}>>"
    )
    check(line, "tt.make_range", (), (), (kind,), start=0, end=8)
    column = TensorType((8, 1), "i32", BLOCKED)
    line = f"%r = tt.expand_dims %a {{axis = 1 : i32}} : {line.split(' : ')[-1]} -> tensor<8x1xi32, #blocked>"
    check(line, "tt.expand_dims", ("%a",), (kind,), (column,), axis=1)
    line = f"%r = tt.trans %a {{order = array<i32: 1, 0>}} : {MATRIX_TEXT} -> {MATRIX_TEXT}"
    check(line, "tt.trans", ("%a",), (MATRIX,), (MATRIX,), order=[1, 0])
    check(f"%r = tt.splat %a : f32 -> {MATRIX_TEXT}", "tt.splat", ("%a",), (F32,), (MATRIX,))
    pair = TensorType((64, 64, 2), "f32", None)
    line = f"%r = tt.join %a, %b : {MATRIX_TEXT} -> tensor<64x64x2xf32>"
    check(line, "tt.join", ("%a", "%b"), (MATRIX, MATRIX), (pair,))
    line = f"%p, %q = tt.split %a : tensor<64x64x2xf32> -> {MATRIX_TEXT}"
    check(line, "tt.split", ("%a",), (pair,), (MATRIX, MATRIX), results=("%p", "%q"))


def test_global_memory():
    check("%r = tt.addptr %p, %i : !tt.ptr<f32>, i32", "tt.addptr", ("%p", "%i"), (POINTER, I32), (POINTER,))
    line = "%r = tt.addptr %p, %i {tt.divisibility = dense<[1, 16]> : tensor<2xi32>} : !tt.ptr<f32>, i32"
    divisibility = {"tt.divisibility": [1, 16]}
    check(line, "tt.addptr", ("%p", "%i"), (POINTER, I32), (POINTER,), **divisibility)
    check("%r = tt.load %p : !tt.ptr<f32>", "tt.load", ("%p",), (POINTER,), (F32,), num_operands=1)
    text = "tensor<64x64x!tt.ptr<f32>, #blocked>"
    pointers, mask = (TensorType((64, 64), element, BLOCKED) for element in ("!tt.ptr<f32>", "i1"))
    line = f"%r = tt.load %p, %m, %o cacheModifier = cg {{isVolatile = true}} : {text}"
    attributes = {"num_operands": 3, "cacheModifier": "cg", "isVolatile": True}
    check(line, "tt.load", ("%p", "%m", "%o"), (pointers, mask, MATRIX), (MATRIX,), **attributes)
    line = f"tt.store %p, %v, %m : {text}"
    check(line, "tt.store", ("%p", "%v", "%m"), (pointers, MATRIX, mask), num_operands=3)
    check("tt.store %p, %v : !tt.ptr<f32>", "tt.store", ("%p", "%v"), (POINTER, F32), num_operands=2)


def test_atomic_operations():
    line = "%r = tt.atomic_rmw add, acq_rel, gpu, %p, %v, %m : (!tt.ptr<i32>, i32, i1) -> i32"
    types, attributes = (ScalarType("!tt.ptr<i32>"), I32, I1), {"operation": "add", "sem": "acq_rel", "scope": "gpu"}
    check(line, "tt.atomic_rmw", ("%p", "%v", "%m"), types, (I32,), **attributes)
    line = "%r = tt.atomic_rmw exch, relaxed, sys, %p, %v : (!tt.ptr<i32>, i32) -> i32"
    attributes = {"operation": "exch", "sem": "relaxed", "scope": "sys"}
    check(line, "tt.atomic_rmw", ("%p", "%v"), types[:2], (I32,), **attributes)
    pointers, mask = (TensorType((64, 64), element, BLOCKED) for element in ("!tt.ptr<f32>", "i1"))
    kinds = f"(tensor<64x64x!tt.ptr<f32>, #blocked>, {MATRIX_TEXT}, tensor<64x64xi1, #blocked>) -> {MATRIX_TEXT}"
    line = f"%r = tt.atomic_rmw fadd, acq_rel, gpu, %p, %v, %m : {kinds}"
    attributes = {"operation": "fadd", "sem": "acq_rel", "scope": "gpu"}
    check(line, "tt.atomic_rmw", ("%p", "%v", "%m"), (pointers, MATRIX, mask), (MATRIX,), **attributes)
    line = "%r = tt.atomic_cas release, cta, %p, %a, %b : (!tt.ptr<i32>, i32, i32) -> i32"
    types = (ScalarType("!tt.ptr<i32>"), I32, I32)
    check(line, "tt.atomic_cas", ("%p", "%a", "%b"), types, (I32,), sem="release", scope="cta")


def test_forms_of_later_versions():
    text = "tt.call @f(%d) : (!tt.tensordesc<1x64xbf16, #shared>) -> ()"
    check(text, "tt.call", ("%d",), (DescriptorType((1, 64), "bf16", SHARED),), callee="f")
    check("ttg.barrier all loc(#loc)", "ttg.barrier", (), (), spaces="all")
    line = "ttng.async_tma_store_wait {pendings = 0 : i32, read_only}"
    check(line, "ttng.async_tma_store_wait", (), (), pendings=0, read_only=True)
    check("%r = tt.approx_divf %a, %b : f32", "tt.approx_divf", ("%a", "%b"), (F32, F32), (F32,))


def test_shared_memory():
    check(f"%r = ttg.local_alloc : () -> {TILE_TEXT}", "ttg.local_alloc", (), (), (TILE,))
    check(f"%r = ttg.local_alloc %a : ({MATRIX_TEXT}) -> {TILE_TEXT}", "ttg.local_alloc", ("%a",), (MATRIX,), (TILE,))
    check(f"%r = ttg.local_load %a : {TILE_TEXT} -> {MATRIX_TEXT}", "ttg.local_load", ("%a",), (TILE,), (MATRIX,))
    line = f"ttg.local_store %a, %t : {MATRIX_TEXT} -> {TILE_TEXT}"
    check(line, "ttg.local_store", ("%a", "%t"), (MATRIX, TILE))
    line = f"%r = ttg.memdesc_index %t[%i] : {TILE_TEXT} -> {TILE_TEXT}"
    check(line, "ttg.memdesc_index", ("%t", "%i"), (TILE, I32), (TILE,))
    part = MemDescType((16, 64), "bf16", SHARED, (64, 64))
    line = f"%r = ttg.memdesc_subslice %t[48, 0] : {TILE_TEXT} -> !ttg.memdesc<16x64xbf16, #shared, #smem, 64x64>"
    check(line, "ttg.memdesc_subslice", ("%t",), (TILE,), (part,), offsets=[48, 0])
    line = f"%r = ttg.memdesc_trans %t {{order = array<i32: 1, 0>}} : {TILE_TEXT} -> {TILE_TEXT}"
    check(line, "ttg.memdesc_trans", ("%t",), (TILE,), (TILE,), order=[1, 0])


def test_barriers():
    text = BARRIER_TEXT
    check(f"ttng.init_barrier %b, 3 : {text}", "ttng.init_barrier", ("%b",), (BARRIER,), count=3)
    check(f"ttng.barrier_expect %b, 16384, %p : {text}", "ttng.barrier_expect", ("%b", "%p"), (BARRIER, I1), size=16384)
    check(f"ttng.arrive_barrier %b, 1, %p : {text}", "ttng.arrive_barrier", ("%b", "%p"), (BARRIER, I1), count=1)
    check(f"ttng.arrive_barrier %b, 2 : {text}", "ttng.arrive_barrier", ("%b",), (BARRIER,), count=2)
    check(f"ttng.wait_barrier %b, %i, %p : {text}", "ttng.wait_barrier", ("%b", "%i", "%p"), (BARRIER, I32, I1))
    check(f"ttng.wait_barrier %b, %i : {text}", "ttng.wait_barrier", ("%b", "%i"), (BARRIER, I32))
    check("gpu.barrier loc(#loc)", "gpu.barrier", (), ())
    check("ttng.fence_async_shared {bCluster = false}", "ttng.fence_async_shared", (), (), bCluster=False)
    check("ttng.async_tma_store_wait {pendings = 0 : i32}", "ttng.async_tma_store_wait", (), (), pendings=0)


def test_copies():
    descriptor = DescriptorType((64, 64), "bf16", SHARED)
    text = "!tt.tensordesc<tensor<64x64xbf16, #shared>>"
    line = f"ttng.async_tma_copy_global_to_local %d[%i, %j] %t, %b, %p : {text}, {BARRIER_TEXT} -> {TILE_TEXT}"
    operands, types = ("%d", "%i", "%j", "%t", "%b", "%p"), (descriptor, I32, I32, TILE, BARRIER, I1)
    check(line, "ttng.async_tma_copy_global_to_local", operands, types)
    line = f"ttng.async_tma_copy_local_to_global %d[%i, %j] %t : {text}, {TILE_TEXT}"
    check(line, "ttng.async_tma_copy_local_to_global", operands[:4], types[:4])


def test_products():
    line = f"%r = tt.dot %a, %b, %c, inputPrecision = tf32 : {MATRIX_TEXT} * {MATRIX_TEXT} -> {MATRIX_TEXT}"
    check(line, "tt.dot", ("%a", "%b", "%c"), (MATRIX,) * 3, (MATRIX,), inputPrecision="tf32")
    types = f"{TILE_TEXT} * {TILE_TEXT} -> {MATRIX_TEXT}"
    line = f"%r = ttng.warp_group_dot %a, %b, %c, %u {{inputPrecision = 0 : i32, isAsync = true}} : {types}"
    attributes = {"inputPrecision": 0, "isAsync": True, "has_use_acc": True}
    name = "ttng.warp_group_dot"
    check(line, name, ("%a", "%b", "%c", "%u"), (TILE, TILE, MATRIX, I1), (MATRIX,), **attributes)
    line = f"%r = ttng.warp_group_dot %a, %b, %c : {types}"
    check(line, name, ("%a", "%b", "%c"), (TILE, TILE, MATRIX), (MATRIX,), isAsync=False, has_use_acc=False)
    line = f"%r:2 = ttng.warp_group_dot_wait %a, %b {{pendings = 1 : i32}} : {MATRIX_TEXT}, f32"
    results, types = ("%r#0", "%r#1"), (MATRIX, F32)
    check(line, "ttng.warp_group_dot_wait", ("%a", "%b"), types, types, results=results, pendings=1)


def test_inline_assembly():
    line = (
        r'%r:2 = tt.elementwise_inline_asm "{\0A.reg \22x\22;\\ \C3\A9}" {constraints = "=f,=f,f,f", '
        r"packed_element = 1 : i32, pure = false} %a, %b : f32, i32 -> f32, i32"
    )
    attributes = {"asm": '{\n.reg "x";\\ é}', "constraints": "=f,=f,f,f", "packed_element": 1, "pure": False}
    name, results = "tt.elementwise_inline_asm", ("%r#0", "%r#1")
    check(line, name, ("%a", "%b"), (F32, I32), (F32, I32), results=results, **attributes)
    line = f'%r = {name} "fence;" {{constraints = "=r", packed_element = 1 : i32, pure = false}} -> i32'
    check(line, name, (), (), (I32,), asm="fence;", constraints="=r", packed_element=1, pure=False)


@pytest.mark.parametrize(("name", "attributes"), [("reduce", {"axis": 1}), ("scan", {"axis": 1, "reverse": True})])
def test_reductions(name, attributes):
    properties = ", ".join(f"{key} = {'1 : i32' if key == 'axis' else 'true'}" for key in attributes)
    text = f"""%r = "tt.{name}"(%a) <{{{properties}}}> ({{
    ^bb0(%p: f32 loc(callsite(#loc at #loc5)), %q: f32 loc(#loc)):
      %s = arith.addf %p, %q : f32 loc(#loc1)
      tt.{name}.return %s : f32 loc(#loc5)
    }}) : ({MATRIX_TEXT}) -> f32 loc(#loc5)"""
    operation = check(text, f"tt.{name}", ("%a",), (MATRIX,), (F32,), **attributes)
    assert operation.location == "callee.py:3"
    (region,) = operation.regions
    assert region.arguments == (("%p", F32), ("%q", F32))
    assert [(inner.name, inner.operands) for inner in region.operations] == [
        ("arith.addf", ("%p", "%q")),
        (f"tt.{name}.return", ("%s",)),
    ]


def test_for():
    text = f"""%r:2 = scf.for %i = %a to %b step %c iter_args(%s = %x, %t = %y) -> ({MATRIX_TEXT}, f32)  : i32 {{
      scf.yield %s, %t : {MATRIX_TEXT}, f32 loc(#loc)
    }} {{tt.num_stages = 2 : i32}} loc(#loc1)"""
    types = (I32, I32, I32, MATRIX, F32)
    attributes = {"results": ("%r#0", "%r#1"), "tt.num_stages": 2}
    operation = check(text, "scf.for", ("%a", "%b", "%c", "%x", "%y"), types, (MATRIX, F32), **attributes)
    (region,) = operation.regions
    assert region.arguments == (("%i", I32), ("%s", MATRIX), ("%t", F32))
    assert [(inner.name, inner.operands) for inner in region.operations] == [("scf.yield", ("%s", "%t"))]
    operation = check("scf.for %i = %a to %b step %c {\n}", "scf.for", ("%a", "%b", "%c"), (INDEX,) * 3)
    assert operation.regions[0].arguments == (("%i", INDEX),)


def test_if():
    operation = check("scf.if %c {\n gpu.barrier loc(#loc)\n} loc(#loc)", "scf.if", ("%c",), (I1,))
    assert [[inner.name for inner in region.operations] for region in operation.regions] == [["gpu.barrier"], []]
    check("scf.if %c {\n} else {\n} loc(#loc)", "scf.if", ("%c",), (I1,))
    text = "%r = scf.if %c -> (f32) {\n scf.yield %a : f32\n} else {\n scf.yield %b : f32\n} loc(#loc)"
    operation = check(text, "scf.if", ("%c",), (I1,), (F32,))
    assert [region.operations[0].operands for region in operation.regions] == [("%a",), ("%b",)]


def test_while():
    text = """%r:2 = scf.while (%p = %a, %q = %b) : (i32, f32) -> (i32, f32) {
      scf.condition(%c) %p, %q : i32, f32 loc(#loc)
    } do {
    ^bb0(%s: i32 loc(#loc), %t: f32 loc(#loc)):
      scf.yield %s, %t : i32, f32 loc(#loc)
    } loc(#loc)"""
    operation = check(text, "scf.while", ("%a", "%b"), (I32, F32), (I32, F32), results=("%r#0", "%r#1"))
    before, after = operation.regions
    assert before.arguments == (("%p", I32), ("%q", F32))
    assert after.arguments == (("%s", I32), ("%t", F32))
    assert before.operations[0].operands == ("%c", "%p", "%q")
    assert before.operations[0].operand_types == (I1, I32, F32)
    assert after.operations[0].operands == ("%s", "%t")


def test_warp_specialize():
    text = """%r = ttg.warp_specialize(%a, %b) attributes {requestedRegisters = array<i32: 168, 48>}
    default {
      ttg.warp_yield %a : f32 loc(#loc)
    }
    partition0(%p: f32 loc(unknown), %q: i32 loc(unknown)) num_warps(4) {
      ttg.warp_return loc(#loc1)
    }
    partition1(%p: f32 loc(unknown), %q: i32 loc(unknown)) num_warps(1) {
      gpu.barrier loc(#loc)
      ttg.warp_return loc(#loc1)
    } : (f32, i32) -> f32 loc(#loc1)"""
    attributes = {"requestedRegisters": [168, 48], "partition_num_warps": [4, 1]}
    operation = check(text, "ttg.warp_specialize", ("%a", "%b"), (F32, I32), (F32,), **attributes)
    assert [len(region.operations) for region in operation.regions] == [1, 1, 2]
    assert [region.arguments for region in operation.regions] == [(), *[(("%p", F32), ("%q", I32))] * 2]
    assert operation.regions[0].operations[0].operands == ("%a",)


@pytest.mark.parametrize(
    "line",
    [
        "%r = tt.unheard_of %a : f32",
        "%r = arith.addi %a : i32",
        "%r = arith.addi %a, %b, %c : i32",
        "%r = arith.addi %a, %b : i32 surprise",
        "%r:2 = arith.addi %a, %b : i32",
        "arith.addi %a, %b : i32",
        "%r = arith.addi %a, %b : complex<f32>",
        "%r = arith.addi %a, %b : tensor<?xi32, #blocked>",
        "%r = arith.addi %a, %b : tensor<4xi32, #unheard>",
        "%r = arith.addi %a, %b : tensor<4xi32, #ttg.padded_shared<[4:+4]>>",
        "%r = arith.addi %a, %b : i32 loc(#loc99)",
        "%r = arith.addi %a, %b : i32 loc(fused<1>[#loc])",
        "%r = arith.cmpi oeq, %a, %b : i32",
        "%r = arith.constant dense<[1, 2]> : tensor<2xi32, #blocked>",
        "%r = arith.constant 1.5 : i32",
        "%r = arith.constant 0x7F : f8E5M2",
        "%r = arith.constant 0x7F8000000 : f32",
        "%r = tt.get_program_id w : i32",
        "%r = tt.make_range {end = 8 : i32} : tensor<8xi32, #blocked>",
        "%r = tt.make_range {end = 8 : i32, start = what} : tensor<8xi32, #blocked>",
        "%r = tt.make_range {end = 8 : i32, end = 9 : i32} : tensor<8xi32, #blocked>",
        "%r = tt.load %p : f32",
        "%r = tt.load %p, %m, %o, %x : !tt.ptr<f32>",
        "%r = tt.load %p flavour = odd : !tt.ptr<f32>",
        "tt.store %p : !tt.ptr<f32>",
        "%r = tt.atomic_rmw nand, acq_rel, gpu, %p, %v : (!tt.ptr<i32>, i32) -> i32",
        "%r = tt.atomic_rmw add, acq_rel, planet, %p, %v : (!tt.ptr<i32>, i32) -> i32",
        "%r = tt.atomic_cas seq_cst, gpu, %p, %v, %w : (!tt.ptr<i32>, i32, i32) -> i32",
        "ttg.barrier local|global_read",
        "tt.call @f(%d) : (!tt.tensordesc<tensor<64xbf16, #shared>) -> ()",
        "%r = ttg.local_alloc : () -> !ttg.memdesc<4xf32, #shared, #blocked, mutable>",
        "%r = ttg.local_load %t token %u : " + f"{TILE_TEXT} -> {MATRIX_TEXT}",
        f"ttng.wait_barrier %b, %i, %p deps %t : {BARRIER_TEXT}, {TILE_TEXT}",
        "scf.yield %a, %b : i32",
        "scf.for unsigned %i = %a to %b step %c : i32 {\n}",
        '%r = tt.elementwise_inline_asm "\\z" {constraints = "", pure = true} %a : f32 -> i32',
    ],
)
def test_what_cannot_be_read_is_quoted(line):
    with pytest.raises(ValueError, match=re.escape(line.split("\n")[0])) as error:
        read_module("gpu.barrier loc(#loc)\n" + line)
    assert "TTGIR line 10:" in str(error.value)


def test_modules_that_cannot_be_read():
    whole = MODULE.format(body="")
    with pytest.raises(ValueError, match="0 public functions"):
        reader.read(whole.replace("public", "private"))
    with pytest.raises(ValueError, match="more than a module"):
        reader.read(whole + "\nmore")
    with pytest.raises(ValueError, match="#odd = 5"):
        reader.read("#odd = 5\n" + whole)
    with pytest.raises(ValueError, match="no operation"):
        reader.read(whole[: whole.index("tt.return")])


def operations_within(region):
    for operation in region.operations:
        yield operation
        for inner in operation.regions:
            yield from operations_within(inner)


@pytest.mark.parametrize(
    ("name", "partition_num_warps"),
    [
        ("scan: V block 128, normalised, packed, pieces", [4, 1, 1, 1, 1]),
        ("roles: V block 64, V first, pieces", [4, 4, 1, 1, 1, 1]),
        ("prepare: normalised, group 4", None),
    ],
)
def test_real_launches(name, partition_num_warps):
    pytest.importorskip("triton")
    from tests.gated_delta_rule import gluon_launches
    from tilecrew.device import aot

    text = aot.compile_launch(gluon_launches.make_launch(name)).asm["ttgir"]
    program = reader.read(text)
    operations = list(operations_within(program.kernel.region))
    roles = [operation for operation in operations if operation.name == "ttg.warp_specialize"]
    assert len(roles) == (partition_num_warps is not None)
    for operation in roles:
        assert operation.attributes["partition_num_warps"] == partition_num_warps
        assert len(operation.regions) == 1 + len(partition_num_warps)
        assert len(operation.attributes["requestedRegisters"]) == len(partition_num_warps)

    # Each operation ends in one line with a location, and so does the function; a "%" begins the line of results.
    lines = [line.strip() for line in text[text.index("  tt.func") :].split("\n") if not line.startswith(("#", "}"))]
    assert len(operations) + 1 == sum(" loc(" in line and line.endswith(")") for line in lines)
    assert sum(bool(operation.results) for operation in operations) == sum(line.startswith("%") for line in lines)

    # What is used is defined.
    regions = [program.kernel.region, *(region for operation in operations for region in operation.regions)]
    defined = {name for region in regions for name, _ in region.arguments}
    defined |= {name for operation in operations for name in operation.results}
    assert defined >= {name for operation in operations for name in operation.operands}
    assert {"k_desc"} <= set(program.kernel.argument_names)
    places = {operation.location for operation in operations if operation.name in ("tt.dot", "ttng.warp_group_dot")}
    assert places
    assert all(re.fullmatch(r"\w+\.py:\d+", place) for place in places)
