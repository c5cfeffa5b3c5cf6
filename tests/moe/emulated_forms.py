"""Forms of the expert-parallel layer that are asked for, and inputs at its borders, by emulated ranks on one GPU.

Run by test_gpu.py, in a process with enough hardware queues, as emulated_gpu.py is.
"""

import pytest
import torch
import torch.distributed as dist

from tests.moe import world_cases
from tests.moe.world_cases import Case

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tests.moe import canaries
from tests.moe.emulated_gpu import BF16, check, dispatch, emulate  # noqa: F401  (dispatch: a fixture)
from tilecrew.moe.schedule import combine_options

pytestmark = pytest.mark.gpu


def pull_beside(monkeypatch):
    monkeypatch.setattr("tilecrew.moe.workspace.pulls_beside", lambda capacity, is_emulated: True)


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize(
    ("form", "combine", "is_beside"),
    [("gather", "push", False), ("warps", "pull", False), ("blocks", "pull", False), ("blocks", "pull", True)],
)
def test_kernels_write_into_their_buffers_only(form, combine, is_beside, monkeypatch):
    """Those of three ranks, of which the last one has no experts in one case."""
    if form != "blocks":
        needs_hopper()
    if is_beside:
        pull_beside(monkeypatch)
    with canaries.around_parallel_tensors(monkeypatch) as found:
        worlds = emulate(3)
        for name in world_cases.FEW_NAMES:
            check(worlds, world_cases.cases(3, BF16, "cuda")[name], form, combine)
    torch.cuda.synchronize()
    canaries.check(found)


@pytest.mark.parametrize("num_comm_blocks", [1, 8])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_numbers_of_communication_blocks(size, num_comm_blocks, monkeypatch):
    """One that has all the work, and half of the multiprocessors of a rank of eight; they dispatch rows, and pull
    results beside the second GEMM."""
    pull_beside(monkeypatch)
    worlds = emulate(size)
    lengths = [300, 129, 0, 40, 7, 128, 64, 1][:size]
    case = Case(lengths, 4, 9, 520, 136, kind="some missing", dtype=BF16, device="cuda")
    check(worlds, case, "blocks", "pull", num_comm_blocks=num_comm_blocks)
    for world in worlds:
        workspace = world.workspaces[case.sizes]
        assert (workspace.dispatch, workspace.num_comm_blocks) == ("blocks", num_comm_blocks)
        assert (workspace.staged is None) == (size == 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["shared experts", "shared experts, halves"])
def test_shared_experts(size, name, dispatch):  # noqa: F811
    """With their gradients, and that of x, which has two parts."""
    case = world_cases.cases(size, BF16, "cuda")[name]
    assert case.shared
    check(emulate(size), case, dispatch)


@pytest.mark.parametrize("combine", ["push", "pull"])
def test_more_routes_than_a_loop_is_unrolled_for(combine):
    from tilecrew.moe.kernel_gemm_combine import MAX_UNROLLED_ROUTES

    if combine == "push":
        needs_hopper()
    worlds = emulate(2)
    case = Case([140, 33], 20, 24, 136, 64, kind="some missing", dtype=BF16, device="cuda")
    assert case.sizes.top_k > MAX_UNROLLED_ROUTES.value
    assert combine_options(case.capacity, case.sizes.top_k, worlds[0].num_sms)["TOKENS"] > 1
    check(worlds, case, combine=combine)


@pytest.mark.parametrize("combine", ["push", "pull"])
def test_weights_of_missing_routes_may_be_nan(combine):
    if combine == "push":
        needs_hopper()
    case = Case([40, 130], 3, 7, 136, 64, kind="some missing", dtype=BF16, device="cuda")
    check(emulate(2), world_cases.with_nan_weights(case), combine=combine)
