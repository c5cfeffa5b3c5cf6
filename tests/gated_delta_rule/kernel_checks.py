"""Checks of the kernels in plain Triton, the same for the interpreter on the CPU and for a GPU.

Truth is the token recurrence in float64. A kernel may have twice the error of the same mathematics done in torch in
the input dtype, plus FLOOR, which is below the rounding of an output.
"""

from dataclasses import replace

import pytest
import torch

from tilecrew._hardware import Hardware, hardware_of
from tilecrew.gated_delta_rule import recurrent, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.gates import apply_gates
from tilecrew.gated_delta_rule.operators import problem_of
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.gated_delta_rule.schedule import pick
from tilecrew.testing import as_float64, relative_error

FLOOR = {torch.float32: 1e-6, torch.float16: 5e-5, torch.bfloat16: 4e-4}


def run_portable(arguments: ForwardArguments) -> ForwardResult:
    from tilecrew.gated_delta_rule import kernel_portable

    # Under the interpreter, on the CPU, the tiles of a GPU without much shared memory.
    small = Hardware("cuda", "cuda", (8, 9), shared_memory_bytes=99 * 1024)
    hardware = hardware_of(arguments.q.device) if arguments.q.is_cuda else small
    schedule = pick(problem_of(arguments, requires_gradient=False), hardware, "portable")
    return kernel_portable.forward(arguments, schedule)


def check_portable(arguments: ForwardArguments) -> None:
    """o, final state and h of the portable kernel against float64, and zeros where no sequence is."""
    actual = run_portable(arguments)
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments, "cpu"))
    yardstick = chunk_in_input_dtype(arguments)
    dtype, rounding = arguments.q.dtype, gate_rounding(arguments)
    assert_within(actual.o, expected.o, yardstick.o, 2, dtype, "o", rounding)
    assert actual.o.dtype == dtype
    assert (actual.final_state is None) == (expected.final_state is None)
    assert (actual.h is None) == (expected.h is None)
    if actual.final_state is not None:
        assert actual.final_state.dtype == torch.float32
        assert_within(
            actual.final_state, expected.final_state, yardstick.final_state, 1, dtype, "final_state", rounding
        )
    if actual.h is not None:
        assert actual.h.dtype == dtype
        assert_within(actual.h, expected.h, yardstick.h, 2, dtype, "h", rounding)
    if arguments.cu_seqlens is not None:
        assert not actual.o[:, int(arguments.cu_seqlens[-1]) :].any()


def gate_rounding(arguments: ForwardArguments) -> float:
    """In float32 an ulp of the largest cumulative gate of a chunk, of which the kernels take differences; else 0."""
    num_tokens = arguments.q.shape[1]
    if arguments.q.dtype != torch.float32 or num_tokens == 0:
        return 0.0
    sums = torch.nn.functional.pad(apply_gates(arguments).g.nan_to_num().double().abs().cumsum(1), (0, 0, 1, 0))
    size = min(arguments.chunk_size, num_tokens)
    return float((sums[:, size:] - sums[:, :-size]).max()) * 2**-23


def assert_within(
    actual, expected, yardstick, head_dim: int, dtype: torch.dtype, name: str, rounding: float = 0.0
) -> None:
    """The rule of this module's docstring, with an error of `rounding` allowed besides; NaN fails it."""
    if expected.numel() == 0:
        assert actual.shape == expected.shape
        return
    error = relative_error(actual, expected, head_dim)
    bound = 2 * relative_error(yardstick, expected, head_dim) + FLOOR[dtype] + rounding
    assert error <= bound, f"{name}: relative error {error:.3g}, allowed {bound:.3g}{not_finite(actual)}"


def not_finite(x: torch.Tensor) -> str:
    """Which elements of x are NaN or infinite, for a message: how many, the first and last, and of each dimension how
    many indices and the first of them; "" where all are finite."""
    where = (~x.isfinite()).nonzero()
    if where.numel() == 0:
        return ""
    indices = [where[:, dim].unique().tolist() for dim in range(x.dim())]
    ranges = ", ".join(f"{len(values)} from {values[:6]}" for values in indices)
    first, last = where[0].tolist(), where[-1].tolist()
    return (
        f"; {len(where)} elements of {tuple(x.shape)} are not finite, {first} to {last}, along each dimension {ranges}"
    )


