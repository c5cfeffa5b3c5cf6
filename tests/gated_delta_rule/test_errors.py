"""Bad input: the error names the argument, what it is and what was expected, and comes before anything is computed."""

import pytest
import torch

from tilecrew import chunk_gated_delta_rule, explain_chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tilecrew.gated_delta_rule.checks import check_offsets
from tilecrew.gated_delta_rule.schedule import IMPLEMENTATIONS

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 16
HOST = (chunk_gated_delta_rule, explain_chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
CHUNKED = (chunk_gated_delta_rule, explain_chunk_gated_delta_rule)


def inputs(batch=B, **changes):
    """A valid call with `changes`; functions change the valid value."""
    call = {
        "q": torch.randn(batch, T, H, K),
        "k": torch.randn(batch, T, H, K),
        "v": torch.randn(batch, T, HV, V),
        "g": -torch.rand(batch, T, HV),
        "beta": torch.rand(batch, T, HV),
    }
    for name, change in changes.items():
        call[name] = change(call[name]) if callable(change) else change
    return call


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def raises(functions, error, message, call):
    for function in functions:
        with pytest.raises(error, match=message):
            function(**call)
    if chunk_gated_delta_rule in functions:
        # A forced implementation has the same checks, and they come first.
        for implementation in IMPLEMENTATIONS:
            with pytest.raises(error, match=message):
                chunk_gated_delta_rule(**call, implementation=implementation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"k": torch.zeros(3, T, H, K)},
            r"k must .* B = 2 \(from q of shape \(2, 6, 2, 8\)\), got shape \(3, 6, 2, 8\)",
        ),
        ({"k": torch.zeros(B, 5, H, K)}, r"k must .* T = 6 .* got shape \(2, 5, 2, 8\)"),
        ({"k": torch.zeros(B, T, 1, K)}, r"k must .* H = 2 .* got shape \(2, 6, 1, 8\)"),
        ({"k": torch.zeros(B, T, H, 4)}, r"k must .* K = 8 .* got shape \(2, 6, 2, 4\)"),
        ({"v": torch.zeros(B, 7, HV, V)}, r"v must have shape \[B, T, HV, V\] with T = 6 .* got shape \(2, 7, 4, 16\)"),
        (
            {"v": torch.zeros(B, T, 3, V)},
            r"multiple of .* HV = 3 \(v of shape \(2, 6, 3, 16\)\) and H = 2 \(q of shape",
        ),
        ({"v": torch.zeros(B, T, 0, V)}, r"v must have at least one head"),
        ({"v": torch.zeros(B, T, HV, 0)}, r"v must have at least one head"),
        ({"g": torch.zeros(B, T, H)}, r"g must .* HV = 4 \(from v of shape \(2, 6, 4, 16\)\), got shape \(2, 6, 2\)"),
        ({"beta": torch.zeros(B, 1, HV)}, r"beta must .* T = 6 .* got shape \(2, 1, 4\)"),
        ({"q": torch.zeros(T, H, K)}, r"q must have 4 dimensions \[B, T, H, K\], got 3: shape \(6, 2, 8\)"),
        ({"q": torch.zeros(())}, r"q must have 4 dimensions \[B, T, H, K\], got 0: shape \(\)"),
        ({"g": torch.zeros(T, HV)}, r"g must have 3 dimensions \[B, T, HV\], got 2: shape \(6, 4\)"),
        (
            {"q": lambda q: q.transpose(-1, -2).contiguous().transpose(-1, -2)},
            r"q must be contiguous in its last dim.*strides",
        ),
        ({"v": lambda v: v[..., ::2]}, r"v must be contiguous in its last dimension"),
        ({"k": lambda k: k.to("meta")}, r"k must be on the device of q, cpu, got meta"),
        ({"g": lambda g: g.to("meta")}, r"g must be on the device of q, cpu, got meta"),
        ({"beta": lambda beta: beta.to("meta")}, r"beta must be on the device of q, cpu, got meta"),
        ({"initial_state": torch.zeros(3, HV, K, V)}, r"initial_state must .* N = 2 .* got shape \(3, 4, 8, 16\)"),
        ({"initial_state": torch.zeros(B, HV, V, K)}, r"initial_state must .* K = 8 .* got shape \(2, 4, 16, 8\)"),
        (
            {"initial_state": torch.zeros(B, HV, K, V), "state_v_first": True},
            r"initial_state must have shape \[N, HV, V, K\] with V = 16 .* got shape \(2, 4, 8, 16\)",
        ),
        ({"initial_state": torch.zeros(HV, K, V)}, r"initial_state must have 4 dimensions \[N, HV, K, V\], got 3"),
        ({"initial_state": torch.zeros(B, HV, K, V, device="meta")}, r"initial_state must be on the device of q"),
        ({"cu_seqlens": offsets(0, 6)}, r"q must have batch size 1 with cu_seqlens .* got q of shape \(2, 6, 2, 8\)"),
        ({"allow_neg_eigval": True}, r"allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"),
        ({"A_log": torch.zeros(HV)}, r"A_log is used only with use_gate_in_kernel=True"),
        ({"dt_bias": torch.zeros(HV)}, r"dt_bias is used only with use_gate_in_kernel=True"),
        ({"use_gate_in_kernel": True}, r"use_gate_in_kernel=True needs A_log \[HV\], got None"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(H)}, r"A_log must .* HV = 4 .* got shape \(2,\)"),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(1, HV)},
            r"dt_bias must have 1 dimensions \[HV\], got 2: shape \(1, 4\)",
        ),
    ],
)
def test_value_errors_of_both_functions(changes, message):
    raises(HOST, ValueError, message, inputs(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": lambda k: k.half()}, r"q, k and v must have one dtype, got q torch.float32 and k torch.float16"),
        ({"v": lambda v: v.bfloat16()}, r"q, k and v must have one dtype, got q torch.float32 and v torch.bfloat16"),
        ({"q": lambda q: q.int()}, r"q must be bfloat16 or float16 or float32 or float64, got int32"),
        ({"g": lambda g: g.int()}, r"g must be .*float64, got int32"),
        ({"beta": lambda beta: beta.long()}, r"beta must be .*float64, got int64"),
        ({"q": [[1.0]]}, r"q must be a torch.Tensor, got list"),
        ({"v": None}, r"v must be a torch.Tensor, got NoneType"),
        ({"scale": "1"}, r"scale must be a float or None, got str"),
        ({"scale": torch.ones(())}, r"scale must be a float or None, got Tensor"),
        ({"scale": True}, r"scale must be a float or None, got bool"),
        ({"initial_state": torch.zeros(B, HV, K, V).int()}, r"initial_state must be .* got int32"),
        ({"initial_state": torch.zeros(B, HV, K, V).double()}, r"initial_state must be .* with q float32, got float64"),
        ({"initial_state": 0.0}, r"initial_state must be a torch.Tensor, got float"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(HV).int()}, r"A_log must be .* got int32"),
    ],
)
def test_type_errors_of_both_functions(changes, message):
    raises(HOST, TypeError, message, inputs(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"cu_seqlens": offsets(0, 4, 3, 6)},
            ValueError,
            r"cu_seqlens must not decrease, got 4 then 3 at index 1 of \[0, 4",
        ),
        ({"cu_seqlens": offsets(0, 7)}, ValueError, r"cu_seqlens must end at T = 6 or before, got \[0, 7\]"),
        ({"cu_seqlens": offsets(1, 6)}, ValueError, r"cu_seqlens must start at 0, got \[1, 6\]"),
        ({"cu_seqlens": offsets(-1, 6)}, ValueError, r"cu_seqlens must start at 0, got \[-1, 6\]"),
        (
            {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
            ValueError,
            r"cu_seqlens must have shape \[N \+ 1\] .* got shape \(0,\)",
        ),
        ({"cu_seqlens": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, r"cu_seqlens must have shape \[N \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, r"cu_seqlens must be int32 or int64, got float32"),
        ({"cu_seqlens": [0, 6]}, TypeError, r"cu_seqlens must be a torch.Tensor, got list"),
        ({"cu_seqlens": offsets(0, 6).to("meta")}, ValueError, r"cu_seqlens must be on the device of q, cpu, got meta"),
        (
            {"cu_seqlens": offsets(0, 6), "initial_state": torch.zeros(2, HV, K, V)},
            ValueError,
            r"initial_state must .* N = 1 \(from cu_seqlens of shape \(2,\)\), got shape \(2, 4, 8, 16\)",
        ),
    ],
)
def test_offsets_of_both_functions(changes, error, message):
    raises(HOST, error, message, inputs(batch=1, **changes))


@pytest.mark.parametrize(
    ("cu_seqlens", "cu_seqlens_cpu", "error", "message"),
    [
        (None, offsets(0, 6), ValueError, r"cu_seqlens_cpu is a host copy of cu_seqlens, got cu_seqlens=None"),
        (
            offsets(0, 6),
            offsets(0, 3, 6),
            ValueError,
            r"cu_seqlens_cpu must have the shape of cu_seqlens, \(2,\), got \(3,\)",
        ),
        (offsets(0, 6), offsets(0, 5), ValueError, r"cu_seqlens_cpu must equal cu_seqlens, got \[0, 5\] and \[0, 6\]"),
        (offsets(0, 6), offsets(0, 6).float(), TypeError, r"cu_seqlens_cpu must be int32 or int64, got float32"),
        (offsets(0, 6), offsets(0, 6).to("meta"), ValueError, r"cu_seqlens_cpu must be on the host, got meta"),
    ],
)
def test_offsets_on_the_host(cu_seqlens, cu_seqlens_cpu, error, message):
    raises(CHUNKED, error, message, inputs(batch=1, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu))


def test_offsets_on_a_device_are_checked_by_their_host_copy():
    on_device = offsets(0, 4, 3).to("meta")
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must not decrease, got 4 then 3"):
        check_offsets(on_device, offsets(0, 4, 3), 6)
    check_offsets(on_device, None, 6)


def test_long_offsets_are_abbreviated():
    with pytest.raises(ValueError, match=r"got \[0, 1, 2, 3, 4, 5, ..., 95, 96, 97, 98, 99\] \(100 values\)"):
        check_offsets(torch.arange(100), None, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 48}, r"chunk_size must be one of \(16, 32, 64\), got 48"),
        ({"chunk_size": "64"}, r"chunk_size must be one of \(16, 32, 64\), got '64'"),
        ({"cp_context": object()}, r"cp_context must be None .* got object"),
        ({"history_tolerance": -1e-9}, r"history_tolerance must be at least 0 and below 1, got -1e-09"),
        ({"history_tolerance": 1}, r"history_tolerance must be at least 0 and below 1, got 1"),
        ({"history_tolerance": float("nan")}, r"history_tolerance must be at least 0 and below 1, got nan"),
        ({"history_tolerance": float("inf")}, r"history_tolerance must be at least 0 and below 1, got inf"),
    ],
)
def test_options_of_the_chunked_function(changes, message):
    raises(CHUNKED, ValueError, message, inputs(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"history_tolerance": None}, r"history_tolerance must be a float, got NoneType"),
        ({"history_tolerance": True}, r"history_tolerance must be a float, got bool"),
        ({"history_tolerance": torch.zeros(())}, r"history_tolerance must be a float, got Tensor"),
        ({"batch_invariant": 1}, r"batch_invariant must be a bool, got int"),
        ({"batch_invariant": None}, r"batch_invariant must be a bool, got NoneType"),
    ],
)
def test_types_of_options_of_the_chunked_function(changes, message):
    raises(CHUNKED, TypeError, message, inputs(**changes))


