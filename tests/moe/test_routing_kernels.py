"""The kernels that build the tables: under Triton's interpreter in a process of its own, and compiled."""

import pytest
import torch

from tests.interpreter import run_interpreted
from tilecrew.moe import operators


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("moe/interpreted_routing.py")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("shape", "num_experts", "rank"),
    # Sizes of one, which Triton compiles as constants; fewer experts than ranks; the sizes of a large model.
    [((1, 1, 1), 1, 0), ((2, 1, 1), 1, 1), ((2, 1, 1), 3, 1), ((4, 5, 2), 3, 3), ((8, 4096, 10), 512, 1)],
)
def test_compiles_without_spills(shape, num_experts, rank, capability):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tilecrew.device import aot
    from tilecrew.moe import kernel_routing

    ids = torch.zeros(shape, dtype=torch.int32)
    tables = kernel_routing.Tables(*operators._routing_fake(ids, None, num_experts, rank, 128))
    sizes = kernel_routing.sizes_of(ids, num_experts, 128)
    keys = torch.empty(ids.numel(), dtype=torch.int64)
    scratch = kernel_routing.Scratch(keys, keys.new_empty(3, sizes.search))
    numbers = (keys.shape[0], keys.shape[0] // shape[0], tables.row_routes.shape[0], rank)
    for launch in (
        kernel_routing.keys_launch(ids, None, scratch, tables, numbers, sizes),
        kernel_routing.keys_launch(
            ids.long(), torch.zeros(shape[0], dtype=torch.int32), scratch, tables, numbers, sizes
        ),
        kernel_routing.experts_launch(scratch, tables, numbers, sizes),
        kernel_routing.rows_launch(scratch, keys, tables, numbers, sizes),
    ):
        compiled = aot.compile_launch(launch, GPUTarget("cuda", capability, 32))
        assert aot.resources(compiled).local_memory_instructions == 0
