"""Which form of dispatch runs where."""

import dataclasses

import pytest
import torch

from tests.grouped_gemm.problems import H200
from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm.schedule import SHARED_MEMORY, Problem, pick
from tilecrew.moe.schedule import (
    BLOCK_ALONE_BYTES_PER_SECOND,
    BLOCK_BYTES_PER_SECOND,
    LINK_BYTES_PER_SECOND,
    MEMORY_BYTES_PER_SECOND,
    MOVER_BYTES,
    NUM_MOVERS,
    DispatchLoad,
    combine_options,
    copies_tokens,
    gathers,
    num_gemm_blocks,
    pick_combine,
    pick_dispatch,
    pulls_beside,
    ring_options,
    with_mover,
)

PROBLEM = Problem(16384, 8, 2048, 2048, "bfloat16", has_gate=True)
SM_120 = dataclasses.replace(H200, capability=(12, 0), name="RTX")


def load_of(num_tokens, top_k, num_experts, hidden_size, intermediate_size, num_ranks=2, is_emulated=False):
    """Of a rank that has its share of the experts."""
    groups = num_experts // num_ranks
    problem = Problem(16384, groups, hidden_size, 2 * intermediate_size, "bfloat16", has_gate=True)
    num_sms = 132 // num_ranks if is_emulated else 132
    return DispatchLoad(problem, num_tokens * top_k, 1 if is_emulated else num_ranks, num_sms, num_sms / 132)


DEEPSEEK, QWEN_30B, QWEN_NEXT = (8, 256, 7168, 2048), (8, 128, 2048, 768), (10, 512, 2048, 512)


def test_choices():
    """Near memory by what was measured; between GPUs blocks; for few tokens movers, where they can run."""
    for num_ranks in (1, 2, 4, 8):
        for shape, form in ((DEEPSEEK, "blocks"), (QWEN_30B, "warps"), (QWEN_NEXT, "warps")):
            load = load_of(1024, *shape, num_ranks, is_emulated=True)
            assert pick_dispatch(None, load, H200, 1024) == form
            assert pick_dispatch(None, load, H200, 511) == "warps"
            assert pick_dispatch(None, load, SM_120, 511) == "blocks"
            if num_ranks > 1:
                assert pick_dispatch(None, load_of(1024, *shape, num_ranks), H200, 1024) == "blocks"
    load = load_of(1024, *QWEN_30B)
    assert pick_dispatch("blocks", load, H200, 1) == "blocks"
    assert pick_dispatch("warps", load, H200, 8192) == "warps"
    assert pick_dispatch(None, load, hardware_of("cpu"), 2048) is None
    with pytest.raises(ValueError, match=r"dispatch='warps' cannot run: it needs compute capability 9\.0"):
        pick_dispatch("warps", load, SM_120, 2048)


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


@pytest.mark.parametrize(
    ("dispatch", "hardware", "expected"),
    [
        (None, H200, True),
        ("gather", H200, True),
        ("warps", H200, False),
        ("blocks", H200, False),
        (None, SM_120, False),
        (None, hardware_of(torch.device("cpu")), False),
    ],
)
def test_tokens_are_gathered_where_the_kernel_can(dispatch, hardware, expected):
    assert gathers(dispatch, PROBLEM, hardware) == expected


def test_gathering_that_cannot_run():
    with pytest.raises(ValueError, match="dispatch='gather' cannot run: "):
        gathers("gather", PROBLEM, SM_120)
    # Rows that gradients need are moved as without a choice.
    load = DispatchLoad(PROBLEM, 16384, 1, 132)
    assert pick_dispatch("gather", load, H200, 16384) == pick_dispatch(None, load, H200, 16384)


def test_results_are_pushed_where_the_kernel_can():
    assert pick_combine(None, PROBLEM, H200) == "push"
    assert pick_combine("pull", PROBLEM, H200) == "pull"
    assert pick_combine(None, PROBLEM, hardware_of(torch.device("cpu"))) is None
    assert pick_combine(None, PROBLEM, SM_120) == "pull"
    with pytest.raises(ValueError, match="combine='push' cannot run: "):
        pick_combine("push", PROBLEM, SM_120)
    with pytest.raises(ValueError, match="combine must be None or one of push, pull, got 'send'"):
        pick_combine("send", PROBLEM, H200)
    with pytest.raises(ValueError, match="combine must be None on the CPU"):
        pick_combine("pull", PROBLEM, hardware_of(torch.device("cpu")))


@pytest.mark.parametrize("implementation", ["mma_sync", "portable"])
def test_others_have_no_rows_with_addresses(implementation):
    problem = dataclasses.replace(PROBLEM, scatters=True, has_gate=False)
    with pytest.raises(ValueError, match="it scatters no rows"):
        pick(problem, H200, implementation)


def test_results_are_pulled_beside_where_they_are_far_and_many():
    assert pulls_beside(512, is_emulated=False)
    assert not pulls_beside(511, is_emulated=False)
    assert not pulls_beside(8192, is_emulated=True)


def test_tokens_are_copied_where_most_of_them_are_some():
    assert copies_tokens(8192, 8192)
    assert copies_tokens(1024, 2048)
    assert not copies_tokens(1023, 1023)
    assert not copies_tokens(1024, 2049)
    assert not copies_tokens(0, 8192)