def chunk_in_input_dtype(arguments: ForwardArguments) -> ForwardResult:
    """The chunk form in torch with every product in the dtype of q; gates, inverse and state in float32."""
    dtype = arguments.q.dtype

    def in_dtype(k, v, g, state, A_g, P_g, q, scale):
        W = (v - g.exp()[..., None] * (k @ state.to(dtype))).to(dtype)
        V_d = A_g @ W
        o = scale * g.exp()[..., None] * (q @ state.to(dtype)) + P_g @ V_d
        V_decayed = reference.decayed_value_delta(g, V_d).to(dtype)
        return o, g[..., -1].exp()[..., None, None] * state + (k.mT @ V_decayed).float()

    def scan(inputs, state):
        outputs, states = [inputs[2][:, :0]], []
        for start in range(0, inputs[2].shape[1], arguments.chunk_size):
            states.append(state)
            rows = slice(start, start + arguments.chunk_size)
            chunk_q, chunk_k, chunk_v, chunk_g, chunk_beta = (x[:, rows].transpose(1, 2) for x in inputs)
            chunk_g = reference.cumulative_log_decay(chunk_g)
            A_g = (reference.gated_inverse(chunk_k, chunk_beta, chunk_g) * chunk_beta[..., None, :]).to(dtype)
            P_g = reference.gated_scores(chunk_q, chunk_k, chunk_g, arguments.scale).to(dtype)
            chunk_q, chunk_k = chunk_q.to(dtype), chunk_k.to(dtype)
            o, state = in_dtype(chunk_k, chunk_v, chunk_g, state, A_g, P_g, chunk_q, arguments.scale)
            outputs.append(o.transpose(1, 2))
        return torch.cat(outputs, 1), state, states

    return reference._each_sequence(apply_gates(arguments), scan)


