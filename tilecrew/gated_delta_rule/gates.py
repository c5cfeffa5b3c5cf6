"""What is applied to the raw inputs before the recurrence: key norms, log decay, write strength.

Pure torch, differentiable. Everything is computed in float32, or in float64 where the input is float64.
"""

from dataclasses import replace

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments

# A log decay below this is raised to it before the cumulative sum: e^-100 is nothing beside a float32 state, so a token
# with g = -inf is a hard reset, and every difference of cumulative sums stays finite. A much lower floor would cost
# precision: one unit in the last place of a float32 sum near 1e4 is 1e-3.
MINIMUM_LOG_DECAY = -100.0


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 for a float64 tensor, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum of squares + eps) along the last dimension, in the dtype of x: a zero vector stays zero."""
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)).to(x.dtype)


def log_decay(g: torch.Tensor) -> torch.Tensor:
    """g floored at MINIMUM_LOG_DECAY, in float32 (float64). A token below the floor has gradient 0; NaN stays NaN."""
    return g.to(compute_dtype(g)).clamp(min=MINIMUM_LOG_DECAY)


def softplus_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None = None) -> torch.Tensor:
    """-exp(A_log) * softplus(a + dt_bias), not floored, in float32 (float64). a [..., HV]; A_log and dt_bias [HV]."""
    dtype = compute_dtype(a)
    shifted = a.to(dtype) if dt_bias is None else a.to(dtype) + dt_bias.to(dtype)
    return -A_log.to(dtype).exp() * torch.nn.functional.softplus(shifted)


def write_strength(beta: torch.Tensor, use_beta_sigmoid: bool = False, allow_neg_eigval: bool = False) -> torch.Tensor:
    """beta in float32 (float64): as it is, or its sigmoid, or (allow_neg_eigval) twice its sigmoid.

    Twice the sigmoid reaches past 1, where the transition I - beta k k^T of a unit key has a negative eigenvalue.
    `allow_neg_eigval` without `use_beta_sigmoid` changes nothing: such a beta is in the range that its caller chose.
    """
    wide = beta.to(compute_dtype(beta))
    if not use_beta_sigmoid:
        return wide
    return 2 * wide.sigmoid() if allow_neg_eigval else wide.sigmoid()


def apply_gates(arguments: ForwardArguments) -> ForwardArguments:
    """The same problem with nothing left to apply: q and k normalised, g the floored log decay, beta activated.

    q and k keep their dtype, so that normalised half-precision inputs are rounded once more.
    g and beta come back in float32 (float64 where q is float64); A_log, dt_bias and the flags are cleared.
    """
    dtype = compute_dtype(arguments.q)
    g = arguments.g.to(dtype)
    if arguments.A_log is not None:
        g = softplus_decay(g, arguments.A_log, arguments.dt_bias)
    return replace(
        arguments,
        q=l2norm(arguments.q) if arguments.use_qk_l2norm else arguments.q,
        k=l2norm(arguments.k) if arguments.use_qk_l2norm else arguments.k,
        g=log_decay(g),
        beta=write_strength(arguments.beta.to(dtype), arguments.use_beta_sigmoid, arguments.allow_neg_eigval),
        A_log=None,
        dt_bias=None,
        use_qk_l2norm=False,
        use_beta_sigmoid=False,
        allow_neg_eigval=False,
    )
