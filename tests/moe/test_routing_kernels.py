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


def launches(ids, num_tokens, num_experts, rank):
    from tilecrew.moe import kernel_routing

    tables = kernel_routing.Tables(*operators._routing_fake(ids, num_tokens, num_experts, rank, 128))
    sizes = kernel_routing.sizes_of(ids, num_experts, 128)
    shape = kernel_routing.shape_of(ids, rank, tables)
    counts = kernel_routing.counts_for(ids, shape, sizes)
    return (
        kernel_routing.count_launch(ids, num_tokens, counts, tables, shape, sizes),
        kernel_routing.scan_launch(counts, shape, sizes),
        kernel_routing.rows_launch(ids, num_tokens, counts, tables, shape, sizes),
    )


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

    ids, num_tokens = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[0], dtype=torch.int32)
    for launch in (
        *launches(ids, None, num_experts, rank),
        *launches(ids.long(), num_tokens, num_experts, rank),
        *launches(ids, num_tokens.long(), num_experts, rank),
    ):
        compiled = aot.compile_launch(launch, GPUTarget("cuda", capability, 32))
        assert aot.resources(compiled).local_memory_instructions == 0


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "num_experts"), [((2, 8192, 8), 128), ((8, 1024, 10), 512)])
def test_programs_share_a_multiprocessor(shape, num_experts):
    """Programs wait for memory and for barriers of their own; others have to be there meanwhile."""
    pytest.importorskip("triton")
    from tilecrew.device import aot

    count, scan, rows = (
        aot.resources(aot.compile_launch(launch))
        for launch in launches(torch.zeros(shape, dtype=torch.int32), None, num_experts, 0)
    )
    # Of 65,536 registers, by threads of a program; shared memory is no limit.
    assert 65536 // (128 * count.registers) >= 8
    assert 65536 // (256 * scan.registers) >= 2
    assert 65536 // (128 * rows.registers) >= 8
    assert max(count.shared_memory_bytes, scan.shared_memory_bytes, rows.shared_memory_bytes) <= 8192
