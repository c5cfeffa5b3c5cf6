"""The prepare kernel on a Hopper GPU: gates, norms, all inverses and the zeros of the tail, against float64."""

from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule.kernel_checks import assert_within, with_nan_tail, with_strided_inputs
from tests.gated_delta_rule.yardsticks import merged_inverse
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.gates import apply_gates
from tilecrew.testing import as_float64, random_arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0 (Hopper)",
    ),
]
CHUNK = 64
LOG_2 = 0.6931471805599453
HALF = [torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize("normalise", [False, True], ids=["gated_inverse", "ungated_inverse"])


def problem(*sizes, dtype=torch.bfloat16, **options):
    return random_arguments(*sizes, dtype=dtype, device="cuda", **options)


def run_prepare(arguments: ForwardArguments, for_scan: bool):
    from tilecrew.gated_delta_rule import kernel_prepare

    o = torch.full_like(arguments.v, float("nan"), memory_format=torch.contiguous_format)
    if for_scan:
        return kernel_prepare.run_gated(arguments, o), o
    prepared = kernel_prepare.allocate(arguments)
    kernel_prepare.launch(arguments, prepared, o).run()
    return prepared, o


def chunks_of(arguments: ForwardArguments) -> list[tuple[int, int, slice]]:
    """(slot, batch row, tokens) of every chunk."""
    chunks = []
    if arguments.cu_seqlens is None:
        batch, num_tokens = arguments.q.shape[:2]
        sequences = [(n, 0, num_tokens, n * -(-num_tokens // CHUNK)) for n in range(batch)]
    else:
        bounds = arguments.cu_seqlens.tolist()
        starts = enumerate(zip(bounds, bounds[1:], strict=False))
        sequences = [(0, start, end, start // CHUNK + n) for n, (start, end) in starts]
    for batch, start, end, slot in sequences:
        for c, first in enumerate(range(start, end, CHUNK)):
            chunks.append((slot + c, batch, slice(first, min(first + CHUNK, end))))
    return chunks


def by_heads(x: torch.Tensor, batch: int, tokens: slice, num_value_heads: int) -> torch.Tensor:
    """[B, T, H, ...] -> [HV, tokens, ...]."""
    x = x[batch, tokens].transpose(0, 1)
    return x.repeat_interleave(num_value_heads // x.shape[0], 0)


def expected_of(arguments: ForwardArguments, for_scan: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gates [chunks, HV, 4, 64] and inverse [chunks, HV, 64, 64] in float64, and the inverse's yardstick.

    The inverse for the scan is A_g, merged in float16 where the keys of the chunk allow it.
    """
    num_value_heads = arguments.v.shape[2]
    wide = as_float64(arguments)
    gated = apply_gates(wide)
    chunks = chunks_of(arguments)
    gates = torch.zeros(len(chunks), num_value_heads, 4, CHUNK, dtype=torch.float64, device="cuda")
    inverse = torch.eye(CHUNK, dtype=torch.float64, device="cuda").repeat(len(chunks), num_value_heads, 1, 1)
    yardstick = inverse.to(arguments.q.dtype)
    for row, (_, batch, tokens) in enumerate(chunks):
        L = tokens.stop - tokens.start
        g, beta, k = (by_heads(x, batch, tokens, num_value_heads) for x in (gated.g, gated.beta, gated.k))
        g = reference.cumulative_log_decay(g)
        gates[row, :, 0, :L], gates[row, :, 0, L:] = g / LOG_2, g[:, -1:] / LOG_2
        gates[row, :, 1, :L] = beta
        for index, x in ((2, wide.k), (3, wide.q)):
            squares = by_heads(x, batch, tokens, num_value_heads).square().sum(-1)
            gates[row, :, index, :L] = (squares + 1e-6).rsqrt()
        if for_scan:
            write = beta[:, None]
            is_long = bool((beta * k.square().sum(-1)).max() > 2.1) or bool(k.square().sum(-1).max() > 64)
            merge_dtype = torch.float32 if is_long else torch.float16
            products = (reference.pair_decay(g) * (k @ k.mT)).float()
            merged = merged_inverse(products, beta.float(), merge_dtype) * write.float()
            inverse[row, :, :L, :L] = reference.gated_inverse(k, beta, g) * write
            inverse[row, :, L:] = 0  # there beta is 0
        elif arguments.use_qk_l2norm:
            inverse[row, :, :L, :L] = reference.ungated_inverse(k, beta)
            merged = merged_inverse((k @ k.mT).float(), beta.float(), torch.float16)
        else:
            inverse[row, :, :L, :L] = reference.gated_inverse(k, beta, g)
            merged = merged_inverse((reference.pair_decay(g) * (k @ k.mT)).float(), beta.float(), torch.float32)
        yardstick[row, :, :L, :L] = merged.to(arguments.q.dtype)
    return gates, inverse, yardstick


def factors_of(gates: torch.Tensor, arguments: ForwardArguments) -> torch.Tensor:
    """Rows 1 to 3 of the scan's factors, from exact gates: e^g and e^{g_C - g} with the keys' norms, scale e^g with
    those of the queries."""
    g = gates[:, :, 0] * LOG_2
    key, query = (gates[:, :, 2], gates[:, :, 3]) if arguments.use_qk_l2norm else (1, 1)
    return torch.stack([g.exp() * key, g.exp() * query * arguments.scale, (g[:, :, -1:] - g).exp() * key], 2)


def check_scores(arguments: ForwardArguments, scores: torch.Tensor) -> None:
    """scale Q K^T up to the diagonal, and zeros in the rows behind the end."""
    from tilecrew.gated_delta_rule.chunk_blocks import whole_matrices

    wide = as_float64(arguments)
    eps = torch.finfo(scores.dtype).eps
    for slot, batch, tokens in chunks_of(arguments):
        q, k = (x[batch, tokens].transpose(0, 1) for x in (wide.q, wide.k))
        if arguments.use_qk_l2norm:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        L = k.shape[1]
        actual = whole_matrices(scores[slot]).double()
        size = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * arguments.scale
        expected = arguments.scale * q @ k.mT
        torch.testing.assert_close(actual[:, :L, :L].tril(), expected.tril(), rtol=eps, atol=1e-6 + 1e-5 * size)
        assert not actual[:, L:].any()


def check_prepare(arguments: ForwardArguments) -> None:
    """What the roles take, and what the scan takes."""
    for for_scan in (False, True):
        check_form(arguments, for_scan)


def check_form(arguments: ForwardArguments, for_scan: bool) -> None:
    from tilecrew.gated_delta_rule.chunk_blocks import whole_matrices

    prepared, o = run_prepare(arguments, for_scan)
    assert prepared.gate_inside_inverse == (for_scan or not arguments.use_qk_l2norm)
    gates, inverse, yardstick = expected_of(arguments, for_scan)
    slots = [slot for slot, _, _ in chunks_of(arguments)]
    assert len(set(slots)) == len(slots)
    # Gates are differences of cumulative sums: what counts is the absolute error, which grows with the sum.
    if for_scan:
        factors = prepared.factors[slots].double()
        torch.testing.assert_close(factors[:, :, 0], gates[:, :, 0], rtol=1e-6, atol=1e-5)
        expected = factors_of(gates, arguments)
        largest = float(gates[:, :, 0].abs().max()) if gates.numel() else 0.0
        rounding = 1e-5 + 4 * torch.finfo(torch.float32).eps * largest  # of the gates
        torch.testing.assert_close(factors[:, :, 1:], expected, rtol=rounding, atol=1e-7)
        check_scores(arguments, prepared.scores)
    else:
        actual = prepared.gates[slots].double()
        torch.testing.assert_close(actual[:, :, 0], gates[:, :, 0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(actual[:, :, 1], gates[:, :, 1], rtol=2e-6, atol=1e-7)
        if arguments.use_qk_l2norm:
            # Squares of norms are sums of an MMA, which truncates where others round.
            torch.testing.assert_close(actual[:, :, 2:], gates[:, :, 2:], rtol=1e-5, atol=1e-7)
    dtype = arguments.q.dtype
    assert prepared.inverse.dtype == dtype
    actual = whole_matrices(prepared.inverse[slots]) if for_scan else prepared.inverse[slots]
    assert_within(actual, inverse, yardstick, 1, dtype, "inverse")
    # Above the diagonal there is nothing, exactly.
    assert not actual.triu(1).any()
    if arguments.cu_seqlens is not None:
        end = int(arguments.cu_seqlens[-1])
        assert not o[:, end:].any()
        assert o[:, :end].isnan().all()  # the outputs of sequences are the next kernel's
    else:
        assert o.isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_tokens", [1, 5, 63, 64, 65, 127, 1000])
def test_numbers_of_tokens(num_tokens, dtype, normalise):
    check_prepare(problem(2, num_tokens, dtype=dtype, use_qk_l2norm=normalise, normalised=not normalise))


@BOTH
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 6])
def test_groups_of_value_heads(ratio, normalise):
    check_prepare(problem(2, 130, 3, 3 * ratio, use_qk_l2norm=normalise))


@BOTH
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[1, 64, 0, 65, 129, 300], [0, 0, 5], [64], [0]], ids=str)
def test_packed_sequences_with_nan_in_the_tail(lengths, index_dtype, normalise):
    arguments = with_nan_tail(problem(lengths=lengths, tail=150, use_qk_l2norm=normalise))
    check_prepare(replace(arguments, cu_seqlens=arguments.cu_seqlens.to(index_dtype)))


def test_many_sequences():
    """The binary search for the sequence of a slot, empty ones included."""
    check_prepare(problem(lengths=[n % 4 * (n % 67) for n in range(300)], tail=1, use_qk_l2norm=True))


@BOTH
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gates_inside(allow_neg_eigval, has_bias, gate_dtype, normalise):
    arguments = problem(2, 130, use_qk_l2norm=normalise, use_beta_sigmoid=True, allow_neg_eigval=allow_neg_eigval)
    gates = {"g": arguments.g * 10 + 3, "beta": arguments.beta * 8 - 4, "A_log": torch.linspace(-3, 2, 4).cuda()}
    gates = {name: x.to(gate_dtype) for name, x in gates.items()}
    bias = torch.tensor([-30.0, -1.0, 1.0, 30.0], dtype=gate_dtype).cuda() if has_bias else None
    check_prepare(replace(arguments, **gates, dt_bias=bias))


@BOTH
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("g", [0.0, -1e-3, -5.0, -20.0, -100.0, float("-inf")])
def test_gates_of_any_strength(g, dtype, normalise):
    arguments = problem(1, 200, dtype=dtype, use_qk_l2norm=normalise)
    arguments.g[:, 10] = g
    arguments.g[:, 100:140] = g
    check_prepare(arguments)


@BOTH
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_keys(beta, dtype, normalise):
    arguments = problem(1, 128, dtype=dtype, use_qk_l2norm=normalise)
    arguments.k[:] = arguments.k[:, :1].clone()
    arguments.beta.fill_(beta)
    check_prepare(arguments)


@pytest.mark.parametrize("dtype", HALF)
def test_long_keys_under_strong_gates(dtype):
    """|k| = 3: entries of the un-gated inverse would reach 8^62."""
    arguments = problem(1, 200, dtype=dtype, gate_strength=100.0)
    check_prepare(replace(arguments, k=arguments.k * 3))


def test_long_keys_in_some_chunks_only():
    """The scan's inverse is then merged in float16 and in bfloat16 parts, chunk by chunk."""
    arguments = problem(2, 300, 3, 12, gate_strength=100.0)
    arguments.k[0, 64:130] *= 3
    arguments.k[1, 290] *= 20
    check_form(arguments, for_scan=True)


def test_zero_keys_stay_zero():
    arguments = problem(1, 100, use_qk_l2norm=True)
    arguments.k[:, 10:20] = 0
    check_prepare(arguments)


@BOTH
def test_strided_inputs(normalise):
    check_prepare(with_strided_inputs(problem(2, 200, use_qk_l2norm=normalise)))


@BOTH
@pytest.mark.parametrize("for_scan", [False, True])
def test_hundred_runs_give_the_same_bits(for_scan, normalise):
    arguments = problem(4, 1024, use_qk_l2norm=normalise)
    first, _ = run_prepare(arguments, for_scan)
    num_rows = 4 if normalise else 2
    names = ("factors", "scores", "inverse") if for_scan else ("gates", "inverse")
    for _ in range(100):
        again, _ = run_prepare(arguments, for_scan)
        for name in names:
            actual, expected = getattr(again, name), getattr(first, name)
            if name == "gates":
                actual, expected = actual[:, :, :num_rows], expected[:, :, :num_rows]
            assert torch.equal(actual, expected), name


@BOTH
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [None, [1, 64, 0, 65, 129, 300]], ids=["batch", "packed"])
def test_beside_the_scan(lengths, ratio, normalise):
    """The same bits as before the scan, P_g of every value head in place of the scores, and all flags raised."""
    from tests.gated_delta_rule.hopper_checks import PREPARE_PROGRAMS, prepare_launch
    from tilecrew.gated_delta_rule.chunk_blocks import whole_matrices
    from tilecrew.gated_delta_rule.chunk_flags import FIRST_FLAG

    options = {"lengths": lengths, "tail": 150} if lengths else {}
    arguments = problem(2, 300, 3, 3 * ratio, use_qk_l2norm=normalise, **options)
    expected, o = run_prepare(arguments, for_scan=True)
    again = torch.full_like(o, float("nan"))
    actual, launch = prepare_launch(arguments, "scan 64 beside", again)
    launch.run()
    slots = [slot for slot, _, _ in chunks_of(arguments)]
    assert torch.equal(again.nan_to_num(7.0), o.nan_to_num(7.0))
    for name in ("inverse", "factors"):
        assert torch.equal(getattr(actual, name)[slots], getattr(expected, name)[slots]), name
    scores = whole_matrices(expected.scores[slots]).float().repeat_interleave(ratio, 1)
    g = expected.factors[slots][:, :, 0]
    decay = (g[..., :, None] - g[..., None, :]).tril().exp2()
    attention = whole_matrices(actual.attention[slots]).float()
    torch.testing.assert_close(attention, (scores * decay).tril(), rtol=2**-8, atol=1e-7)
    tickets = actual.tickets.tolist()
    assert tickets[FIRST_FLAG.value :] == (len(tickets) - FIRST_FLAG.value) * [1]
    assert tickets[1] >= PREPARE_PROGRAMS
