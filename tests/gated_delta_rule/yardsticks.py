"""The Hopper kernels' mathematics in torch, rounded where the kernels round: what their errors are measured against."""

import torch

from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult

BLOCK = 16


def rounded_chunks(arguments: ForwardArguments, merge_dtype: torch.dtype | None = None) -> ForwardResult:
    """Chunks in float32 with A, A_g, P_g, S, W, V_d and V' rounded to the dtype of q before each product with them.

    The inverse is the one that the kernels take: un-gated where they normalise the keys (with merge_dtype: merged from
    blocks by products of that dtype), else gated.
    """
    dtype = arguments.q.dtype

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    def chunk(q, k, v, g, beta, state):
        g = reference.cumulative_log_decay(g)
        if arguments.use_qk_l2norm:
            A = (
                reference.ungated_inverse(k, beta)
                if merge_dtype is None
                else merged_inverse(k @ k.mT, beta, merge_dtype)
            )
            A_g = rounded(A) * beta[..., None, :] * reference.pair_decay(g)
        else:
            A_g = rounded(reference.gated_inverse(k, beta, g)) * beta[..., None, :]
        P_g = rounded(reference.gated_scores(q, k, g, arguments.scale))
        S = rounded(state)
        V_d = rounded(A_g) @ rounded(reference.prediction_error(k, v, g, S))
        o = reference.output(q, g, S, P_g, rounded(V_d), arguments.scale)
        V_decayed = rounded(reference.decayed_value_delta(g, V_d))
        return o, g[..., -1].exp()[..., None, None] * state + k.mT @ V_decayed

    def scan(inputs, state):
        outputs, states = [inputs[2][:, :0]], []
        for start in range(0, inputs[2].shape[1], arguments.chunk_size):
            states.append(state)
            rows = slice(start, start + arguments.chunk_size)
            o, state = chunk(*(x[:, rows].transpose(1, 2) for x in inputs), state)
            outputs.append(o.transpose(1, 2))
        return torch.cat(outputs, 1), state, states

    return reference._each_sequence(arguments, scan)


def merged_inverse(products: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(I + StrictLower(diag(factor) products))^-1, [..., C, C]: inverses of the 16x16 diagonal blocks, merged block
    column by block column from the right, every operand of the merging products rounded to `dtype`."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(products.dtype)

    products = products.tril(-1)
    inverse = torch.zeros_like(products)
    num_tokens = products.shape[-1]
    for start in reversed(range(0, num_tokens, BLOCK)):
        block, below = slice(start, min(start + BLOCK, num_tokens)), slice(start + BLOCK, None)
        diagonal = factor[..., block, None] * products[..., block, block]
        identity = torch.eye(diagonal.shape[-1], dtype=products.dtype, device=products.device)
        D = torch.linalg.solve_triangular(diagonal, identity, upper=False, unitriangular=True)
        inverse[..., block, block] = D
        done = inverse[..., below, below] * factor[..., None, below]
        inverse[..., below, block] = -rounded(rounded(done) @ rounded(products[..., below, block])) @ rounded(D)
    return inverse
