"""Schedules are pure Python: every choice can be tested for every device from here."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilecrew._hardware import Hardware, hardware_of
from tilecrew.gated_delta_rule import hopper_times
from tilecrew.gated_delta_rule.operators import problem_of
from tilecrew.gated_delta_rule.schedule import (
    IMPLEMENTATIONS,
    Problem,
    hopper_microseconds,
    hopper_variant,
    pick,
    pick_recurrent,
    supports,
)
from tilecrew.testing import random_arguments

ROOT = Path(__file__).parents[2]
H200 = Hardware("cuda", "cuda", (9, 0), 132, 232448, "NVIDIA H200")
A100 = Hardware("cuda", "cuda", (8, 0), 108, 166912, "NVIDIA A100")
RTX_5090 = Hardware("cuda", "cuda", (12, 0), 170, 101376, "NVIDIA GeForce RTX 5090")
V100 = Hardware("cuda", "cuda", (7, 0), 80, 98304, "NVIDIA V100")
MI300 = Hardware("cuda", "hip", (0, 0), 304, 65536, "AMD Instinct MI300X")
CPU = Hardware("cpu", "cpu", name="cpu")
ALL_HARDWARE = (H200, A100, RTX_5090, V100, MI300, CPU)
USUAL = Problem(1, 8192, 1, 16, 32, 128, 128, "bfloat16")


def problems():
    for dtype, key_dim, value_dim, chunk_size, is_aligned, requires_gradient in itertools.product(
        ("bfloat16", "float16", "float32", "float64"),
        (16, 128, 300),
        (64, 128, 257),
        (16, 64),
        (True, False),
        (True, False),
    ):
        yield Problem(2, 1000, 2, 4, 8, key_dim, value_dim, dtype, chunk_size, is_aligned, requires_gradient)


@pytest.mark.parametrize("hardware", ALL_HARDWARE, ids=lambda hardware: hardware.name)
def test_the_choice_can_run_and_says_why(hardware):
    for problem in problems():
        schedule = pick(problem, hardware)
        assert supports(schedule.implementation, problem, hardware) is None
        assert schedule.reason
        assert str(schedule).startswith(f"{schedule.implementation}, V block {schedule.block_v}, chunk ")
        assert schedule.chunk_size == problem.chunk_size


@pytest.mark.parametrize("hardware", ALL_HARDWARE, ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forcing_runs_it_or_raises_with_the_limit(implementation, hardware):
    for problem in problems():
        limit = supports(implementation, problem, hardware)
        if limit is None:
            assert pick(problem, hardware, implementation).implementation == implementation
        else:
            with pytest.raises(ValueError) as caught:
                pick(problem, hardware, implementation)
            assert limit in str(caught.value)
            assert repr(implementation) in str(caught.value)


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (H200, "scan"),
        (A100, "portable"),
        (RTX_5090, "portable"),
        (MI300, "portable"),
        (V100, "chunked"),
        (CPU, "chunked"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_usual_problem(hardware, expected):
    assert pick(USUAL, hardware).implementation == expected


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({"dtype": "float32"}, "portable", "it needs bfloat16 or float16, q is float32"),
        ({"dtype": "float64"}, "chunked", "q is float64"),
        ({"key_dim": 64}, "portable", "it needs K = V = 128, got K = 64, V = 128"),
        ({"value_dim": 256}, "portable", "it needs K = V = 128, got K = 128, V = 256"),
        ({"value_dim": 257}, "chunked", "it needs K and V up to 256, got K = 128, V = 257"),
        ({"chunk_size": 32}, "portable", "it needs chunk_size 64, got 32"),
        ({"is_aligned": False}, "portable", "multiples of 16 bytes"),
        ({"num_tokens": 2**26}, "portable", "B * T * HV must be below 2**31, got 2147483648"),
        ({"num_tokens": 2**26 - 1}, "scan", "the fastest for this problem on NVIDIA H200"),
        ({"requires_gradient": True}, "chunked", "an input requires a gradient"),
    ],
)
def test_limits_on_an_h200(changes, expected, reason):
    schedule = pick(replace(USUAL, **changes), H200)
    assert schedule.implementation == expected
    assert reason in schedule.reason


@pytest.mark.parametrize(
    ("num_sequences", "num_value_heads", "expected"),
    [(1, 64, 64), (4, 64, 128), (1, 32, 32), (1, 8, 32), (1, 132, 128), (2, 66, 128), (1, 66, 64), (0, 8, 128)],
)
def test_block_v_of_the_roles_kernel(num_sequences, num_value_heads, expected):
    """The widths that were fastest on an H200 in measurements of these grids, and the edges of a wave."""
    problem = replace(USUAL, num_sequences=num_sequences, num_value_heads=num_value_heads)
    assert hopper_variant("roles", problem, H200.num_sms) == ("roles", expected, 0, 0)
    if num_sequences:
        assert pick(problem, H200, "roles").block_v == expected


def sized(batch, num_tokens, num_heads, num_value_heads, **options):
    return Problem(batch, num_tokens, batch, num_heads, num_value_heads, 128, 128, "bfloat16", **options)


def measured_beside_estimates(file):
    """For each problem of a committed record: (its name, {variant: measured ms}, {variant: estimated us})."""
    record = json.loads((ROOT / "bench" / "results" / file).read_text(encoding="utf-8"))
    measured = {}
    for row in record["rows"]:
        variant = hopper_times.Variant(*(row.get(field, 0) for field in hopper_times.Variant._fields))
        measured.setdefault((row["problem"], row["norms"]), {})[variant] = row["whole_ms"]
    for (name, norms), times in measured.items():
        batch, num_tokens, num_heads, num_value_heads = map(int, re.findall(r"\d+", name))
        sizes = hopper_times.Sizes(batch, num_tokens, num_heads, num_value_heads, H200.num_sms, normalises=norms)
        yield name, times, {variant: hopper_times.microseconds(variant, sizes) for variant in times}


def test_the_choice_is_the_fastest_of_what_was_measured():
    """Of the variants in the committed measurements, the one with the least estimate is within 5 % of the fastest."""
    problems = list(measured_beside_estimates("forward_kernels.json"))
    assert len(problems) >= 15
    for name, times, estimates in problems:
        assert times[min(estimates, key=estimates.get)] <= 1.05 * min(times.values()), name
        for variant, estimate in estimates.items():
            assert estimate == pytest.approx(1e3 * times[variant], rel=0.2), (name, variant)


def test_the_choice_for_the_problems_of_the_grid():
    """`bench/forward_kernels.py --grid`: within 5 % of the fastest in all of its problems."""
    ratios = {
        name: times[min(estimates, key=estimates.get)] / min(times.values())
        for name, times, estimates in measured_beside_estimates("forward_grid.json")
    }
    assert len(ratios) >= 24
    assert max(ratios.values()) <= 1.05, ratios


@pytest.mark.parametrize(
    ("problem", "is_beside"),
    [
        (sized(1, 8192, 16, 32), True),
        (sized(1, 1024, 16, 32), True),
        (sized(2, 4096, 8, 16), True),
        (sized(1, 8192, 10, 40), True),
        (sized(1, 8192, 16, 32, output_h=True, has_initial_state=True), True),
        (sized(1, 256, 16, 32), False),  # prepare takes no time that could be hidden
        (sized(1, 1024, 8, 32), False),  # the first chunk of four value heads at a time is late
        (sized(1, 2048, 8, 32), True),
        (sized(1, 8192, 12, 48), False),  # it would not keep pace
        (sized(1, 8192, 16, 64), False),
        (sized(4, 8192, 16, 32), False),
        (sized(1, 8192, 2, 8), False),  # pieces are faster
        (sized(1, 8192, 16, 32, batch_invariant=True), False),
        (replace(sized(1, 8192, 16, 32), num_sequences=2), False),  # packed: any lengths
    ],
)
def test_when_prepare_runs_beside_the_scan(problem, is_beside):
    schedule = pick(problem, H200)
    assert (schedule.prepare_programs > 0) == is_beside
    if is_beside:
        num_left = H200.num_sms - 2 * problem.num_sequences * problem.num_value_heads
        assert schedule.prepare_programs <= 2 * num_left
        assert f"beside {schedule.prepare_programs} programs of prepare" in str(schedule)


@pytest.mark.parametrize("heads", [(1, 1), (2, 8), (3, 9), (8, 16), (16, 32), (10, 40), (16, 64), (16, 65)], ids=str)
@pytest.mark.parametrize("num_sequences", [1, 2, 5])
def test_programs_beside_the_scan_fit_where_it_leaves_room(num_sequences, heads):
    num_heads, num_value_heads = heads
    sizes = hopper_times.Sizes(num_sequences, 4096, num_heads, num_value_heads, H200.num_sms)
    num_left = H200.num_sms - 2 * num_sequences * num_value_heads
    variants = list(hopper_times.beside_variants("scan", sizes))
    assert len(variants) == (num_left > 0)
    for variant in variants:
        assert 0 < variant.prepare_programs <= 2 * num_left
    assert not list(hopper_times.beside_variants("scan", replace(sizes, is_packed=True)))


# Milliseconds of the scan kernel alone on an H200, by block of V.
SCAN_MILLISECONDS = {
    (1, 32768, 16, 64): {64: 0.645, 128: 0.92},
    (4, 8192, 16, 64): {64: 0.69, 128: 0.575},
    (4, 8192, 16, 32): {64: 0.323, 128: 0.270},
    (1, 8192, 16, 32): {64: 0.1546, 128: 0.2366},
    (8, 1024, 8, 32): {64: 0.0944, 128: 0.0752},
    (1, 32768, 2, 8): {64: 0.585, 128: 0.917},
}


@pytest.mark.parametrize(("sizes", "measured"), SCAN_MILLISECONDS.items(), ids=str)
def test_block_v_of_the_scan(sizes, measured):
    fastest = min(measured, key=measured.get)
    hopper_sizes = hopper_times.Sizes(*sizes, H200.num_sms)
    whole = min(
        hopper_times.whole_variants("scan", hopper_sizes),
        key=lambda variant: hopper_times.microseconds(variant, hopper_sizes),
    )
    assert whole.block_v == fastest
    prepare = hopper_times.PREPARE["scan", False]
    num_chunks = sizes[0] * sizes[1] // 64
    prepared = prepare.start + num_chunks * (prepare.head * sizes[2] + prepare.value_head * sizes[3]) * 1e-3
    for block_v, milliseconds in measured.items():
        variant = hopper_times.Variant("scan", block_v)
        estimate = hopper_times.microseconds(variant, hopper_sizes) - prepared
        assert estimate == pytest.approx(1e3 * milliseconds, rel=0.1)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(
    ("sizes", "block_v"),
    [
        ((1, 32768, 16, 64), 64),
        ((1, 8192, 16, 64), 64),
        ((4, 8192, 16, 64), 128),
        ((4, 8192, 16, 32), 128),
        ((1, 8192, 16, 32), 64),
        ((8, 1024, 8, 32), 128),
        ((1, 1024, 2, 8), 64),  # too short for pieces
    ],
)
def test_whole_sequences(sizes, block_v, normalises):
    schedule = pick(sized(*sizes, normalises=normalises), H200)
    assert (schedule.implementation, schedule.block_v, schedule.chunks_per_piece) == ("scan", block_v, 0)
    assert "pieces" not in str(schedule)


@pytest.mark.parametrize(
    "options",
    [{}, {"normalises": True}, {"output_h": True}, {"has_initial_state": True}],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("sizes", [(1, 32768, 2, 8), (1, 8192, 2, 8), (1, 32768, 4, 16), (2, 16384, 2, 8)])
def test_long_sequences_of_few_heads_are_cut(sizes, options):
    problem = sized(*sizes, **options)
    schedule = pick(problem, H200)
    assert schedule.implementation == "scan"
    assert 8 <= schedule.chunks_per_piece <= sizes[1] // 64 // 4
    assert not (problem.output_h and schedule.block_v == 128)
    assert f", pieces of {schedule.chunks_per_piece} chunks: the fastest" in str(schedule)
    num_pieces = sizes[0] * -(-sizes[1] // 64 // schedule.chunks_per_piece)
    num_ctas = num_pieces * sizes[3] * (128 // schedule.block_v)
    assert f"context parallelism; {num_ctas} CTAs of {schedule.block_v} values" in schedule.reason
    whole = hopper_times.Variant("scan", 64)
    hopper_sizes = hopper_times.Sizes(*sizes, H200.num_sms, normalises=problem.normalises)
    assert hopper_microseconds("scan", problem, 132) < 0.75 * hopper_times.microseconds(whole, hopper_sizes)
    assert pick(problem, H200, "scan").chunks_per_piece == schedule.chunks_per_piece
    assert pick(problem, H200, "roles").chunks_per_piece == 0


def test_packed_sequences_count_as_equally_long():
    packed = replace(sized(1, 65536, 2, 8), num_sequences=2)
    assert pick(packed, H200).chunks_per_piece == pick(sized(2, 32768, 2, 8), H200).chunks_per_piece > 0
    assert pick(replace(packed, num_sequences=1000), H200).chunks_per_piece == 0


def test_states_before_chunks_need_narrow_blocks():
    schedule = pick(sized(4, 8192, 16, 32, output_h=True), H200)
    assert (schedule.implementation, schedule.block_v) == ("scan", 64)


BATCHES = [(1, 1, 1), (1, 32768, 1), (64, 1024, 64), (1, 65536, 2), (1, 100, 3), (1, 0, 0)]


@pytest.mark.parametrize(
    ("changes", "hardware", "expected"),
    [
        ({}, H200, ("scan", 64)),
        ({"num_heads": 2, "num_value_heads": 8}, H200, ("scan", 64)),
        ({"dtype": "float16"}, H200, ("roles", 64)),
        ({"dtype": "float32"}, H200, ("portable", 16)),
        ({}, A100, ("portable", 64)),
        ({}, CPU, ("chunked", 128)),
        ({"dtype": "float64"}, H200, ("chunked", 128)),
    ],
)
def test_batch_invariance_fixes_everything(changes, hardware, expected):
    problem = replace(USUAL, batch_invariant=True, **changes)
    for output_h in (False, True):
        for batch, num_tokens, num_sequences in BATCHES:
            sizes = {"batch": batch, "num_tokens": num_tokens, "num_sequences": num_sequences, "output_h": output_h}
            schedule = pick(replace(problem, **sizes), hardware)
            assert (schedule.implementation, schedule.block_v, schedule.chunks_per_piece) == (*expected, 0)
            assert schedule.reason.startswith("batch_invariant fixes it for such heads, dtype and options on ")
            assert pick(replace(problem, **sizes), hardware, expected[0]).block_v == expected[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_aligned": False}, r"cannot be kept: scan serves calls like this one, but here base addresses"),
        (
            {"num_tokens": 2**26},
            r"cannot be kept: scan serves calls like this one, but here B \* T \* HV must",
        ),
        ({"requires_gradient": True}, r"cannot be kept where an input requires a gradient"),
    ],
)
def test_where_batch_invariance_cannot_be_kept(changes, message):
    with pytest.raises(ValueError, match=rf"batch_invariant=True {message}"):
        pick(replace(USUAL, batch_invariant=True, **changes), H200)


def test_a_forced_implementation_can_be_batch_invariant():
    problem = replace(USUAL, batch_invariant=True)
    for implementation, block_v in (("scan", 64), ("roles", 64), ("portable", 64), ("chunked", 128)):
        assert pick(problem, H200, implementation).block_v == block_v
    unaligned = replace(problem, is_aligned=False)
    assert pick(unaligned, H200, "chunked").implementation == "chunked"
    with pytest.raises(ValueError, match=r"cannot be kept: portable serves .*, but here base addresses"):
        pick(unaligned, H200, "portable")
    with pytest.raises(ValueError, match="implementation='scan' cannot run"):
        pick(unaligned, H200, "scan")


def test_float16_is_served_by_the_roles():
    problem = replace(USUAL, dtype="float16")
    assert pick(problem, H200).implementation == "roles"
    with pytest.raises(ValueError, match=r"implementation='scan' cannot run: it needs bfloat16"):
        pick(problem, H200, "scan")


def test_without_triton_torch_serves():
    hardware = replace(H200, has_triton=False)
    assert pick(USUAL, hardware).implementation == "chunked"
    assert "Triton is not installed" in pick(USUAL, hardware).reason
    assert pick_recurrent(USUAL, hardware).implementation == "torch"


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "hardware", "expected"),
    [
        (128, 128, "bfloat16", A100, 64),
        (129, 128, "bfloat16", A100, 64),
        (129, 128, "bfloat16", RTX_5090, 32),
        (256, 8, "bfloat16", A100, 64),
        (64, 128, "float32", A100, 32),
        (128, 128, "float32", A100, 16),
        (128, 20, "float16", A100, 32),
        (128, 8, "float16", A100, 16),
    ],
)
def test_block_v_of_the_portable_kernel(key_dim, value_dim, dtype, hardware, expected):
    problem = replace(USUAL, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    assert pick(problem, hardware).block_v == expected


def test_decode():
    assert pick_recurrent(USUAL, H200).implementation == "recurrent"
    assert str(pick_recurrent(USUAL, H200)) == "recurrent: the decode kernel runs on NVIDIA H200"
    assert pick_recurrent(USUAL, MI300).implementation == "recurrent"
    assert pick_recurrent(USUAL, CPU).implementation == "torch"
    assert pick_recurrent(replace(USUAL, dtype="float64"), H200).implementation == "torch"
    assert pick_recurrent(USUAL, H200, "torch").implementation == "torch"
    with pytest.raises(ValueError, match=r"implementation='recurrent' cannot run: Triton has no compiler for cpu"):
        pick_recurrent(USUAL, CPU, "recurrent")
    with pytest.raises(ValueError, match=r"implementation must be None or one of recurrent, torch, got 'roles'"):
        pick_recurrent(USUAL, H200, "roles")


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"one of scan, roles, portable, chunked, got 'fast'"):
        pick(USUAL, H200, "fast")


def test_hardware_of_the_host():
    assert hardware_of("cpu").backend == "cpu"
    assert hardware_of("cpu") is hardware_of("cpu")


@pytest.mark.gpu
def test_hardware_of_a_gpu():
    hardware = hardware_of("cuda")
    assert hardware.num_sms > 0
    assert hardware.shared_memory_bytes >= 48 * 1024
    assert hardware is hardware_of("cuda:0")


def test_the_portable_kernel_takes_the_block_that_the_schedule_names():
    """The kernel caps the block by its own table of what compiles well: a capped schedule would be printed wrongly."""
    kernel_portable = pytest.importorskip("tilecrew.gated_delta_rule.kernel_portable")
    for key_dim, dtype in itertools.product((16, 64, 100, 128, 256), (torch.float16, torch.bfloat16, torch.float32)):
        arguments = random_arguments(num_tokens=1, key_dim=key_dim, value_dim=256, dtype=dtype)
        schedule = pick(problem_of(arguments, requires_gradient=False), A100, "portable")
        config, _ = kernel_portable.make_config(arguments, schedule)
        assert schedule.block_v == config.BLOCK_V