def test_combine_options():
    """Most blocks have a group, a thread 16 or 32 bytes of each route, and no group more than 128 rows."""
    few_routes = [(8192, 8, 132, 16), (1024, 8, 132, 8), (1, 8, 132, 1), (1024, 8, 33, 16)]
    many_routes = [(8192, 10, 132, 8), (8192, 128, 132, 1)]
    for num_tokens, top_k, num_blocks, tokens in (*few_routes, *many_routes):
        options = combine_options(num_tokens, top_k, num_blocks)
        assert options["TOKENS"] == tokens
        assert options["TOKENS"] * options["COLUMNS"] // (32 * options["num_warps"]) in (8, 16)
        assert options["maxnreg"] * 32 * options["num_warps"] <= 65536


@pytest.mark.parametrize("num_tokens", [1, 64, 2048, 8192])
@pytest.mark.parametrize("shape", [DEEPSEEK, QWEN_30B, QWEN_NEXT])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("is_emulated", [True, False])
def test_communication_blocks_are_as_few_as_keep_up(num_tokens, shape, num_ranks, is_emulated):
    load = load_of(num_tokens, *shape, num_ranks, is_emulated)
    number = load.num_comm_blocks
    assert 1 <= number <= min(32, load.num_sms - 1)

    def keeps_up(number):
        rows = load.num_bytes / (number * BLOCK_BYTES_PER_SECOND)
        return rows <= (1 + 1e-9) * max(load.gemm_seconds, load.link_seconds)

    assert keeps_up(number)
    # None to spare but those that would make the GEMM's grid an odd one.
    assert number == 1 or not keeps_up(number - 1) or num_gemm_blocks(load.num_sms, number - 1) == load.num_sms - number


def test_grids_are_multiples_of_a_band_where_that_costs_little():
    for num_sms, others, wanted in (
        (132, 0, 132),
        (132, 3, 128),
        (132, 4, 128),
        (132, 5, 124),
        (66, 0, 64),
        (33, 0, 32),
        (33, 2, 31),
        (16, 1, 15),
    ):
        assert num_gemm_blocks(num_sms, others) == wanted


def test_communication_blocks_of_few_multiprocessors():
    assert dataclasses.replace(load_of(1, *QWEN_NEXT), num_sms=1).num_comm_blocks == 1
    assert dataclasses.replace(load_of(8192, *QWEN_NEXT), num_sms=2).num_comm_blocks == 1


def test_more_blocks_where_rows_bind():
    """Qwen3-Next brings more bytes for a FLOP."""
    few, many = load_of(8192, *DEEPSEEK).num_comm_blocks, load_of(8192, *QWEN_NEXT).num_comm_blocks
    assert 2 <= few < many


def test_the_parts_of_the_model():
    load = load_of(8192, *QWEN_NEXT)
    assert load.num_padded_rows == 8192 * 10 + 256 * 64
    assert load.num_bytes == load.num_padded_rows * 4096
    # Four column tiles: 33 row blocks for 132 multiprocessors.
    assert load.num_first_bytes == 33 * 128 * 4096
    first = load.num_first_bytes / BLOCK_ALONE_BYTES_PER_SECOND
    assert load.seconds(1) == pytest.approx(load.num_bytes / BLOCK_BYTES_PER_SECOND + first)
    assert load.seconds(32) == pytest.approx(load.gemm_seconds * 132 / 100 + first / 32)
    # Behind a link half of the rows take as long as the link needs for them, however many blocks there are.
    far = dataclasses.replace(load, problem=dataclasses.replace(load.problem, num_columns=8))
    assert far.link_seconds == pytest.approx(8192 * 10 * 4096 / 2 / LINK_BYTES_PER_SECOND)
    assert dataclasses.replace(far, num_ranks=1).link_seconds == 0
    # Weights bind where an expert has a row; half of a GPU has half of its throughput.
    few = load_of(1, *QWEN_NEXT)
    elements = 10 * 2048 * 1024 + few.num_padded_rows * (2048 + 512)
    assert few.gemm_seconds == pytest.approx(2 * elements / MEMORY_BYTES_PER_SECOND)
    assert dataclasses.replace(few, share=0.5).gemm_seconds == pytest.approx(2 * few.gemm_seconds)


def test_ring_options():
    """Chunks of some 128 KB, whole tiles of them, and as many slots as shared memory has."""
    small = dataclasses.replace(SM_120, shared_memory_bytes=101_376)
    tiny = dataclasses.replace(SM_120, shared_memory_bytes=49_152)
    for num_columns, chunk in ((8, 128), (512, 128), (2048, 32), (4096, 16), (7168, 8), (2**16, 8)):
        options = ring_options(num_columns, H200)
        assert options["CHUNK"] == chunk
        assert 128 % options["CHUNK"] == options["CHUNK"] % options["ROWS"] == 0
        for hardware, rows in ((H200, 8), (small, 4), (tiny, 1)):
            options = ring_options(num_columns, hardware)
            assert (options["ROWS"], options["SLOTS"]) == (rows, 3)
            assert NUM_MOVERS * 3 * rows * options["COLUMNS"] * 2 <= hardware.shared_memory_bytes
