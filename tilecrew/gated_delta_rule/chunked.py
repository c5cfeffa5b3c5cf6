"""The chunk form in batched torch: the path of CPUs, of every other device without a kernel, and of gradients.

Computes in float32 (float64 where q is float64); stage numbers are those of README.md. The chunks are walked in groups
(`chunk_groups`): what does not need the state is computed for a whole group at once, and each step of the scan serves
every sequence that still has a chunk.

Layouts, for m chunks in a group, R value heads that share each of H query/key heads, and C tokens per chunk:
q, k [m, H, C, K]; state [sequence, H, K, R * V], so that one product with the shared q and k serves all R heads;
what belongs to one value head [m, H, R, C, ...].
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.chunk_groups import Group, blocks, token_bounds
from tilecrew.gated_delta_rule.gates import MINIMUM_LOG_DECAY, apply_gates, compute_dtype, l2norm

# Diagonal blocks up to this size are inverted by substitution, larger ones are merged from them by matrix products.
LARGEST_SUBSTITUTED_BLOCK = 16


@dataclass(frozen=True)
class _Sizes:
    """H query/key heads, R value heads for each, K, V, C tokens per chunk, and the dtype computed in."""

    H: int
    R: int
    K: int
    V: int
    C: int
    dtype: torch.dtype

    @staticmethod
    def of(arguments: ForwardArguments) -> "_Sizes":
        H, K = arguments.q.shape[2:]
        HV, V = arguments.v.shape[2:]
        return _Sizes(H, HV // H, K, V, arguments.chunk_size, compute_dtype(arguments.q))


class _Inputs(NamedTuple):
    """The inputs of all tokens [B * T, ...], gates applied but for the l2norm."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    use_qk_l2norm: bool

    @staticmethod
    def of(arguments: ForwardArguments) -> "_Inputs":
        # The l2norm is left to _prepare, which does it group by group and without rounding.
        gated = apply_gates(replace(arguments, use_qk_l2norm=False))
        q, k, v, g, beta = (x.flatten(0, 1) for x in (gated.q, gated.k, gated.v, gated.g, gated.beta))
        return _Inputs(q, k, v, g, beta, arguments.scale, arguments.use_qk_l2norm)


@dataclass(frozen=True)
class _Prepared:
    """What a group's chunks need of everything but the state.

    qk           [m, H, 2, C, K]  scaled queries, and keys
    v            [m, H, R, C, V]  a view of gathered rows
    beta         [m, H, R, C]
    gamma        [m, H, R, C]     e^g, g cumulative
    to_end       [m, H, R, C]     e^(g_C - g)
    pair_decay   [m, H, R, C, C]  G
    scores       [m, H, 2, C, C]  scale * Q K^T, and K K^T
    inverse      [m, H, R, C, C]  the gated inverse, G * A
    P_g, A_g     [m, H, R, C, C]
    """

    qk: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    gamma: torch.Tensor
    to_end: torch.Tensor
    pair_decay: torch.Tensor
    scores: torch.Tensor
    inverse: torch.Tensor
    P_g: torch.Tensor
    A_g: torch.Tensor


