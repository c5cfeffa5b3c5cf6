"""The public functions of the gated delta rule: defaults, checks, and where gradients go. No tiles.

Symbols: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K and V head sizes, N sequences, P
rows of a state pool, C chunk size. The recurrence, per value head with the state S (K x V), is in README.md beside
this (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024):

    S <- e^{g_t} S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = scale * S^T q_t
"""

import dataclasses
import inspect
from typing import Any

import torch

from tilecrew import _eager as eager
from tilecrew._plans import PlainCall
from tilecrew.gated_delta_rule import checks, gates, operators, recurrent_operators
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.gated_delta_rule.schedule import (
    IMPLEMENTATIONS,
    RECURRENT_IMPLEMENTATIONS,
    Schedule,
    require_differentiable,
    require_known,
)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
    output_h: bool = False,
    history_tolerance: float = 0,  # as an int, or torch.compile would make an input of it
    batch_invariant: bool = False,
) -> tuple[Any, ...]:
    """The gated delta rule over whole sequences, computed chunk by chunk: prefill and training.

    Argument names, order and meaning follow flash-linear-attention 0.6. Gradients flow to q, k, v, g, beta,
    initial_state, A_log and dt_bias, each in its input's dtype; such calls use the "chunked" implementation on every
    device. Works under torch.compile(fullgraph=True). No call reads a value from the device on the host, except
    "chunked" there with cu_seqlens.

    Args:
        q, k: [B, T, H, K] queries and keys, float64, float32, bfloat16 or float16, any strides but a contiguous last
            dimension.
        v: [B, T, HV, V] values of the same dtype; value head i uses query/key head i // (HV / H).
        g: [B, T, HV] natural-log decay of each token, <= 0; any of those dtypes. Values below -100 count as -100
            (e^-100 is nothing in float32), so -inf is a hard reset, with gradient 0. With use_gate_in_kernel the raw
            gate, see A_log.
        beta: [B, T, HV] write strength; any of those dtypes.
        scale: factor on the queries, default K ** -0.5.
        initial_state: [N, HV, K, V] state before the first token, default zeros. Converted to float32 (q float64:
            float64).
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares along K + 1e-6).
        use_beta_sigmoid_in_kernel: beta holds logits, the write strength is sigmoid(beta).
        allow_neg_eigval: the write strength is 2 * sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 offsets of sequences packed along T, on the device of q; B must be 1. They
            start at 0, never decrease (equal offsets are an empty sequence), and end at T or before: tokens behind the
            last give zeros. Checked where the values are on the host; wrong offsets that are on a device only give
            undefined results.
        cu_seqlens_cpu: the same offsets on the host, which lets them be checked and saves "chunked" a synchronisation.
        chunk_indices: accepted for compatibility and not needed.
        cp_context: must be None: context parallelism over devices is not offered.
        use_gate_in_kernel: g holds the raw gate a, the log decay is -exp(A_log) * softplus(a + dt_bias).
        A_log, dt_bias: [HV] for use_gate_in_kernel, which needs A_log; dt_bias defaults to zeros.
        chunk_size: tokens per chunk, 16, 32 or 64: the grid of h, and of the implementations "portable" and "chunked".
        implementation: None chooses (`explain_chunk_gated_delta_rule` tells what and why); "scan", "roles",
            "portable" or "chunked" force one.
        output_h: also return the state before each chunk; no gradient flows through it.
        history_tolerance: from 0 on and below 1. Where the schedule cuts sequences into pieces that run at the same
            time, a piece whose gates multiply to less than this passes nothing on of the state before it. No state
            then loses more than this share of the largest state before it, provided that 0 <= beta |k|^2 <= 2, as
            for keys of unit length; longer keys void the bound. 0, the default, is exact.
        batch_invariant: a sequence gives the same bits alone, in any batch, and packed: everything that would be
            chosen by the number or the lengths of sequences is fixed, which costs time. Calls are comparable that
            share heads, dtype, options and device. Not available where an input requires a gradient.

    Returns:
        (o, final_state), or (o, final_state, h) with output_h.
        o: [B, T, HV, V] in the dtype of q.
        final_state: [N, HV, K, V] ([N, HV, V, K]) float32 (float64), or None. Never an alias of initial_state.
        h (output_h only): in the dtype of q. Without cu_seqlens [B, ceil(T / C), HV, K, V]; with them [1, T // C + N,
            HV, K, V], where chunk c of sequence n from token s on is at s // C + n + c, and the other entries are
            zeros.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices, strides, offsets or options that do not fit, or a forced implementation that
            cannot run, or batch_invariant where it cannot be kept: the message names the argument, what it is and what
            was expected.
    """
    call = eager.plain_call(
        (q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, A_log, dt_bias),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            state_v_first,
            cp_context,
            use_gate_in_kernel,
            chunk_size,
            implementation,
            output_h,
            history_tolerance,
            batch_invariant,
        ),
    )
    plan = operators.PLANS.find(call)
    if call is not None and plan is not None:
        checks.check_offsets(cu_seqlens, cu_seqlens_cpu, q.shape[1])
        results = plan.run(call.tensors, call.addresses)
        if results is not None:
            return results if output_h else results[:2]
    arguments = _forward_arguments(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        implementation=implementation,
        output_h=output_h,
        history_tolerance=history_tolerance,
        batch_invariant=batch_invariant,
    )
    return _run_chunked(arguments, implementation, call)


