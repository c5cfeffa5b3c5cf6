"""Which form of dispatch runs where."""

import dataclasses

import pytest

from tests.grouped_gemm.problems import H200
from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm.schedule import SHARED_MEMORY, Problem, pick
from tilecrew.moe.schedule import (
    BLOCK_BYTES_PER_SECOND,
    LINK_BYTES_PER_SECOND,
    MOVER_BYTES,
    DispatchLoad,
    combine_options,
    pick_comm_blocks,
    pick_dispatch,
    pulls_results,
    ring_options,
    with_mover,
)

PROBLEM = Problem(16384, 8, 2048, 2048, "bfloat16", has_gate=True)
SM_120 = dataclasses.replace(H200, capability=(12, 0), name="RTX")


def test_choices():
    assert pick_dispatch(None, PROBLEM, H200, 2048) == "blocks"
    assert pick_dispatch(None, PROBLEM, H200, 511) == "warps"
    assert pick_dispatch("blocks", PROBLEM, H200, 1) == "blocks"
    assert pick_dispatch("warps", PROBLEM, H200, 8192) == "warps"
    assert pick_dispatch(None, PROBLEM, SM_120, 1) == "blocks"
    assert pick_dispatch(None, PROBLEM, hardware_of("cpu"), 2048) is None
    with pytest.raises(ValueError, match=r"dispatch='warps' cannot run: it needs compute capability 9\.0"):
        pick_dispatch("warps", PROBLEM, SM_120, 2048)


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


def test_combine_options():
    """Most blocks have a group, a thread 16 or 32 bytes of each route, and no group more than 128 rows."""
    few_routes = [(8192, 8, 132, 16), (1024, 8, 132, 8), (1, 8, 132, 1), (1024, 8, 33, 16)]
    many_routes = [(8192, 10, 132, 8), (8192, 128, 132, 1)]
    for num_tokens, top_k, num_blocks, tokens in (*few_routes, *many_routes):
        options = combine_options(num_tokens, top_k, num_blocks)
        assert options["TOKENS"] == tokens
        assert options["TOKENS"] * options["COLUMNS"] // (32 * options["num_warps"]) in (8, 16)
        assert options["maxnreg"] * 32 * options["num_warps"] <= 65536


def load_of(num_tokens, top_k, num_experts, hidden_size, intermediate_size, num_ranks=2):
    """Of a rank that has its share of the experts."""
    groups = num_experts // num_ranks
    problem = Problem(16384, groups, hidden_size, 2 * intermediate_size, "bfloat16", has_gate=True)
    return DispatchLoad(problem, num_tokens * top_k, num_ranks)


DEEPSEEK, QWEN = (8, 256, 7168, 2048), (10, 512, 2048, 512)


def test_communication_blocks_have_the_least_time():
    for load in (load_of(2048, *DEEPSEEK), load_of(8192, *DEEPSEEK), load_of(8192, *QWEN), load_of(1, *QWEN)):
        for num_sms in (132, 66, 2):
            chosen = pick_comm_blocks(load, num_sms)
            assert 1 <= chosen <= min(32, num_sms - 1)
            times = [load.seconds(number, num_sms) for number in range(1, min(32, num_sms - 1) + 1)]
            assert load.seconds(chosen, num_sms) == min(times)
    assert pick_comm_blocks(load_of(1, *QWEN), 1) == 1


def test_more_blocks_where_rows_bind():
    """Qwen3-Next brings more bytes for a FLOP."""
    few, many = pick_comm_blocks(load_of(8192, *DEEPSEEK), 132), pick_comm_blocks(load_of(8192, *QWEN), 132)
    assert 2 <= few < many


def test_the_parts_of_the_model():
    load = load_of(8192, *QWEN)
    num_bytes = 8192 * 10 * 2048 * 2
    assert load.seconds(1, 132) == pytest.approx(num_bytes / BLOCK_BYTES_PER_SECOND)
    # Behind a link half of the rows take as long as the link needs for them, however many blocks there are.
    far = dataclasses.replace(load, problem=dataclasses.replace(load.problem, num_columns=8))
    assert far.seconds(32, 132) == pytest.approx(num_bytes / 2 / LINK_BYTES_PER_SECOND)
    near = dataclasses.replace(far, num_ranks=1)
    assert near.seconds(32, 132) == pytest.approx(num_bytes / (32 * BLOCK_BYTES_PER_SECOND))
    # Weights bind where an expert has a row.
    assert load_of(1, *QWEN).gemm_seconds == pytest.approx(10 * 2048 * 1024 * 2 / 4e12)


def test_ring_options():
    """Chunks of some 512 KB, whole tiles of them, and as many slots as shared memory has."""
    small = dataclasses.replace(SM_120, shared_memory_bytes=101_376)
    for num_columns, chunk in ((8, 128), (2048, 128), (4096, 64), (7168, 32), (2**16, 16)):
        options = ring_options(num_columns, H200)
        assert options["CHUNK"] == chunk
        assert 128 % options["CHUNK"] == options["CHUNK"] % options["ROWS"] == 0
        for hardware, slots in ((H200, 6), (small, 3)):
            options = ring_options(num_columns, hardware)
            assert options["SLOTS"] == slots
            assert options["ROWS"] * options["COLUMNS"] * 2 * slots <= hardware.shared_memory_bytes
