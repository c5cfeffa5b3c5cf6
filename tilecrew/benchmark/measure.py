"""Runs, checks and times: every implementation of a case in turn, in one process, on the same inputs.

A result whose error against float64 passes LARGEST_ERROR gets no time. Truth is the chunked form in float64 (checked
against the token recurrence by the tests), because the recurrence takes a step for every token.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilecrew._hardware import hardware_of
from tilecrew.benchmark.cases import DecodeCase, ForwardCase
from tilecrew.benchmark.peers import Call, Peer
from tilecrew.gated_delta_rule import chunked, operators, recurrent, recurrent_operators
from tilecrew.gated_delta_rule.api import chunk_gated_delta_rule
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.schedule import pick_recurrent
from tilecrew.testing import as_float64

OURS = "tilecrew"
# Not other libraries, but what stands beside decode.
EMPTY, SCALED = "empty kernel", "states scaled in place"
BESIDE = (EMPTY, SCALED)
# Norm of the difference over the norm of the truth, largest over heads; bfloat16 kernels have 3e-3 to 5e-3.
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-4}
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One implementation on one case.

    operator             "forward" or "decode"
    inside               whether the operator normalises queries and keys, and makes the gates of what projections give
    chosen               what tilecrew's schedule took, with its reason; "" for others
    graph_milliseconds   of a captured CUDA graph; None on other devices, where capture failed, or where refused
    eager_milliseconds   of a call, with the host's work; None where refused
    error                larger of the relative errors of o and of the final state
    floor_milliseconds   see cases.py; None where the device's peaks are not known
    refused              why there is no time, or ""
    """

    operator: str
    case: str
    inside: bool
    name: str
    chosen: str
    graph_milliseconds: float | None
    eager_milliseconds: float | None
    error: float
    floor_milliseconds: float | None
    refused: str

    @property
    def milliseconds(self) -> float | None:
        return self.eager_milliseconds if self.graph_milliseconds is None else self.graph_milliseconds


