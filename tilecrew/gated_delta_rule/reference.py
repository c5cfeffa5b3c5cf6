"""The truth for every other implementation: the token recurrence, and each stage of the chunk form as its own function.

Plain torch on any device, vectorised over batch and heads, differentiable, written to be read and not to be fast.
Computes in float32, or in float64 where q is float64. Stage numbers are those of README.md.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.gates import apply_gates, compute_dtype

Inputs = tuple[
    torch.Tensor, ...
]  # q, k, v, g, beta with one query/key head per value head, gates applied: [B, T, HV, ...]
# (inputs, state) of sequences in lock step -> (o, final state, state before each chunk).
Scan = Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]


def recurrent_gated_delta_rule(arguments: ForwardArguments) -> ForwardResult:
    """Token by token: S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q.

    All options of ForwardArguments; cu_seqlens is read on the host. final_state is float64 where q is float64.
    """

    def scan(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        q, k, v, g, beta = inputs
        outputs, states = [], []
        for t in range(q.shape[1]):
            if t % arguments.chunk_size == 0:
                states.append(state)
            state = state * g[:, t, :, None, None].exp()
            update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + k[:, t, :, :, None] * update[:, :, None, :]
            outputs.append(arguments.scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state, states

    with torch.autocast(arguments.q.device.type, enabled=False):
        return _each_sequence(arguments, scan)


def chunk_gated_delta_rule(arguments: ForwardArguments, use_gated_inverse: bool = True) -> ForwardResult:
    """The same result by chunks, composed of the stages below.

    use_gated_inverse False takes the un-gated inverse of stage (2), as kernels for normalised keys do: it can overflow
    where beta |k|^2 > 2.
    """

    def chunk(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta = inputs
        g = cumulative_log_decay(g)
        A_g = gated_inverse(k, beta, g) if use_gated_inverse else pair_decay(g) * ungated_inverse(k, beta)
        A_g = A_g * beta[..., None, :]
        P_g = gated_scores(q, k, g, arguments.scale)
        W = prediction_error(k, v, g, state)
        V_d = value_delta(A_g, W)
        return output(q, g, state, P_g, V_d, arguments.scale), next_state(k, g, state, V_d)

    def scan(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        num_tokens = inputs[2].shape[1]
        outputs, states = [inputs[2][:, :0]], []
        for start in range(0, num_tokens, arguments.chunk_size):
            states.append(state)
            end = min(start + arguments.chunk_size, num_tokens)
            o, state = chunk([x[:, start:end].transpose(1, 2) for x in inputs], state)
            outputs.append(o.transpose(1, 2))
        return torch.cat(outputs, 1), state, states

    with torch.autocast(arguments.q.device.type, enabled=False):
        return _each_sequence(arguments, scan)


# ---- stages: q, k [..., C, K]; v [..., C, V]; g, beta [..., C]; state [..., K, V]; C may be any number of tokens ----


def cumulative_log_decay(g: torch.Tensor) -> torch.Tensor:
    """(1) The log decay from the start of the chunk up to and including each token. Every later stage takes this g."""
    return g.cumsum(-1)


def ungated_inverse(k: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """(2) A = (I + StrictLower(diag(beta) K K^T))^-1, [..., C, C] with a unit diagonal."""
    return _unit_lower_inverse(beta[..., :, None] * (k @ k.mT))


def gated_inverse(k: torch.Tensor, beta: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """(2) (I + StrictLower(beta_i e^(g_i - g_j) k_i . k_j))^-1 = G * A; finite wherever the recurrence itself is."""
    return _unit_lower_inverse(beta[..., :, None] * pair_decay(g) * (k @ k.mT))


def pair_decay(g: torch.Tensor) -> torch.Tensor:
    """(3) G_ij = e^(g_i - g_j) for i >= j, else 0. The exponent is masked: its exponential could be infinite."""
    past = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    return (g[..., :, None] - g[..., None, :]).masked_fill(~past, float("-inf")).exp()


def gated_scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, scale: float) -> torch.Tensor:
    """(3) P_g = scale * G * (Q K^T)."""
    return scale * pair_decay(g) * (q @ k.mT)


def prediction_error(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """(4) U = K S;  W = V - gamma * U: what the state of the chunk's start does not predict."""
    return v - g.exp()[..., None] * (k @ state)


