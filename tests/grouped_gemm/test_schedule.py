"""Schedules of the grouped GEMM: pure Python."""

from dataclasses import replace

import pytest

from tests.grouped_gemm.problems import H200
from tilecrew._hardware import Hardware
from tilecrew.grouped_gemm.schedule import (
    MAX_GROUPS,
    SHARED_MEMORY,
    SMALL_SHARED_MEMORY,
    STAGES,
    Problem,
    hopper_tiles,
    mma_sync_tiles,
    pick,
    supports,
    table_length,
)

PROBLEM = Problem(16384, 32, 2048, 7168, "bfloat16")
A100 = replace(H200, capability=(8, 0), name="NVIDIA A100")
RTX_5090 = replace(H200, capability=(12, 0), num_sms=170, name="NVIDIA GeForce RTX 5090")
CPU = Hardware("cpu", "cpu", name="cpu")


@pytest.mark.parametrize("num_rows", [1, 128, 4096, 16384, 2**20])
@pytest.mark.parametrize("num_groups", [1, 2, 8, 126, 127, 254, 255, 256, 512, MAX_GROUPS])
@pytest.mark.parametrize("num_columns", [8, 128, 136, 1536, 7168])
def test_every_tile_fits_shared_memory_with_stages_to_overlap(num_columns, num_groups, num_rows):
    tiles = hopper_tiles(Problem(num_rows, num_groups, 2048, num_columns, "bfloat16"), 132)
    assert tiles.shared_memory_bytes <= SHARED_MEMORY
    assert tiles.num_stages in STAGES
    assert tiles.num_stages >= 4
    assert tiles.table_length >= num_groups + 2
    assert tiles.table_length & (tiles.table_length - 1) == 0


def test_tiles():
    """The measured choices: 128 x 256 in four stages; 64 rows where groups are small; 128 columns to fill the SMs."""
    assert shape(PROBLEM) == (128, 256, 4)
    assert shape(replace(PROBLEM, num_groups=128, num_rows=4096, num_columns=1536)) == (64, 256, 4)
    assert shape(replace(PROBLEM, num_groups=256)) == (64, 256, 4)
    assert shape(replace(PROBLEM, num_groups=256, has_gate=True)) == (128, 256, 4)
    assert shape(replace(PROBLEM, num_groups=256, notifies=True)) == (128, 256, 4)
    assert shape(replace(PROBLEM, num_rows=1, num_columns=1536)) == (64, 128, 8)
    assert shape(replace(PROBLEM, num_groups=1, num_rows=1024, num_columns=1536)) == (128, 128, 4)


@pytest.mark.parametrize("num_groups", [1, 126, 127, 254, 255, MAX_GROUPS])
def test_tiles_of_mma_sync_fit_99_kilobytes(num_groups):
    tiles = mma_sync_tiles(replace(PROBLEM, num_groups=num_groups))
    assert tiles.shared_memory_bytes <= SMALL_SHARED_MEMORY
    assert (tiles.block_m, tiles.block_n, tiles.block_k) == (128, 128, 64)
    assert tiles.num_stages == (3 if num_groups <= 254 else 2)
    assert tiles.table_length >= num_groups + 2


def shape(problem):
    tiles = hopper_tiles(problem, 132)
    return tiles.block_m, tiles.block_n, tiles.num_stages


def test_no_more_blocks_than_tiles():
    assert pick(replace(PROBLEM, num_rows=1, num_columns=256), H200).num_programs == 2
    assert pick(PROBLEM, H200).num_programs == 132


@pytest.mark.parametrize("num_rows", [1, 4096, 2**17])
def test_roles_that_gather_fit_the_registers(num_rows):
    """Three roles of four warps, in blocks of 128 rows however few rows groups have."""
    tiles = hopper_tiles(replace(PROBLEM, num_rows=num_rows, gathers=True), 132)
    assert tiles.block_m == 128
    assert tiles.consumer_registers % 8 == tiles.load_registers % 8 == tiles.entry_registers % 8 == 0
    assert 2 * tiles.consumer_registers + tiles.load_registers <= 3 * tiles.entry_registers <= 65536 // 128


def test_table_length():
    assert [table_length(n) for n in (1, 126, 127, 254, 255, MAX_GROUPS)] == [128, 128, 256, 256, 512, 1024]


def test_choices_and_their_reasons():
    assert pick(PROBLEM, H200).implementation == "hopper"
    assert "NVIDIA H200" in str(pick(PROBLEM, H200))
    assert pick(PROBLEM, A100).implementation == "portable"
    assert pick(PROBLEM, RTX_5090).implementation == "mma_sync"
    assert pick(replace(PROBLEM, has_gate=True, notifies=True), RTX_5090).num_programs == 170
    assert pick(replace(PROBLEM, dtype="float32"), RTX_5090).implementation == "portable"
    assert "128 x 128 x 64, 3 stages" in str(pick(PROBLEM, H200, "mma_sync"))
    assert "NVIDIA A100" in pick(PROBLEM, A100).reason
    assert pick(replace(PROBLEM, dtype="float32"), H200).implementation == "portable"
    assert pick(replace(PROBLEM, num_groups=MAX_GROUPS + 1), H200).implementation == "portable"
    assert pick(PROBLEM, CPU).implementation == "torch"


def test_a_forced_implementation_that_cannot_run_says_why():
    for name, problem, hardware, reason in (
        ("hopper", PROBLEM, A100, "compute capability 9.0"),
        ("hopper", replace(PROBLEM, dtype="float32"), H200, "bfloat16 or float16"),
        ("hopper", replace(PROBLEM, num_groups=2000), H200, "at most 1022 groups"),
        ("hopper", PROBLEM, replace(H200, has_triton=False), "Triton is not installed"),
        ("mma_sync", PROBLEM, A100, "compute capability 9.0 or 12.x"),
        ("mma_sync", replace(PROBLEM, dtype="float32"), RTX_5090, "bfloat16 or float16"),
        ("portable", replace(PROBLEM, notifies=True), A100, "no notifications"),
        ("portable", PROBLEM, replace(A100, capability=(7, 5)), "8.0 or newer"),
        ("portable", replace(PROBLEM, has_gate=True), A100, "no gates"),
        ("torch", PROBLEM, H200, "offs on the host"),
        ("mma_sync", replace(PROBLEM, gathers=True), RTX_5090, "it gathers no rows"),
        ("portable", replace(PROBLEM, gathers=True), A100, "it gathers no rows"),
        ("torch", replace(PROBLEM, gathers=True), CPU, "it gathers no rows"),
        ("hopper", replace(PROBLEM, gathers=True, notifies=True), H200, "no mover, no notifications"),
    ):
        assert reason in supports(name, problem, hardware)
        with pytest.raises(ValueError, match=f"implementation='{name}' cannot run: .*{reason}"):
            pick(problem, hardware, name)


def test_nothing_runs_a_gate_on_another_gpu():
    with pytest.raises(ValueError, match=r"no implementation can run .*portable: it has no gates"):
        pick(replace(PROBLEM, has_gate=True), A100)