def with_nan_tail(arguments: ForwardArguments) -> ForwardArguments:
    """NaN in every input row behind the last sequence."""
    end = int(arguments.cu_seqlens[-1])
    inputs = {name: getattr(arguments, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for x in inputs.values():
        x[:, end:] = float("nan")
    return replace(arguments, **inputs)


def with_strided_inputs(arguments: ForwardArguments) -> ForwardArguments:
    """q, k, v as views into one packed row per token, g and beta as every second value of a wider tensor."""
    q, k, v = arguments.q, arguments.k, arguments.v
    rows = [x.flatten(2) for x in (q, k, v)]
    packed = torch.cat(rows, -1).split([x.shape[-1] for x in rows], -1)
    views = [view.unflatten(-1, x.shape[2:]) for view, x in zip(packed, (q, k, v), strict=True)]
    g, beta = (torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0] for x in (arguments.g, arguments.beta))
    return replace(arguments, q=views[0], k=views[1], v=views[2], g=g, beta=beta)


# Tests that take tens of gigabytes: with `pytest --dist loadgroup`, or `-p tests.gpu_spread`, one runs at a time.
LARGE_MEMORY = pytest.mark.xdist_group("large_memory")


def spread_over_more_than_2_to_31_elements(arguments: ForwardArguments) -> ForwardArguments:
    """q, k, v as views of one buffer whose tokens lie so far apart that the last offsets do not fit 32 bits."""
    num_tokens = arguments.q.shape[1]
    token_stride = 2**31 // (num_tokens - 10) // 16 * 16
    buffer = torch.empty(token_stride * num_tokens, dtype=arguments.q.dtype, device="cuda")
    views, start = {}, 0
    for name in ("q", "k", "v"):
        x = getattr(arguments, name)
        views[name] = buffer.as_strided(x.shape, (0, token_stride, x.shape[3], 1), start)
        views[name].copy_(x)
        start += x.shape[2] * x.shape[3]
    return replace(arguments, **views)


EVERY_GATE = ("g", "gk", "gv", "A_log", "dt_bias", "beta_per_value")


def random_recurrent_arguments(
    num_sequences: int = 3,
    num_tokens: int = 1,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    gates: tuple[str, ...] = ("g",),
    pool: list[int] | None = None,
    state_dtype: torch.dtype = torch.float32,
    lengths: list[int] | None = None,
    tail: int = 0,
    **options,
) -> RecurrentArguments:
    """A random decode problem with an initial state and a beta. heads = (H, HV), dims = (K, V).

    gates    which of EVERY_GATE it has
    pool     state_indices into a pool of max(pool) + 2 rows
    lengths  makes a packed batch of that many sequences with `tail` unused tokens behind them
    options  further fields of RecurrentArguments
    """
    generator = torch.Generator().manual_seed(0)
    batch, cu_seqlens = num_sequences, None
    if lengths is not None:
        batch, num_tokens, num_sequences = 1, sum(lengths) + tail, len(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
    (H, HV), (K, V) = heads, dims

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def per_token(*shape: int) -> torch.Tensor:
        return normal(batch, num_tokens, *shape)

    num_rows = num_sequences if pool is None else max(pool) + 2
    shapes = {"g": (HV,), "gk": (HV, K), "gv": (HV, V)}
    decays = {name: -per_token(*shape).abs() if name in gates else None for name, shape in shapes.items()}
    parameters = {name: normal(HV) if name in gates else None for name in ("A_log", "dt_bias")}
    return RecurrentArguments(
        q=per_token(H, K).to(dtype),
        k=torch.nn.functional.normalize(per_token(H, K), dim=-1).to(dtype),
        v=per_token(HV, V).to(dtype),
        beta=per_token(*((HV, V) if "beta_per_value" in gates else (HV,))).sigmoid(),
        scale=K**-0.5,
        initial_state=normal(num_rows, HV, *((V, K) if options.get("state_v_first") else (K, V))).to(state_dtype),
        state_indices=None if pool is None else torch.tensor(pool, dtype=torch.int32, device=device),
        cu_seqlens=cu_seqlens,
        **decays,
        **parameters,
        **options,
    )


def recurrent_as_float64(arguments: RecurrentArguments) -> RecurrentArguments:
    """The same problem on the CPU, exactly widened, with a state of its own."""
    tensors = {name: x.cpu() for name, x in vars(arguments).items() if isinstance(x, torch.Tensor)}
    return replace(arguments, **{name: x.double() if x.is_floating_point() else x for name, x in tensors.items()})


def check_recurrent(arguments: RecurrentArguments) -> None:
    """o and final state of the decode kernel against float64; rows of a pool that no sequence names keep their bits."""
    from tilecrew.gated_delta_rule import kernel_recurrent

    expected_o, expected_state = recurrent.forward(recurrent_as_float64(arguments))
    own_state = None if arguments.initial_state is None else arguments.initial_state.clone()
    yardstick_o, yardstick_state = recurrent.forward(replace(arguments, initial_state=own_state))
    before = None if arguments.initial_state is None else arguments.initial_state.clone()
    o, final_state = kernel_recurrent.forward(arguments)

    dtype = arguments.q.dtype
    assert o.dtype == dtype
    assert_within(o, expected_o, yardstick_o, 2, dtype, "o")
    assert (final_state is None) == (expected_state is None)
    if final_state is not None:
        # The state is float32 whatever the inputs are.
        assert final_state.dtype == yardstick_state.dtype
        assert_within(final_state, expected_state, yardstick_state, 1, final_state.dtype, "final_state")
    if before is not None:
        written = torch.zeros(before.shape[0], dtype=torch.bool)
        if arguments.inplace_state:
            assert final_state is arguments.initial_state
            every_row = torch.arange(before.shape[0])
            rows = every_row if arguments.state_indices is None else arguments.state_indices.cpu().long()
            written[rows[rows >= 0]] = True
        assert torch.equal(arguments.initial_state.cpu()[~written], before.cpu()[~written])