def value_delta(A_g: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """(5) V_d = A_g W: what each token writes, with A_g = G * A * beta_j."""
    return A_g @ W


def decayed_value_delta(g: torch.Tensor, V_d: torch.Tensor) -> torch.Tensor:
    """(5) V' = e^(g_C - g) * V_d: what is left of it at the end of the chunk."""
    return (g[..., -1:] - g).exp()[..., None] * V_d


def output(
    q: torch.Tensor, g: torch.Tensor, state: torch.Tensor, P_g: torch.Tensor, V_d: torch.Tensor, scale: float
) -> torch.Tensor:
    """(6) O = scale * gamma * (Q S) + P_g V_d."""
    return scale * g.exp()[..., None] * (q @ state) + P_g @ V_d


def next_state(k: torch.Tensor, g: torch.Tensor, state: torch.Tensor, V_d: torch.Tensor) -> torch.Tensor:
    """(7) S <- gamma_C S + K^T V'."""
    return g[..., -1].exp()[..., None, None] * state + k.mT @ decayed_value_delta(g, V_d)


# ---- sequences, heads and layouts ----


def _unit_lower_inverse(x: torch.Tensor) -> torch.Tensor:
    """(I + StrictLower(x))^-1."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(x.tril(-1), identity, upper=False, unitriangular=True)
    return inverse


def _each_sequence(arguments: ForwardArguments, scan: Scan) -> ForwardResult:
    """Runs `scan` over all batch rows at once, or over each packed sequence, and puts its results where they belong."""
    dtype = compute_dtype(arguments.q)
    wide = apply_gates(replace(arguments, q=arguments.q.to(dtype), k=arguments.k.to(dtype)))
    num_heads, key_dim = wide.q.shape[2:]
    num_value_heads, value_dim = wide.v.shape[2:]
    repeats = num_value_heads // num_heads
    # Value head j reads query/key head j // repeats.
    inputs = (
        wide.q.repeat_interleave(repeats, 2),
        wide.k.repeat_interleave(repeats, 2),
        wide.v.to(dtype),
        wide.g,
        wide.beta,
    )
    if wide.initial_state is None:
        state = wide.q.new_zeros(wide.num_sequences, num_value_heads, key_dim, value_dim)
    else:
        state = wide.initial_state.to(dtype)
        state = state.mT if wide.state_v_first else state

    if wide.cu_seqlens is None:
        o, final_state, states = scan(inputs, state)
        slots = torch.stack(states, 1) if states else state.new_zeros(o.shape[0], 0, *state.shape[1:])
    else:
        bounds = wide.cu_seqlens.tolist()
        outputs, finals = [], []
        slots = state.new_zeros(1, wide.num_slots, *state.shape[1:])
        for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            o, final_state, states = scan(tuple(x[:, start:end] for x in inputs), state[n : n + 1])
            outputs.append(o)
            finals.append(final_state)
            first_slot = start // wide.chunk_size + n
            for c, chunk_state in enumerate(states):
                slots[:, first_slot + c] = chunk_state
        outputs.append(torch.zeros_like(inputs[2][:, bounds[-1] :]))
        o, final_state = torch.cat(outputs, 1), torch.cat([state[:0], *finals])
    final_state = (final_state.mT if wide.state_v_first else final_state).contiguous().clone()
    return ForwardResult(
        o=o.to(arguments.q.dtype),
        final_state=final_state if wide.output_final_state else None,
        h=slots.to(arguments.q.dtype) if wide.output_h else None,
    )