def test_unknown_implementation():
    for function, known in (
        (chunk_gated_delta_rule, "scan, roles, portable, chunked"),
        (fused_recurrent_gated_delta_rule, "recurrent, torch"),
    ):
        with pytest.raises(ValueError, match=rf"implementation must be None or one of {known}, got 'fast'"):
            function(**inputs(), implementation="fast")


@pytest.mark.parametrize("implementation", ["scan", "roles", "portable"])
def test_forced_kernels_say_why_they_cannot_run(implementation):
    with pytest.raises(ValueError, match=rf"implementation='{implementation}' cannot run: "):
        chunk_gated_delta_rule(**inputs(), implementation=implementation)
    call = inputs()
    call["g"].requires_grad_()
    for function in CHUNKED:
        with pytest.raises(ValueError, match=r"the kernel has no backward, and an input requires a gradient"):
            function(**call, implementation=implementation)


def test_forced_decode_kernel_says_why_it_cannot_run():
    with pytest.raises(
        ValueError, match=r"implementation='recurrent' cannot run: Triton has no compiler for cpu tensors"
    ):
        fused_recurrent_gated_delta_rule(**inputs(), implementation="recurrent")
    call = inputs()
    call["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"the kernel has no backward"):
        fused_recurrent_gated_delta_rule(**call, implementation="recurrent")


POOL = torch.zeros(5, HV, K, V)
INDICES = torch.tensor([3, -1])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gk": torch.zeros(B, T, HV, V)}, ValueError, r"gk must .* K = 8 .* got shape \(2, 6, 4, 16\)"),
        ({"gv": torch.zeros(B, T, HV, K)}, ValueError, r"gv must .* V = 16 .* got shape \(2, 6, 4, 8\)"),
        ({"gk": torch.zeros(B, T, HV)}, ValueError, r"gk must have 4 dimensions \[B, T, HV, K\], got 3"),
        ({"gv": torch.zeros(B, T, HV, V).int()}, TypeError, r"gv must be .* got int32"),
        (
            {"beta": torch.zeros(B, T, HV, K)},
            ValueError,
            r"beta must have shape \[B, T, HV, V\] with V = 16 .* \(2, 6, 4, 8\)",
        ),
        ({"beta": torch.zeros(T, HV)}, ValueError, r"beta must have 4 dimensions|beta must have 3 dimensions"),
        ({"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError, r"use_beta_sigmoid_in_kernel=True needs beta"),
        ({"g": None, "use_gate_in_kernel": True, "A_log": torch.zeros(HV)}, ValueError, r"needs the raw gate in g"),
        ({"inplace_state": True}, ValueError, r"inplace_state needs initial_state, got None"),
        ({"state_indices": INDICES}, ValueError, r"state_indices needs initial_state, got None"),
        (
            {"initial_state": POOL, "state_indices": INDICES[:1]},
            ValueError,
            r"state_indices must have shape \[N\] with N = 2 .* got shape \(1,\)",
        ),
        (
            {"initial_state": POOL, "state_indices": INDICES[None]},
            ValueError,
            r"state_indices must have 1 dimensions \[N\]",
        ),
        ({"initial_state": POOL, "state_indices": INDICES.float()}, TypeError, r"state_indices must be int32 or int64"),
        (
            {"initial_state": POOL, "state_indices": [3, -1]},
            TypeError,
            r"state_indices must be a torch.Tensor, got list",
        ),
        (
            {"initial_state": POOL, "state_indices": INDICES.to("meta")},
            ValueError,
            r"state_indices must be on the device of q",
        ),
        (
            {"initial_state": POOL[:, :2], "state_indices": INDICES},
            ValueError,
            r"initial_state must .* HV = 4 .* \(5, 2, 8, 16\)",
        ),
        (
            {"initial_state": POOL.half(), "state_indices": INDICES},
            TypeError,
            r"initial_state must be float32 or bfloat16 with state_indices or inplace_state, got float16",
        ),
        (
            {"initial_state": POOL[:2].half(), "inplace_state": True},
            TypeError,
            r"initial_state must be float32 or bfloat16",
        ),
        (
            {"initial_state": POOL[:2].transpose(2, 3).contiguous().transpose(2, 3), "inplace_state": True},
            ValueError,
            r"initial_state must have contiguous rows",
        ),
    ],
)
def test_decode(changes, error, message):
    raises((fused_recurrent_gated_delta_rule,), error, message, inputs(**changes))


def test_decode_in_place_has_no_gradient():
    call = inputs(initial_state=torch.zeros(B, HV, K, V), inplace_state=True)
    call["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"inplace_state=True has no gradient, and an input requires one"):
        fused_recurrent_gated_delta_rule(**call)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": lambda k: k.cpu()}, r"k must be on the device of q, cuda:0, got cpu"),
        ({"initial_state": torch.zeros(B, HV, K, V)}, r"initial_state must be on the device of q, cuda:0, got cpu"),
    ],
)
def test_devices(changes, message):
    call = {name: tensor.cuda() for name, tensor in inputs().items()}
    call |= {name: change(call[name]) if callable(change) else change for name, change in changes.items()}
    for function in HOST:
        with pytest.raises(ValueError, match=message):
            function(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["scan", "roles", "portable"])
def test_float64_with_a_forced_kernel(implementation):
    call = {name: tensor.double().cuda() for name, tensor in inputs().items()}
    with pytest.raises(ValueError, match=r"q is float64|it needs compute capability"):
        chunk_gated_delta_rule(**call, implementation=implementation)
    assert explain_chunk_gated_delta_rule(**call).implementation == "chunked"