def _prepare(inputs: _Inputs, sizes: _Sizes, group: Group) -> _Prepared:
    """Stages (1) to (3), for all chunks of the group at once."""
    H, R, K, V, C, dtype = sizes.H, sizes.R, sizes.K, sizes.V, sizes.C, sizes.dtype
    qk = inputs.q.new_empty(group.rows.shape[0] // C, H, 2, C, K, dtype=dtype)
    for part, x in enumerate((inputs.q, inputs.k)):
        qk[:, :, part] = group.gather(x).view(-1, C, H, K).transpose(1, 2)
    if inputs.use_qk_l2norm:
        qk = l2norm(qk)
    qk[:, :, 0] *= inputs.scale
    v = group.gather(inputs.v).to(dtype).view(-1, C, H, R, V).permute(0, 2, 3, 1, 4)
    g, beta = (group.gather(x).view(-1, C, H, R).permute(0, 2, 3, 1).contiguous() for x in (inputs.g, inputs.beta))
    # (1)
    gamma = g.cumsum(-1).exp()
    # (3) G_ij, whose exponent is the sum of g over j < l <= i: a difference of cumulative sums would lose digits behind
    # a hard reset. It is 0 for j > i, so that nothing can overflow before the mask (and e^-inf would be slow on CPUs).
    past = torch.ones(C, C, dtype=dtype, device=g.device).tril_(-1)
    G = (g[..., :, None] * past).cumsum(-2).exp_().tril_()
    to_end = G[..., -1, :]
    # (3) P_g = G * (scale * Q K^T)
    scores = (qk.flatten(2, 3).flatten(0, 1) @ qk[:, :, 1].flatten(0, 1).mT).view(-1, H, 2, C, C)
    P_g = G * scores[:, :, None, 0]
    # (2), the gated variant, so that long keys under strong gates do not overflow
    N = (G * scores[:, :, None, 1]).mul_(beta[..., :, None])
    inverse = unit_lower_inverse(N.flatten(0, 2)).view_as(N)
    # (3) A_g = G * A * beta_j
    A_g = torch.mul(inverse, beta[..., None, :], out=N)
    return _Prepared(qk, v, beta, gamma, to_end, G, scores, inverse, P_g, A_g)


def unit_lower_inverse(N: torch.Tensor) -> torch.Tensor:
    """(I + StrictLower(N))^-1 for N [n, C, C]; only the strict lower half of N is read.

    Diagonal blocks by substitution, with n innermost so that every step is one long vector operation; then pairs of
    inverted blocks are merged, [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]].
    """
    n, C = N.shape[:2]
    size = C
    while size > LARGEST_SUBSTITUTED_BLOCK and size % 2 == 0:
        size //= 2
    # [size, size, block, n]
    diagonal = N.view(n, C // size, size, C // size, size).diagonal(dim1=1, dim2=3).permute(1, 2, 3, 0).contiguous()
    X = torch.zeros_like(diagonal)
    X.diagonal(dim1=0, dim2=1).fill_(1)
    for j in range(size - 1):
        X[j + 1 :, : j + 1].addcmul_(diagonal[j + 1 :, j, None], X[j, None, : j + 1], value=-1)
    X = X.flatten(2).flatten(0, 1).t().contiguous().view(-1, n, size, size)
    while size < C:
        num_pairs = X.shape[0] // 2
        upper, lower = X[0::2].reshape(-1, size, size), X[1::2].reshape(-1, size, size)
        corners = N.view(n, num_pairs, 2, size, num_pairs, 2, size)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)
        corners = corners.permute(3, 0, 1, 2).reshape(-1, size, size)
        X = N.new_zeros(num_pairs * n, 2 * size, 2 * size)
        X[:, :size, :size] = upper
        X[:, size:, size:] = lower
        X[:, size:, :size] = (lower @ (corners @ upper)).neg_()
        size *= 2
        X = X.view(num_pairs, n, size, size)
    return X.view(n, C, C)


def forward(arguments: ForwardArguments) -> ForwardResult:
    """All options of ForwardArguments, on any device. cu_seqlens_cpu, where given, saves a wait for cu_seqlens.

    final_state is float64 where q is float64, else float32. Autocast is off inside. Autograd does not see through this:
    `backward` has the gradients.
    """
    with torch.autocast(arguments.q.device.type, enabled=False):
        return _forward(arguments)


def _forward(arguments: ForwardArguments) -> ForwardResult:
    sizes, inputs, bounds = _Sizes.of(arguments), _Inputs.of(arguments), token_bounds(arguments)
    q = arguments.q
    o = _rows_like(arguments.v, bounds)
    h = q.new_zeros(arguments.num_slots, sizes.H * sizes.R, sizes.K, sizes.V) if arguments.output_h else None
    final_state = _outer_state(arguments, sizes, arguments.initial_state) if arguments.output_final_state else None
    for block in blocks(arguments, bounds):
        index = torch.tensor(block.sequences, device=q.device)
        state = _inner_state(arguments, sizes, arguments.initial_state, index)
        for group in block.groups:
            prepared = _prepare(inputs, sizes, group)
            scan = _scan(prepared, sizes, group.steps, state, keep_states=h is not None)
            group.scatter(o.flatten(0, 1), _output(prepared, scan))
            if h is not None and scan.states is not None:
                h.index_copy_(0, group.slots, _heads_first(scan.states, sizes).to(h.dtype))
        if final_state is not None:
            final_state.index_copy_(0, index, _heads_first(state, sizes, arguments.state_v_first))
    if h is not None:
        num_rows = q.shape[0] if arguments.cu_seqlens is None else 1
        h = h.view(num_rows, h.shape[0] // max(1, num_rows), *h.shape[1:])
    return ForwardResult(o=o, final_state=final_state, h=h)


def _rows_like(x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """An uninitialised contiguous tensor like x [B, T, ...], zeros in the rows of no sequence."""
    rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows.flatten(0, 1)[bounds[-1] :] = 0
    return rows


def _inner_state(
    arguments: ForwardArguments, sizes: _Sizes, state: torch.Tensor | None, index: torch.Tensor
) -> torch.Tensor:
    """Those sequences of a state in the caller's layout (None: zeros) as a new [n, H, K, R * V]."""
    H, R, K, V = sizes.H, sizes.R, sizes.K, sizes.V
    if state is None:
        return arguments.q.new_zeros(index.shape[0], H, K, R * V, dtype=sizes.dtype)
    state = state.index_select(0, index).to(sizes.dtype)
    state = state.mT if arguments.state_v_first else state
    return state.reshape(-1, H, R, K, V).transpose(2, 3).reshape(-1, H, K, R * V)


def _heads_first(state: torch.Tensor, sizes: _Sizes, state_v_first: bool = False) -> torch.Tensor:
    """[n, H, K, R * V] to [n, HV, K, V] (or [n, HV, V, K])."""
    H, R, K, V = sizes.H, sizes.R, sizes.K, sizes.V
    state = state.view(-1, H, K, R, V).transpose(2, 3).reshape(-1, H * R, K, V)
    return state.mT if state_v_first else state


def _outer_state(arguments: ForwardArguments, sizes: _Sizes, state: torch.Tensor | None) -> torch.Tensor:
    """A new state in the caller's layout, `state` or zeros: what sequences without tokens end with."""
    if state is not None:
        return state.to(sizes.dtype, copy=True, memory_format=torch.contiguous_format)
    last = (sizes.V, sizes.K) if arguments.state_v_first else (sizes.K, sizes.V)
    return arguments.q.new_zeros(arguments.num_sequences, sizes.H * sizes.R, *last, dtype=sizes.dtype)


class _Scanned(NamedTuple):
    """from_state [m, H, 2, C, R, V]: scale * Q S, and U = K S; W, V_d [m, H, R, C, V]; left [m, H, C, R, V]: V';
    states [m, H, K, R * V] before each chunk, or None."""

    from_state: torch.Tensor
    W: torch.Tensor
    V_d: torch.Tensor
    left: torch.Tensor
    states: torch.Tensor | None


def _scan(
    prepared: _Prepared, sizes: _Sizes, steps: list[slice], state: torch.Tensor, keep_states: bool = False
) -> _Scanned:
    """Stages (4), (5) and (7) through the steps of a group. Updates `state` [sequences, H, K, R * V] in place."""
    H, R, K, V, C = sizes.H, sizes.R, sizes.K, sizes.V, sizes.C
    m = prepared.qk.shape[0]
    from_state = state.new_empty(m, H, 2, C, R, V)
    W, V_d, left = state.new_empty(m, H, R, C, V), state.new_empty(m, H, R, C, V), state.new_empty(m, H, C, R, V)
    states = state.new_empty(m, H, K, R * V) if keep_states else None
    minus_gamma = -prepared.gamma[..., None]
    gamma_C = _state_factor(prepared, sizes)
    for step in steps:
        n = step.stop - step.start
        S = state[:n].view(n * H, K, R * V)
        qk = prepared.qk[step].view(n * H, 2 * C, K)
        if states is not None:
            states[step] = state[:n]
        # (4) U = K S, and Q S for stage (6)
        torch.bmm(qk, S, out=from_state[step].view(n * H, 2 * C, R * V))
        # (4) W = V - gamma * U
        torch.addcmul(prepared.v[step], minus_gamma[step], from_state[step][:, :, 1].transpose(2, 3), out=W[step])
        # (5) V_d = A_g W
        torch.bmm(prepared.A_g[step].flatten(0, 2), W[step].flatten(0, 2), out=V_d[step].flatten(0, 2))
        # (5) V' = e^(g_C - g) * V_d
        torch.mul(V_d[step], prepared.to_end[step][..., None], out=left[step].transpose(2, 3))
        # (7) S <- gamma_C S + K^T V'
        S.mul_(gamma_C[step].view(n * H, 1, R * V)).baddbmm_(qk[:, C:].mT, left[step].view(n * H, C, R * V))
    return _Scanned(from_state, W, V_d, left, states)


def _state_factor(prepared: _Prepared, sizes: _Sizes) -> torch.Tensor:
    """gamma_C [m, H, R * V]: what a chunk multiplies the state with."""
    return prepared.gamma[..., -1:].expand(-1, -1, -1, sizes.V).flatten(2)


def _output(prepared: _Prepared, scan: _Scanned) -> torch.Tensor:
    """(6) O = scale * gamma * (Q S) + P_g V_d, as rows [m * C, HV, V]."""
    m, H, R, C, V = scan.V_d.shape
    local = (prepared.P_g.flatten(0, 2) @ scan.V_d.flatten(0, 2)).view_as(scan.V_d)
    o = local.new_empty(m, C, H, R, V)
    from_state = scan.from_state[:, :, 0].transpose(2, 3)
    torch.addcmul(local, prepared.gamma[..., None], from_state, out=o.permute(0, 2, 3, 1, 4))
    return o.view(m * C, H * R, V)


@dataclass(frozen=True)
class Gradients:
    """Of a loss with respect to each input, in the input's shape and dtype; rows of no sequence are zeros.

    initial_state is None where the problem has none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None


def backward(arguments: ForwardArguments, do: torch.Tensor, dfinal_state: torch.Tensor | None = None) -> Gradients:
    """Gradients of <o, do> + <final_state, dfinal_state>, for a problem whose gates are applied (`gates.apply_gates`).

    do            [B, T, HV, V], any float dtype; rows of no sequence are not read
    dfinal_state  like final_state, or None for zeros

    dq and dk are summed over the value heads of a query/key head in float32 (float64). Tokens below the floor of the
    log decay get dg = 0. Only the inputs are needed: states are recomputed, those at the start of each group are kept.
    Raises ValueError where gates are left to apply.
    """
    if arguments.A_log is not None or arguments.use_qk_l2norm or arguments.use_beta_sigmoid:
        raise ValueError(
            "the chunked backward takes gated inputs: apply gates.apply_gates (differentiable) to them first"
        )
    with torch.autocast(arguments.q.device.type, enabled=False):
        return _backward(arguments, do, dfinal_state)


def _backward(arguments: ForwardArguments, do: torch.Tensor, dfinal_state: torch.Tensor | None) -> Gradients:
    sizes, inputs, bounds = _Sizes.of(arguments), _Inputs.of(arguments), token_bounds(arguments)
    do = do.flatten(0, 1)
    out = {name: _rows_like(getattr(arguments, name), bounds) for name in ("q", "k", "v", "g", "beta")}
    dinitial_state = _outer_state(arguments, sizes, dfinal_state)
    for block in blocks(arguments, bounds):
        index = torch.tensor(block.sequences, device=do.device)
        state = _inner_state(arguments, sizes, arguments.initial_state, index)
        starts = []
        for group in block.groups:
            starts.append(state[: group.steps[0].stop - group.steps[0].start].clone())
            _scan(_prepare(inputs, sizes, group), sizes, group.steps, state)
        dstate = _inner_state(arguments, sizes, dfinal_state, index)
        for group in reversed(block.groups):
            prepared = _prepare(inputs, sizes, group)
            scan = _scan(prepared, sizes, group.steps, starts.pop(), keep_states=True)
            dO = group.gather(do).to(sizes.dtype).view(-1, sizes.C, sizes.H, sizes.R, sizes.V)
            reverse = _reverse_scan(prepared, scan, sizes, group.steps, dO, dstate)
            for name, rows in _group_gradients(prepared, scan, reverse, sizes, arguments.scale).items():
                group.scatter(out[name].flatten(0, 1), rows)
        dinitial_state.index_copy_(0, index, _heads_first(dstate, sizes, arguments.state_v_first))
    out["g"].masked_fill_(arguments.g < MINIMUM_LOG_DECAY, 0)
    if arguments.initial_state is None:
        return Gradients(**out, initial_state=None)
    return Gradients(**out, initial_state=dinitial_state.to(arguments.initial_state.dtype))


class _ReverseScanned(NamedTuple):
    """dO, X, dW [m, H, R, C, V], with X = (G * A)^T dV_d and dW = dv = beta * X; K_dS [m, H, C, R, V]: K dS;
    dfrom_state [m, H, 2, C, R, V]: gamma * dO, and dU = -gamma * dW; dstates [m, H, K, R * V]: dS after each chunk."""

    dO: torch.Tensor
    X: torch.Tensor
    dW: torch.Tensor
    K_dS: torch.Tensor
    dfrom_state: torch.Tensor
    dstates: torch.Tensor


def _reverse_scan(
    prepared: _Prepared,
    scan: _Scanned,
    sizes: _Sizes,
    steps: list[slice],
    dO: torch.Tensor,
    dstate: torch.Tensor,
) -> _ReverseScanned:
    """The gradient of the state through a group's steps, last first. dO [m, C, H, R, V]; updates `dstate` in place."""
    H, R, K, V, C = sizes.H, sizes.R, sizes.K, sizes.V, sizes.C
    m = dO.shape[0]
    dO = dO.permute(0, 2, 3, 1, 4).contiguous()
    dfrom_state = torch.empty_like(scan.from_state)
    torch.mul(dO, prepared.gamma[..., None], out=dfrom_state[:, :, 0].transpose(2, 3))
    # dV_d = P_g^T dO + e^(g_C - g) * (K dS)
    dV_d = (prepared.P_g.flatten(0, 2).mT @ dO.flatten(0, 2)).view_as(dO)
    X, dW = torch.empty_like(dO), torch.empty_like(dO)
    K_dS = dO.new_empty(m, H, C, R, V)
    dstates = dO.new_empty(m, H, K, R * V)
    minus_gamma = -prepared.gamma[..., None]
    gamma_C = _state_factor(prepared, sizes)
    for step in reversed(steps):
        n = step.stop - step.start
        dS = dstate[:n].view(n * H, K, R * V)
        qk = prepared.qk[step].view(n * H, 2 * C, K)
        dstates[step] = dstate[:n]
        torch.bmm(qk[:, C:], dS, out=K_dS[step].view(n * H, C, R * V))
        dV_d[step].addcmul_(prepared.to_end[step][..., None], K_dS[step].transpose(2, 3))
        # X = (G * A)^T dV_d;  dW = A_g^T dV_d = beta * X;  dU = -gamma * dW
        torch.bmm(prepared.inverse[step].flatten(0, 2).mT, dV_d[step].flatten(0, 2), out=X[step].flatten(0, 2))
        torch.mul(X[step], prepared.beta[step][..., None], out=dW[step])
        torch.mul(dW[step], minus_gamma[step], out=dfrom_state[step][:, :, 1].transpose(2, 3))
        # dS <- gamma_C dS + scale * Q^T (gamma * dO) + K^T dU
        dS.mul_(gamma_C[step].view(n * H, 1, R * V)).baddbmm_(qk.mT, dfrom_state[step].view(n * H, 2 * C, R * V))
    return _ReverseScanned(dO, X, dW, K_dS, dfrom_state, dstates)


def _group_gradients(
    prepared: _Prepared, scan: _Scanned, reverse: _ReverseScanned, sizes: _Sizes, scale: float
) -> dict[str, torch.Tensor]:
    """The gradients of a group's inputs, as rows [m * C, ...], from both scans; N is what `inverse` inverts, less I."""
    H, R, K, V, C = sizes.H, sizes.R, sizes.K, sizes.V, sizes.C
    assert scan.states is not None
    k = prepared.qk[:, :, 1].flatten(0, 1)
    # dP = G * (dO V_d^T);  dN = -StrictLower((G * A)^T dA (G * A)^T) = -StrictLower(X V_d^T);  dG * G from both
    V_d = scan.V_d.flatten(0, 2).mT
    dP = (reverse.dO.flatten(0, 2) @ V_d).view_as(prepared.P_g).mul_(prepared.pair_decay)
    dN_G = (reverse.X.flatten(0, 2) @ V_d).view_as(dP).tril_(-1).neg_().mul_(prepared.pair_decay)
    dbeta_pairs = dN_G * prepared.scores[:, :, None, 1]
    dG_G = (dP * prepared.scores[:, :, None, 0]).addcmul_(dbeta_pairs, prepared.beta[..., None])
    # dbeta_j = sum_i dA_g_ij (G * A)_ij + sum_i dN_ji N_ji / beta_j
    dbeta = (scan.W * reverse.X).sum(-1) + dbeta_pairs.sum(-1)

    # dg_t is the sum of all that crosses token t: reads of the state by tokens >= t, the kept state, pairs i >= t > j,
    # and what tokens < t leave to the next state. The usual way, differences of row and column sums and then a
    # cumulative sum, loses every digit under strong gates.
    reads = (scan.from_state * reverse.dfrom_state).sum(-1).sum(2).transpose(2, 3)
    kept = prepared.gamma[..., -1:] * (scan.states * reverse.dstates).view(-1, H, K, R, V).sum((2, 4))[..., None]
    pairs = dG_G.tril_(-1).cumsum(-1).tril_(-1).sum(-2)
    left = (scan.left * reverse.K_dS).sum(-1).transpose(2, 3).cumsum(-1)
    dg = reads.flip(-1).cumsum(-1).flip(-1) + kept
    dg[..., 1:] += (pairs + left)[..., :-1]

    # dQ = gamma * (dO S^T) + dP K;  dK = dU S^T + V' dS^T + dP^T Q + (E + E^T) K, E = beta_i G * dN; summed over R
    reads_of_state = reverse.dfrom_state.view(-1, 2 * C, R * V)
    dqk = reads_of_state @ scan.states.view(-1, K, R * V).mT
    dq, dk = dqk[:, :C], dqk[:, C:]
    dk.baddbmm_(scan.left.view(-1, C, R * V), reverse.dstates.view(-1, K, R * V).mT)
    dP = dP.sum(2).flatten(0, 1)
    E = dN_G.mul_(prepared.beta[..., None]).sum(2).flatten(0, 1)
    dq.baddbmm_(dP, k)
    dk.baddbmm_(dP.mT, prepared.qk[:, :, 0].flatten(0, 1)).baddbmm_(E + E.mT, k)
    per_head = dqk.view(-1, H, 2, C, K)
    rows = {
        "q": (per_head[:, :, 0] * scale).transpose(1, 2),
        "k": per_head[:, :, 1].transpose(1, 2),
        "v": reverse.dW.flatten(1, 2).transpose(1, 2),
        "g": dg.flatten(1, 2).transpose(1, 2),
        "beta": dbeta.flatten(1, 2).transpose(1, 2),
    }
    return {name: gradient.flatten(0, 1) for name, gradient in rows.items()}
