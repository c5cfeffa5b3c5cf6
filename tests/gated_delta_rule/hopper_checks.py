"""Runs the Hopper kernels, roles and scan, and checks them: truth is the token recurrence in float64, and their error
may be twice that of yardsticks.rounded_chunks plus a floor (kernel_checks.assert_within)."""

from dataclasses import replace

import torch

from tests.gated_delta_rule.kernel_checks import assert_within
from tests.gated_delta_rule.yardsticks import rounded_chunks
from tests.shared_memory import fill_with_nan
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import as_float64

# Each with its block of V; "beside": with the prepare kernel at the same time.
KERNELS = ("roles 128", "roles 64", "roles 32", "scan 64", "scan 128", "scan 64 beside")
PREPARE_PROGRAMS = 7  # so that each makes several chunks
EVERYTHING = {"with_initial_state": True, "output_final_state": True, "output_h": True}


def is_scan(kernel: str) -> bool:
    return kernel.startswith("scan ")


def block_of(kernel: str) -> int:
    return int(kernel.split()[1])


def is_beside(kernel: str) -> bool:
    return kernel.endswith(" beside")


def has_h(kernel: str) -> bool:
    """Whether the kernel can give h: with 128 values the scan has no room for its tile."""
    return kernel != "scan 128"


def run_kernel(arguments: ForwardArguments, kernel: str) -> ForwardResult:
    """What a kernel that has no h leaves out of the arguments is None in its result."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan

    arguments = for_kernel(arguments, kernel)
    module = kernel_forward_scan if is_scan(kernel) else kernel_forward_roles
    prepare_programs = PREPARE_PROGRAMS if is_beside(kernel) else 0
    schedule = Schedule(kernel.split()[0], block_of(kernel), 64, "test", prepare_programs=prepare_programs)
    return module.forward(arguments, schedule)


def for_kernel(arguments: ForwardArguments, kernel: str) -> ForwardArguments:
    """The arguments without h where the kernel has none."""
    return arguments if has_h(kernel) else replace(arguments, output_h=False)


def run_pieces(arguments: ForwardArguments, kernel: str, pieces: list[tuple[int, int, int]]) -> ForwardResult:
    """pieces: (sequence, first chunk, chunk behind the last); initial_state has a row for each."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare

    arguments = for_kernel(arguments, kernel)
    result = kernel_forward_roles.allocate_result(arguments)
    rows = torch.tensor(pieces, dtype=torch.int32, device=arguments.q.device)
    if is_scan(kernel):
        prepared = kernel_prepare.run_gated(arguments, result.o)
        kernel_forward_scan.launch(arguments, prepared, result, block_of(kernel), rows).run()
    else:
        prepared = kernel_prepare.allocate(arguments)
        kernel_prepare.launch(arguments, prepared, result.o).run()
        kernel_forward_roles.launch(arguments, prepared, result, block_of(kernel), rows).run()
    return result


def prepare_launch(arguments: ForwardArguments, kernel: str, o: torch.Tensor, num_sms: int = 132):
    """Workspace for a kernel, and the launch of the prepare kernel that fills it."""
    from tilecrew.gated_delta_rule import kernel_prepare
    from tilecrew.gated_delta_rule.chunk_flags import Placement

    if is_beside(kernel):
        prepared = kernel_prepare.allocate_beside(arguments)
        placement = Placement(min(PREPARE_PROGRAMS, num_sms - 1), 1, num_sms)
        return prepared, kernel_prepare.launch(arguments, prepared, o, placement)
    prepared = (kernel_prepare.allocate_gated if is_scan(kernel) else kernel_prepare.allocate)(arguments)
    return prepared, kernel_prepare.launch(arguments, prepared, o)


def run_with_nan_in_shared_memory(arguments: ForwardArguments, kernel: str) -> ForwardResult:
    """As `run_kernel`, with NaN left in all shared memory before each of the two launches, which run one after the
    other then."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan

    arguments = for_kernel(arguments, kernel)
    result = kernel_forward_roles.allocate_result(arguments)
    module = kernel_forward_scan if is_scan(kernel) else kernel_forward_roles
    prepared, launch = prepare_launch(arguments, kernel, result.o)
    fill_with_nan()
    launch.run()
    fill_with_nan()
    module.launch(arguments, prepared, result, block_of(kernel)).run()
    return result


def check_kernels(
    arguments: ForwardArguments, kernels: tuple[str, ...] = KERNELS, merge_dtype: torch.dtype | None = None
) -> None:
    """Every output of every kernel that takes the dtype; zeros where no sequence is. merge_dtype: of the yardstick."""
    if arguments.q.dtype == torch.float16:
        kernels = tuple(kernel for kernel in kernels if not is_scan(kernel))
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    yardstick = rounded_chunks(arguments, merge_dtype)
    for kernel in kernels:
        check_result(for_kernel(arguments, kernel), run_kernel(arguments, kernel), expected, yardstick)


def check_result(
    arguments: ForwardArguments, actual: ForwardResult, expected: ForwardResult, yardstick: ForwardResult
) -> None:
    dtype = arguments.q.dtype
    assert actual.o.dtype == dtype
    assert_within(actual.o, expected.o, yardstick.o, 2, dtype, "o")
    assert (actual.final_state is not None) == arguments.output_final_state
    assert (actual.h is not None) == arguments.output_h
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
