"""Every kernel of expert parallelism, compiled for sm_90 without a GPU.

`python -m tests.moe.device_launches` prints {"triton": version, "found": {name: {"ptx": its PTX, "resources": what its
cubin uses} or the error's traceback}} as JSON.
"""

import dataclasses
import json
import sys
import traceback
from unittest import mock

import torch
import triton

from tests.grouped_gemm.problems import H200
from tilecrew.device import aot
from tilecrew.device.launch import Launch
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import BandGate, SwiGLU
from tilecrew.grouped_gemm.schedule import Problem, hopper_tiles
from tilecrew.moe import (
    crew_mover,
    fused,
    kernel_dispatch_gemm,
    kernel_gemm_combine,
    kernel_routing,
    one_rank,
    operators,
    schedule,
)
from tilecrew.parallel import World

I32, I64 = torch.zeros(4096, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
F32 = torch.zeros(4096)
HALF = torch.zeros(256, 64, dtype=torch.bfloat16)
SECOND = 10**9


def combine(weights, base, top_k, capacity=8192, where="peers"):
    tensors = (HALF, I64 if where == "peers" else HALF, I32, weights, base, HALF)
    flags = (None, None) if where == "returned" else (I32, I32)
    arguments = (tensors, (*flags, I32, I64), 0, 2, 128, 64, SECOND)
    options = {
        **schedule.combine_options(capacity, top_k, H200.num_sms),
        "TOP_K": top_k,
        "WHERE": where,
    }
    return Launch(kernel_gemm_combine.combine_kernel, 1, arguments, options)


def gemm(notifies, has_mover=False, epilogue=None, transposed=False):
    """What fused.launch_gemm launches, for one rank."""
    from tilecrew.moe.workspace import MoESizes, MoEWorkspace

    problem = Problem(16384, 8, 2048, 2048, "bfloat16", has_gate=not notifies, notifies=notifies)
    if has_mover:
        problem = schedule.with_mover(problem)
    tiles = hopper_tiles(problem, H200.num_sms)
    (world,) = World.emulated(1, device="cpu")
    workspace = MoEWorkspace(world, MoESizes(256, 2, 8, 64, 256, torch.bfloat16))
    x, w, offs = HALF, torch.zeros(8, 64, 512, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    if transposed:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    if notifies:
        hooks = kernel_grouped_gemm.hooks_of(None, fused.NotifySources(workspace))
    else:
        gate = BandGate(workspace.counters, offs)
        hooks = kernel_grouped_gemm.hooks_of(gate, epilogue)
    if has_mover:
        hooks = hooks._replace(
            mover=crew_mover.move_rows,
            mover_tensors=(x, I64, I32, offs, workspace.mover_sizes, HALF, workspace.counters, world.control.local),
            mover_slots=schedule.MOVER_SLOTS,
            mover_columns=schedule.MOVER_COLUMNS,
        )
    out = x.new_empty(x.shape[0], 512 // hooks.shrink)
    return kernel_grouped_gemm.launch(x, w, offs, out, tiles, 2, hooks, writes_tail=False)


def gemm_with_destination():
    """What fused.launch_gemm_with_destination launches."""
    x, w, offs = HALF, torch.zeros(8, 64, 512, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    tiles = hopper_tiles(Problem(16384, 8, 768, 2048, "bfloat16", scatters=True), H200.num_sms)
    hooks = kernel_grouped_gemm.Hooks(
        destination=kernel_gemm_combine.place_of_route, destination_tensors=(I32, HALF, I64, I32)
    )
    return kernel_grouped_gemm.launch(x, w, offs, x.new_empty(256, 512), tiles, 2, hooks, writes_tail=False)


def gemm_with_source():
    """What fused.launch_gemm_with_source launches."""
    w, offs = torch.zeros(128, 64, 512, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.int32)
    tiles = hopper_tiles(Problem(16384, 128, 2048, 1536, "bfloat16", gathers=True), H200.num_sms)
    hooks = kernel_grouped_gemm.hooks_of(None, SwiGLU(8))._replace(
        source=kernel_dispatch_gemm.place_of_token, source_tensors=(I32, I64, I32)
    )
    return kernel_grouped_gemm.launch(HALF, w, offs, HALF.new_empty(256, 256), tiles, 2, hooks, writes_tail=False)


def routing(number):
    """One of the kernels that build tables, for two ranks of Qwen3-30B."""
    ids = torch.zeros(2, 1024, 8, dtype=torch.int32)
    tables = kernel_routing.Tables(*operators._routing_fake(ids, None, 128, 1, 128))
    sizes, shape = kernel_routing.sizes_of(ids, 128, 128), kernel_routing.shape_of(ids, 1, tables)
    counts = kernel_routing.counts_for(ids, shape, sizes)
    return (
        lambda: kernel_routing.count_launch(ids, None, counts, tables, shape, sizes),
        lambda: kernel_routing.scan_launch(counts, shape, sizes),
        lambda: kernel_routing.rows_launch(ids, None, counts, tables, shape, sizes),
    )[number]()


def gemm_of_own_tokens(top_k, epilogue, transposed=False):
    """What the layer without a World launches, on tensors large enough for the tiles of a large call."""
    x, row_routes = HALF.new_empty(2048, 64), torch.zeros(2048 * top_k, dtype=torch.int32)
    w, offs = HALF.new_empty(128, 64, 1024), torch.zeros(128, dtype=torch.int32)
    if transposed:
        w = HALF.new_empty(128, 1024, 64).transpose(1, 2)
    out = HALF.new_empty(2048 * top_k, 1024 if epilogue is None else 512)
    with mock.patch.object(one_rank, "hardware_of", return_value=H200):
        return one_rank.gather_gemm_launch(x, row_routes, offs, w, out, top_k, epilogue)


LAUNCHES = {
    "routing: count": lambda: routing(0),
    "routing: scan": lambda: routing(1),
    "routing: rows": lambda: routing(2),
    "dispatch": lambda: Launch(
        kernel_dispatch_gemm.dispatch_kernel,
        1,
        ((HALF, I64, HALF, I32, I32, I32, I32), 8, 64),
        schedule.ring_options(7168, H200),
    ),
    "bring": lambda: Launch(
        kernel_dispatch_gemm.bring_kernel,
        1,
        ((HALF, I64, I32, I64), HALF, 0, 2, 256, 0, 4, 64),
        {"TOP_K": 10, **schedule.BRING},
    ),
    "share": lambda: Launch(
        kernel_dispatch_gemm.share_kernel,
        1,
        (I64, F32, I32, F32, I32, I32, 128, 128, 8, 64),
        {"num_warps": 4, "BLOCK": 1024},
    ),
    "tables": lambda: Launch(
        kernel_dispatch_gemm.tables_kernel, 1, (I32, I64, F32, I64, I32, F32, 512), {"num_warps": 4, "BLOCK": 1024}
    ),
    "values": lambda: Launch(
        kernel_dispatch_gemm.values_kernel, 1, (F32, I64, I32, I32, F32, 512), {"num_warps": 4, "BLOCK": 1024}
    ),
    "combine": lambda: combine(F32, None, 8),
    "combine behind a pull": lambda: combine(F32, None, 8, where="staged"),
    "combine behind a push": lambda: combine(F32, None, 8, where="returned"),
    "pull": lambda: Launch(
        kernel_gemm_combine.pull_kernel,
        1,
        ((HALF, I64, HALF, I32), (I32, I32, I32, I64), 0, 2, 1024, 64, SECOND),
        schedule.ring_options(2048, H200),
    ),
    "combine of a token": lambda: combine(F32, HALF, 8, 1),
    "combine with base, 10 routes": lambda: combine(F32, HALF, 10),
    "combine without weights, 20 routes": lambda: combine(None, None, 20),
    "GEMM behind dispatch": lambda: gemm(False, epilogue=SwiGLU(8)),
    "GEMM with movers": lambda: gemm(False, has_mover=True, epilogue=SwiGLU(8)),
    "GEMM with movers, transposed": lambda: gemm(False, has_mover=True, transposed=True),
    "GEMM in front of combine": lambda: gemm(True),
    "GEMM with destination": gemm_with_destination,
    "GEMM with source": gemm_with_source,
    "GEMM with source, own tokens": lambda: gemm_of_own_tokens(8, SwiGLU(8)),
    "GEMM with source, own tokens, 16 routes, transposed": lambda: gemm_of_own_tokens(16, None, transposed=True),
    "GEMM with source, own tokens, one route": lambda: gemm_of_own_tokens(1, None),
}


def main() -> None:
    found = {}
    for name, make in LAUNCHES.items():
        try:
            compiled = aot.compile_launch(make())
            found[name] = {"ptx": compiled.asm["ptx"], "resources": dataclasses.asdict(aot.resources(compiled))}
        except Exception:  # the test of this launch shows it; those of the others still run
            found[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