def _run_chunked(arguments: ForwardArguments, implementation: str | None, call: PlainCall | None) -> tuple[Any, ...]:
    """What `chunk_gated_delta_rule` returns for checked arguments; `call` where the dispatcher need not see it."""
    requires_gradient = _requires_gradient(arguments)
    if requires_gradient:
        arguments = _with_differentiable_gates(arguments, implementation)
    if call is not None:
        result = operators.chunk_forward_directly(arguments, implementation, call)
    else:
        result = operators.chunk_forward(arguments, requires_gradient, implementation)
    if result.h is not None:
        return result.o, result.final_state, result.h
    return result.o, result.final_state


def explain_chunk_gated_delta_rule(*arguments: Any, **options: Any) -> Schedule:
    """What `chunk_gated_delta_rule` with the same arguments would run, and why; nothing is computed.

    Takes the arguments of `chunk_gated_delta_rule`. Returns a Schedule: `str(schedule)` is one readable line, e.g.
    "scan, V block 64, chunk 64: the fastest for this problem on NVIDIA H200; 128 CTAs of 64 values on 132 SMs". Raises
    what that function would raise.
    """
    call = inspect.signature(chunk_gated_delta_rule).bind(*arguments, **options)
    call.apply_defaults()
    del call.arguments["chunk_indices"]
    checked = _forward_arguments(**call.arguments)
    checks.check_offsets(checked.cu_seqlens, checked.cu_seqlens_cpu, checked.q.shape[1])
    return operators.schedule_of(checked, _requires_gradient(checked), call.arguments["implementation"])


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    state_indices: torch.Tensor | None = None,
    inplace_state: bool = False,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule token by token: decode, and short runs of tokens.

    Argument names, order and meaning follow flash-linear-attention 0.6; the last three are additions. Works under
    torch.compile(fullgraph=True) and in CUDA graphs: "recurrent" reads no value from the device on the host ("torch"
    reads offsets and indices). Where an input requires a gradient "torch" serves, which is differentiable.

    Args:
        q, k, v, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens: as in `chunk_gated_delta_rule`.
        g: [B, T, HV] natural-log decay, <= 0, or the raw gate; None for no decay.
        gk, gv: [B, T, HV, K] and [B, T, HV, V] further natural-log decay of each key and each value channel.
        beta: [B, T, HV], or [B, T, HV, V] for each value channel, write strength; None for 1.
        initial_state: [N, HV, K, V], default zeros. float32; a bfloat16 state is stored in bfloat16, arithmetic stays
            float32; float16 is converted to float32 (with q float64, the state is float64). With state_indices a pool
            [P, HV, K, V].
        output_final_state: return the state after the last token.
        state_indices: [N] int32 or int64 on the device of q: sequence n starts from row state_indices[n] of
            initial_state. A negative index is padding: zeros come out, nothing is written. Indices must be below P
            and, with inplace_state, differ from each other: they are on the device, so they are not checked there.
        inplace_state: write the final state over the rows it started from and return initial_state itself. Not
            differentiable. Needs initial_state in float32 or bfloat16 (float64 with q float64) with contiguous rows.
        implementation: None chooses, "recurrent" forces the Triton kernel, "torch" the same recurrence in torch.

    Returns:
        o: [B, T, HV, V] in the dtype of q.
        final_state: [N, HV, K, V] ([N, HV, V, K]) in the dtype of initial_state as above; initial_state itself with
            inplace_state; or None.

    Raises:
        TypeError, ValueError: as `chunk_gated_delta_rule`.
    """
    call = eager.plain_call(
        (q, k, v, g, gk, gv, beta, initial_state, state_indices, cu_seqlens, A_log, dt_bias),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            state_v_first,
            inplace_state,
            implementation,
        ),
    )
    plan = recurrent_operators.PLANS.find(call)
    if call is not None and plan is not None:
        results = plan.run(call.tensors, call.addresses)
        if results is not None:
            return results
    checks.check_gate_options(use_gate_in_kernel, A_log, dt_bias)
    require_known(implementation, RECURRENT_IMPLEMENTATIONS)
    arguments = RecurrentArguments(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=checks.resolve_scale(scale, q),
        gk=gk,
        gv=gv,
        initial_state=initial_state,
        state_indices=state_indices,
        inplace_state=inplace_state,
        output_final_state=output_final_state or inplace_state,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    checks.check_recurrent(arguments)
    if _requires_gradient(arguments):
        require_differentiable(implementation)
        if inplace_state:
            raise ValueError("inplace_state=True has no gradient, and an input requires one")
        return recurrent_operators.recurrent_differentiable(arguments)
    if call is not None:
        return recurrent_operators.recurrent_forward_directly(arguments, implementation, call)
    return recurrent_operators.recurrent_forward(arguments, implementation)


# What differs in name between the public function and ForwardArguments.
_FIELD_NAMES = {"use_qk_l2norm_in_kernel": "use_qk_l2norm", "use_beta_sigmoid_in_kernel": "use_beta_sigmoid"}


def _forward_arguments(
    *, use_gate_in_kernel: bool, cp_context: object, implementation: str | None, scale: float | None, **options: Any
) -> ForwardArguments:
    """Checks a call of `chunk_gated_delta_rule`, given by its argument names."""
    checks.check_gate_options(use_gate_in_kernel, options["A_log"], options["dt_bias"])
    require_known(implementation, IMPLEMENTATIONS)
    if cp_context is not None:
        raise ValueError(
            f"cp_context must be None (no context parallelism over devices), got {type(cp_context).__name__}"
        )
    fields = {_FIELD_NAMES.get(name, name): value for name, value in options.items()}
    arguments = ForwardArguments(scale=checks.resolve_scale(scale, options["q"]), **fields)
    checks.check_forward(arguments)
    return arguments


def _requires_gradient(arguments: ForwardArguments | RecurrentArguments) -> bool:
    if not torch.is_grad_enabled():
        return False
    names = ("q", "k", "v", "g", "gk", "gv", "beta", "initial_state", "A_log", "dt_bias")
    tensors = (getattr(arguments, name, None) for name in names)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _with_differentiable_gates(arguments: ForwardArguments, implementation: str | None) -> ForwardArguments:
    """Norms, gates and conversions in torch, so that the operator's backward has applied gates and float32 states
    only."""
    require_differentiable(implementation)
    arguments = gates.apply_gates(arguments)
    if arguments.initial_state is None:
        return arguments
    state = arguments.initial_state.to(operators.state_dtype(arguments.q))
    return dataclasses.replace(arguments, initial_state=state)
