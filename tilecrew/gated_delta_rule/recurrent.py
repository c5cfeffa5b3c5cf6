"""Decode in plain torch: any device and dtype, differentiable, vectorised over sequences and heads, a loop over tokens.

cu_seqlens and state_indices are read on the host. `kernel_recurrent` computes the same on a GPU without that.
"""

import torch

from tilecrew.gated_delta_rule.gates import compute_dtype, l2norm, log_decay, softplus_decay, write_strength
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments


def forward(arguments: RecurrentArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o [B, T, HV, V] in q's dtype, final state or None), see RecurrentArguments.

    Per token: S <- e^(g + gk + gv) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q, in float32 (float64
    where q is float64).
    """
    batch, num_tokens, num_value_heads, value_dim = arguments.v.shape
    q, k, v, log_decays, beta = _token_inputs(arguments)
    starts, lengths, rows = _sequences(arguments)
    state = _initial_state(arguments, rows)

    outputs, output_tokens = [v.new_zeros(0, num_value_heads, value_dim)], []
    for t in range(max(lengths, default=0)):
        active = [n for n, length in enumerate(lengths) if t < length]
        tokens = [starts[n] + t for n in active]
        is_everyone = len(active) == len(lengths)
        active_state = state if is_everyone else state[active]
        decays = [decay[tokens] for decay in log_decays]
        o, active_state = _step(active_state, q[tokens], k[tokens], v[tokens], beta[tokens], decays)
        state = active_state if is_everyone else state.index_copy(0, _index(active, state), active_state)
        outputs.append(arguments.scale * o)
        output_tokens += tokens

    o = v.new_zeros(batch * num_tokens, num_value_heads, value_dim)
    o = o.index_copy(0, _index(output_tokens, o), torch.cat(outputs))
    return o.view(arguments.v.shape).to(arguments.q.dtype), _store_state(arguments, state, rows)


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decays: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of n sequences. state [n, HV, K, V]; q, k [n, HV, K]; v, beta [n, HV, V] -> (S^T q [n, HV, V], next
    state)."""
    for log_decay_of_state in log_decays:
        state = state * log_decay_of_state.exp()
    update = beta * (v - torch.einsum("nhkv,nhk->nhv", state, k))
    state = state + k[..., :, None] * update[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", state, q), state


def _token_inputs(
    arguments: RecurrentArguments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Per token of the flattened batch, gates applied: q, k [B * T, HV, K]; v [B * T, HV, V]; the log decays, each
    broadcastable to [B * T, HV, K, V]; beta [B * T, HV, V or 1]."""
    dtype = compute_dtype(arguments.q)
    num_value_heads = arguments.v.shape[2]
    repeats = num_value_heads // arguments.q.shape[2]
    q, k, v = (x.to(dtype) for x in (arguments.q, arguments.k, arguments.v))
    if arguments.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    # Value head j reads query/key head j // repeats.
    q, k = (x.repeat_interleave(repeats, 2).flatten(0, 1) for x in (q, k))

    log_decays = []
    if arguments.g is not None:
        g = arguments.g.to(dtype)
        if arguments.A_log is not None:
            g = softplus_decay(g, arguments.A_log, arguments.dt_bias)
        log_decays.append(log_decay(g).flatten(0, 1)[..., None, None])
    if arguments.gk is not None:
        log_decays.append(log_decay(arguments.gk.to(dtype)).flatten(0, 1)[..., :, None])
    if arguments.gv is not None:
        log_decays.append(log_decay(arguments.gv.to(dtype)).flatten(0, 1)[..., None, :])

    if arguments.beta is None:
        beta = v.new_ones(1, 1, 1).expand(v.shape[0] * v.shape[1], num_value_heads, 1)
    else:
        beta = write_strength(arguments.beta.to(dtype), arguments.use_beta_sigmoid, arguments.allow_neg_eigval)
        beta = beta.flatten(0, 1) if beta.ndim == 4 else beta.flatten(0, 1)[..., None]
    return q, k, v.flatten(0, 1), log_decays, beta


def _sequences(arguments: RecurrentArguments) -> tuple[list[int], list[int], list[int]]:
    """For each sequence its first token in the flattened batch, its length (0 for padding), its row of the state (-1
    for padding)."""
    batch, num_tokens = arguments.q.shape[:2]
    if arguments.cu_seqlens is None:
        bounds = [n * num_tokens for n in range(batch + 1)]
    else:
        bounds = arguments.cu_seqlens.tolist()
    num_sequences = len(bounds) - 1
    rows = list(range(num_sequences)) if arguments.state_indices is None else arguments.state_indices.tolist()
    lengths = [end - start if row >= 0 else 0 for start, end, row in zip(bounds, bounds[1:], rows, strict=False)]
    return bounds[:-1], lengths, rows


def _initial_state(arguments: RecurrentArguments, rows: list[int]) -> torch.Tensor:
    """[N, HV, K, V] in the computing dtype; zeros for padding."""
    dtype = compute_dtype(arguments.q)
    num_value_heads, value_dim = arguments.v.shape[2:]
    state = arguments.q.new_zeros(len(rows), num_value_heads, arguments.q.shape[-1], value_dim, dtype=dtype)
    if arguments.initial_state is None:
        return state
    sequences = [n for n, row in enumerate(rows) if row >= 0]
    used = arguments.initial_state[[rows[n] for n in sequences]].to(dtype)
    used = used.mT if arguments.state_v_first else used
    return state.index_copy(0, _index(sequences, state), used)


def _store_state(arguments: RecurrentArguments, state: torch.Tensor, rows: list[int]) -> torch.Tensor | None:
    if not (arguments.inplace_state or arguments.output_final_state):
        return None
    if arguments.initial_state is not None:
        state = state.to(arguments.initial_state.dtype)
    state = (state.mT if arguments.state_v_first else state).contiguous()
    if not arguments.inplace_state:
        return state
    if arguments.initial_state is None:
        raise ValueError("inplace_state needs an initial_state to write the final state to")
    sequences = [n for n, row in enumerate(rows) if row >= 0]
    used_rows = _index([rows[n] for n in sequences], state)
    arguments.initial_state.index_copy_(0, used_rows, state[sequences])
    return arguments.initial_state


def _index(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