def forward(arguments: ForwardArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """tilecrew's (o, final state) by its public function."""
    a = arguments
    o, final_state = chunk_gated_delta_rule(
        a.q,
        a.k,
        a.v,
        a.g,
        a.beta,
        scale=a.scale,
        output_final_state=True,
        use_qk_l2norm_in_kernel=a.use_qk_l2norm,
        use_beta_sigmoid_in_kernel=a.use_beta_sigmoid,
        use_gate_in_kernel=a.A_log is not None,
        A_log=a.A_log,
        dt_bias=a.dt_bias,
    )
    return o, final_state


def measure_forward(
    case: ForwardCase, inside: bool, peers: list[Peer], dtype: torch.dtype, device: torch.device, seconds: float
) -> list[Row]:
    """tilecrew and the peers on fresh inputs. seconds: time spent on each measured point, at most."""
    arguments = case.arguments(dtype, device, inside)
    schedule = operators.schedule_of(arguments, requires_gradient=False, implementation=None)

    calls: dict[str, Call] = {OURS: lambda: forward(arguments)}
    failures = {}
    for peer in peers:
        try:
            calls[peer.name] = peer.prepare(arguments)
        except Exception as error:  # another library's refusal is a result, and is reported as one
            failures[peer.name] = f"{type(error).__name__}: {error}"
    truth = chunked.forward(as_float64(arguments))
    floor = case.floor_milliseconds(hardware_of(device).name)
    return _rows(
        calls,
        failures,
        (truth.o, truth.final_state),
        str(schedule),
        ("forward", case.name, inside, floor),
        dtype,
        seconds,
    )


def measure_decode(case: DecodeCase, dtype: torch.dtype, device: torch.device, seconds: float) -> list[Row]:
    """tilecrew's decode, the state in place.

    On a GPU the graph holds a call for each of several layers, with states of their own, as a model's step does: times
    are those of one layer. Beside it stand, in graphs of as many: a kernel that does nothing, and torch's that reads
    and writes the same states, for what launches and so much memory take at that size.
    """
    arguments = case.arguments(dtype, device)
    schedule = pick_recurrent(recurrent_operators.recurrent_problem_of(arguments), hardware_of(device))
    truth = recurrent.forward(_recurrent_as_float64(arguments))
    floor = case.floor_milliseconds(hardware_of(device).name)
    place = ("decode", case.name, False, floor)
    call = lambda: recurrent_operators.recurrent_forward(arguments, None)  # noqa: E731
    rows = _rows({OURS: call}, {}, truth, str(schedule), place, dtype, seconds)
    if device.type != "cuda" or rows[0].refused:
        return rows
    layers = [arguments, *(case.arguments(dtype, device) for _ in range(case.num_layers - 1))]

    def every_layer() -> None:
        for layer in layers:
            recurrent_operators.recurrent_forward(layer, None)

    def nothing() -> None:
        for _ in layers:
            torch.cuda._sleep(0)

    def scale() -> None:
        for layer in layers:
            assert layer.initial_state is not None
            layer.initial_state.mul_(0.999)

    graphs = {OURS: captured(every_layer), EMPTY: captured(nothing), SCALED: captured(scale)}
    times = in_turn({name: run for name, run in graphs.items() if run is not None}, device, seconds)
    per_layer = {name: milliseconds / len(layers) for name, milliseconds in times.items()}
    beside = [
        Row("decode", case.name, False, name, "", per_layer.get(name), None, 0.0, limit, "")
        for name, limit in ((EMPTY, None), (SCALED, floor))
    ]
    return [dataclasses.replace(rows[0], graph_milliseconds=per_layer.get(OURS)), *beside]


def _rows(
    calls: dict[str, Call],
    failures: dict[str, str],
    truth: tuple[torch.Tensor, torch.Tensor | None],
    chosen: str,
    place: tuple[str, str, bool, float | None],
    dtype: torch.dtype,
    seconds: float,
) -> list[Row]:
    operator, case, inside, floor = place
    errors, timed = {}, {}
    for name, call in calls.items():
        try:
            errors[name] = max(_relative_error(x, y, dim) for x, y, dim in zip(call(), truth, (2, 1), strict=True))
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
            continue
        if errors[name] <= LARGEST_ERROR[dtype]:
            timed[name] = call
        else:
            failures[name] = f"error {errors[name]:.1e} above {LARGEST_ERROR[dtype]:.1e}"
    device = truth[0].device
    graphs = {name: captured(call) for name, call in timed.items()} if device.type == "cuda" else {}
    graph_times = in_turn({name: run for name, run in graphs.items() if run is not None}, device, seconds)
    eager_times = in_turn(timed, device, seconds)
    return [
        Row(
            operator,
            case,
            inside,
            name,
            chosen if name == OURS else "",
            graph_times.get(name),
            eager_times.get(name),
            errors.get(name, float("nan")),
            floor,
            failures.get(name, ""),
        )
        for name in (*calls, *(name for name in failures if name not in calls))
    ]


def captured(call: Callable[[], object]) -> Callable[[], None] | None:
    """The replay of a CUDA graph of the call, or None where it cannot be captured (a synchronisation, for example)."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def in_turn(runs: dict[str, Callable], device: torch.device, seconds: float) -> dict[str, float]:
    """Median milliseconds of each: ROUNDS rounds, everyone once a round, the first one a different one each round."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_idx in range(ROUNDS if names else 0):
        first = round_idx % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_milliseconds(runs[name], device, seconds / ROUNDS))
    return {name: statistics.median(values) for name, values in samples.items()}


def _milliseconds(run: Callable, device: torch.device, seconds: float) -> float:
    """Median of repeats; on a GPU by its events, with the L2 cache flushed between repeats."""
    if device.type == "cuda":
        import triton

        return triton.testing.do_bench(run, warmup=5, rep=max(1, int(1e3 * seconds)), return_mode="median")
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while not samples or time.perf_counter() < stop:
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return 1e3 * statistics.median(samples)


def _relative_error(actual: torch.Tensor | None, expected: torch.Tensor | None, head_dim: int) -> float:
    """As testing.relative_error, but on the tensors' device: these may have gigabytes. NaN gives NaN."""
    if actual is None or expected is None:
        raise ValueError("a final state is missing")
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} where {tuple(expected.shape)} was expected")
    worst = torch.zeros((), dtype=torch.float64, device=expected.device)
    for x, y in zip(actual.unbind(head_dim), expected.unbind(head_dim), strict=True):
        worst = torch.maximum(worst, (x.double() - y).norm() / y.norm())
    return float(worst)


def _recurrent_as_float64(arguments):
    fields = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in vars(arguments).items()
    }
    return dataclasses.replace(arguments, **fields | {"inplace_state": False})
