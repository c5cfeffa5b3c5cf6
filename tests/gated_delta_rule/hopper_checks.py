"""Runs the Hopper kernels, roles and scan, and checks them: truth is the token recurrence in float64, and their error
may be twice that of yardsticks.rounded_chunks plus a floor (kernel_checks.assert_within)."""

import torch

from tests.gated_delta_rule.kernel_checks import assert_within
from tests.gated_delta_rule.yardsticks import rounded_chunks
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import as_float64

BLOCKS = ("roles 128", "roles 64", "roles 32")
KERNELS = (*BLOCKS, "scan")
EVERYTHING = {"with_initial_state": True, "output_final_state": True, "output_h": True}


def run_kernel(arguments: ForwardArguments, kernel: str) -> ForwardResult:
    """kernel: "scan", or "roles" and its block of V."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan

    if kernel == "scan":
        return kernel_forward_scan.forward(arguments, Schedule("scan", 64, 64, "test"))
    return kernel_forward_roles.forward(arguments, Schedule("roles", block_of(kernel), 64, "test"))


def run_pieces(arguments: ForwardArguments, kernel: str, pieces: list[tuple[int, int, int]]) -> ForwardResult:
    """pieces: (sequence, first chunk, chunk behind the last); initial_state has a row for each."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare

    result = kernel_forward_roles.allocate_result(arguments)
    rows = torch.tensor(pieces, dtype=torch.int32, device=arguments.q.device)
    if kernel == "scan":
        prepared = kernel_prepare.run_gated(arguments, result.o)
        kernel_forward_scan.launch(arguments, prepared, result, rows).run()
    else:
        prepared = kernel_prepare.allocate(arguments)
        kernel_prepare.launch(arguments, prepared, result.o).run()
        kernel_forward_roles.launch(arguments, prepared, result, block_of(kernel), rows).run()
    return result


def block_of(kernel: str) -> int:
    return int(kernel.removeprefix("roles "))


def check_kernels(
    arguments: ForwardArguments, kernels: tuple[str, ...] = KERNELS, merge_dtype: torch.dtype | None = None
) -> None:
    """Every output of every kernel that takes the dtype; zeros where no sequence is. merge_dtype: of the yardstick."""
    if arguments.q.dtype == torch.float16:
        kernels = tuple(kernel for kernel in kernels if kernel != "scan")
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    yardstick = rounded_chunks(arguments, merge_dtype)
    for kernel in kernels:
        check_result(arguments, run_kernel(arguments, kernel), expected, yardstick)


def check_result(
    arguments: ForwardArguments, actual: ForwardResult, expected: ForwardResult, yardstick: ForwardResult
) -> None:
    dtype = arguments.q.dtype
    assert actual.o.dtype == dtype
    assert_within(actual.o, expected.o, yardstick.o, 2, dtype, "o")
    assert (actual.final_state is None) == (expected.final_state is None)
    assert (actual.h is None) == (expected.h is None)
    if actual.final_state is not None:
        assert actual.final_state.dtype == torch.float32
        assert_within(actual.final_state, expected.final_state, yardstick.final_state, 1, dtype, "final_state")
    if actual.h is not None:
        assert actual.h.dtype == dtype
        assert_within(actual.h, expected.h, yardstick.h, 2, dtype, "h")
    if arguments.cu_seqlens is not None:
        assert not actual.o[:, int(arguments.cu_seqlens[-1]) :].any()


def assert_same_bits(actual: ForwardResult, expected: ForwardResult) -> None:
    for name, x in vars(expected).items():
        y = getattr(actual, name)
        assert (x is None) == (y is None), name
        # NaN equals nothing: an output that was not written fails.
        assert x is None or torch.equal(x, y), name
