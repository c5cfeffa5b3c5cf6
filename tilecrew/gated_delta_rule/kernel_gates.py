"""What the kernels in plain Triton apply to raw gates: device twins of `gates`, in float32. Elementwise, any shape."""

import triton
import triton.language as tl

# gates.MINIMUM_LOG_DECAY. Kernels read globals only as tl.constexpr.
MINIMUM_LOG_DECAY = tl.constexpr(-100.0)
L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), with a relative error near float32's also where the result is small."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log1p(e) = log(u) * e / (u - 1), where the rounding of u cancels. u = 1 exactly: log1p(e) = e.
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def floored(g):
    """A log decay floored at MINIMUM_LOG_DECAY; NaN stays NaN, which tl.maximum would hide."""
    return tl.where(g < MINIMUM_LOG_DECAY, MINIMUM_LOG_DECAY, g)


@triton.jit
def log_decay(g, head, A_log, dt_bias):
    """The floored log decay of tokens of one head: g itself, or -exp(A_log) * softplus(g + dt_bias) where A_log is not
    None."""
    g = g.to(tl.float32)
    if A_log is not None:
        if dt_bias is not None:
            g += tl.load(dt_bias + head).to(tl.float32)
        g = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(g)
    return floored(g)


@triton.jit
def write_strength(beta, USE_BETA_SIGMOID: tl.constexpr, ALLOW_NEG_EIGVAL: tl.constexpr):
    """beta, or its sigmoid, or twice that."""
    beta = beta.to(tl.float32)
    if USE_BETA_SIGMOID:
        beta = tl.sigmoid(beta)
        if ALLOW_NEG_EIGVAL:
            beta = 2.0 * beta
    return beta
