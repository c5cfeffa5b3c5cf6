"""Which form of dispatch runs where."""

import dataclasses

import pytest

from tests.grouped_gemm.problems import H200
from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm.schedule import SHARED_MEMORY, Problem, pick
from tilecrew.moe.schedule import (
    MOVER_BYTES,
    combine_options,
    num_blocks_of_link,
    pick_dispatch,
    pulls_results,
    with_mover,
)

PROBLEM = Problem(16384, 8, 2048, 2048, "bfloat16", has_gate=True)
SM_120 = dataclasses.replace(H200, capability=(12, 0), name="RTX")


def test_choices():
    assert pick_dispatch(None, PROBLEM, H200, is_far=False) == "warps"
    assert pick_dispatch(None, PROBLEM, H200, is_far=True) == "blocks"
    assert pick_dispatch("warps", PROBLEM, H200, is_far=True) == "warps"
    assert pick_dispatch("blocks", PROBLEM, H200, is_far=False) == "blocks"
    assert pick_dispatch(None, PROBLEM, SM_120, is_far=False) == "blocks"
    assert pick_dispatch(None, PROBLEM, hardware_of("cpu"), is_far=False) is None
    with pytest.raises(ValueError, match=r"dispatch='warps' cannot run: it needs compute capability 9\.0"):
        pick_dispatch("warps", PROBLEM, SM_120, is_far=True)


@pytest.mark.parametrize("num_groups", [1, 8, 256, 1022])
def test_tiles_leave_the_mover_its_slots(num_groups):
    problem = dataclasses.replace(PROBLEM, num_groups=num_groups)
    tiles = pick(with_mover(problem), H200).tiles
    assert tiles.mover_bytes == MOVER_BYTES
    assert tiles.block_m == 128
    assert tiles.shared_memory_bytes <= SHARED_MEMORY
    assert tiles.num_stages >= 3
    assert pick(problem, H200).tiles.mover_bytes == 0


def test_mma_sync_has_no_mover():
    with pytest.raises(ValueError, match="it has no mover"):
        pick(with_mover(PROBLEM), H200, "mma_sync")


def test_results_are_pulled_where_they_are_far_and_many():
    assert pulls_results(512, is_emulated=False)
    assert not pulls_results(511, is_emulated=False)
    assert not pulls_results(8192, is_emulated=True)


def test_communication_blocks_are_those_that_the_link_needs():
    """Fewer with more ranks, of whose rows the own share is smaller; few on a small GPU."""
    assert [num_blocks_of_link(size, 132) for size in (2, 4, 8)] == [32, 21, 18]
    assert num_blocks_of_link(2, 16) == 4
    assert num_blocks_of_link(2, 2) == 1


def test_combine_options():
    """Most blocks have a group, a thread 16 or 32 bytes of each route, and no group more than 128 rows."""
    few_routes = [(8192, 8, 132, 16), (1024, 8, 132, 8), (1, 8, 132, 1), (1024, 8, 33, 16)]
    many_routes = [(8192, 10, 132, 8), (8192, 128, 132, 1)]
    for num_tokens, top_k, num_blocks, tokens in (*few_routes, *many_routes):
        options = combine_options(num_tokens, top_k, num_blocks)
        assert options["TOKENS"] == tokens
        assert options["TOKENS"] * options["COLUMNS"] // (32 * options["num_warps"]) in (8, 16)
        assert options["maxnreg"] * 32 * options["num_warps"] <= 65536
