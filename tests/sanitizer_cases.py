"""Every kernel once on small problems, to be run under compute-sanitizer: `python tests/sanitizer_cases.py`.

Partial chunks, packed sequences (an empty one among them), tails, pieces, states in both layouts, a padded pool; with
--grouped also grouped GEMMs with partial and empty groups, hooks and transposed weights. With --expert-parallel
instead of all that the expert-parallel layer.
"""

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import tilecrew
from tests.gated_delta_rule.hopper_checks import EVERYTHING, KERNELS, run_kernel, run_pieces
from tests.gated_delta_rule.kernel_checks import not_finite, random_recurrent_arguments, run_portable
from tests.grouped_gemm.problems import make
from tests.moe import gpu_ranks, serial_ranks
from tests.moe.world_cases import Case
from tilecrew.gated_delta_rule import kernel_forward_scan, kernel_recurrent
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.grouped_gemm import Bias, CountGate, NotifyRowBlock, SwiGLU, max_row_blocks
from tilecrew.moe.schedule import DISPATCHES
from tilecrew.parallel import World
from tilecrew.testing import random_arguments

PACKED = {"lengths": [1, 64, 0, 70], "tail": 9}
HOPPER = {
    "roles 128": {**PACKED, "use_qk_l2norm": True},
    "roles 64": {"num_tokens": 70, "batch": 2, "state_v_first": True, "dtype": torch.float16},
    "roles 32": PACKED,
    "scan 64": PACKED,
    "scan 128": {**PACKED, "use_qk_l2norm": True},
    "scan 64 beside": {**PACKED, "use_qk_l2norm": True},
}


def check(result, kernel: str) -> None:
    for name, x in vars(result).items():
        if x is not None and not x.isfinite().all():
            raise AssertionError(f"{kernel}: {name}{not_finite(x)}")


def check_grouped_gemms() -> None:
    """Every implementation that runs here, with all hooks where it has them, and the gradients."""
    lengths, tail = [130, 0, 1, 64], 5
    num_rows = sum(lengths) + tail
    for transposed in (False, True):
        x, w, offs = make(lengths, tail, 72, 272, device="cuda", transposed=transposed)
        x = torch.where(x.isnan(), 0, x)
        for implementation in ("hopper", "mma_sync", "portable"):
            options = {"implementation": implementation}
            assert tilecrew.grouped_gemm(x, w, offs, **options).isfinite().all()
            if implementation == "portable":
                continue
            rows = torch.zeros(max_row_blocks(num_rows, 4), dtype=torch.int32, device="cuda")
            notify = NotifyRowBlock(rows, epilogue=SwiGLU(8))
            assert tilecrew.grouped_gemm(x, w, offs, epilogue=notify, **options).isfinite().all()
            assert rows.tolist()[:4] == [128, 2, 1, 64]
            bias = Bias(torch.randn(4, 272, device="cuda"))
            assert tilecrew.grouped_gemm(x, w, offs, gate=CountGate(rows), epilogue=bias, **options).isfinite().all()
    x.requires_grad_()
    w.requires_grad_()
    tilecrew.grouped_gemm(x, w, offs).float().square().sum().backward()
    assert x.grad.isfinite().all() and w.grad.isfinite().all()


def check_expert_parallel() -> None:
    """Tails of rows and columns, a token without routes, an expert without rows; all forms of dispatch, results that
    are pushed, and such that are pulled: by combine, or by blocks that are launched in front of it."""
    for dispatch in DISPATCHES:
        for size in (1, 2):
            check_ranks(size, dispatch, "push")
    check_ranks(1, "warps", "pull")
    for is_beside in (False, True):
        with mock.patch("tilecrew.moe.workspace.pulls_beside", lambda capacity, is_emulated, found=is_beside: found):
            check_ranks(2, "warps", "pull")


def check_ranks(size: int, dispatch: str, combine: str) -> None:
    options = {"dtype": torch.bfloat16, "device": "cuda", "kind": "some missing"}
    case = Case([40, 131][:size], 3, 7, 136, 72, **options)
    worlds = World.emulated(size, device="cuda", timeout_seconds=30)
    wanted = case.expected()
    if size == 1:
        out, gradients = serial_ranks.forward_and_backward(worlds, case, dispatch, combine)
        gpu_ranks.check_forward(case, [out.detach()], wanted)
        gpu_ranks.check_gradients(case, 0, gradients, wanted)
    else:
        gpu_ranks.check_forward(case, serial_ranks.forward(worlds, case, dispatch, combine), wanted)


def main() -> None:
    if "--expert-parallel" in sys.argv:
        check_expert_parallel()
        torch.cuda.synchronize()
        return
    sizes = {"num_heads": 1, "num_value_heads": 2, "device": "cuda", **EVERYTHING}
    assert set(HOPPER) == set(KERNELS)
    for kernel, options in HOPPER.items():
        check(run_kernel(random_arguments(**{"dtype": torch.bfloat16, **sizes, **options}), kernel), kernel)
    whole = random_arguments(2, 130, dtype=torch.bfloat16, **sizes)
    # Sequence 0 is one piece, sequence 1 is not served: its outputs stay uninitialised.
    for kernel in ("roles 64", "scan 64", "scan 128"):
        assert run_pieces(whole, kernel, [(0, 0, 1), (0, 1, 3)]).o[0].isfinite().all()
    # Context parallelism: every piece one chunk. kernel_states writes zeros before its roles start and reads them in
    # the roles, which Triton's dispatch orders by barriers that racecheck does not connect.
    for options in (PACKED, {"num_tokens": 130, "batch": 2}) if "--pieces" in sys.argv else ():
        arguments = random_arguments(**{"dtype": torch.bfloat16, **sizes, **options})
        check(kernel_forward_scan.forward(arguments, Schedule("scan", 64, 64, "test", chunks_per_piece=1)), "pieces")
    for dtype, dim in ((torch.bfloat16, 128), (torch.float32, 20)):
        arguments = random_arguments(**PACKED, **sizes, dtype=dtype, key_dim=dim, value_dim=dim)
        check(run_portable(arguments), f"portable {dim}")
    for num_tokens, dims in ((1, (128, 128)), (3, (20, 12))):
        pool = {"pool": [2, -1, 0], "inplace_state": True, "output_final_state": True}
        arguments = random_recurrent_arguments(
            3, num_tokens, dims=dims, dtype=torch.bfloat16, device="cuda", gates=("g", "A_log", "dt_bias"), **pool
        )
        o, final_state = kernel_recurrent.forward(arguments)
        assert o.isfinite().all() and final_state.isfinite().all()
    if "--grouped" in sys.argv:  # its tables, too, are written before the roles start and read in them
        check_grouped_gemms()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
