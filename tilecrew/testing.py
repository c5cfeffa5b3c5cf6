"""Random problems and error norms for tests and benchmarks. Truth is float64; errors are relative norms per head."""

from dataclasses import replace
from typing import Any

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments


def random_arguments(
    batch: int = 1,
    num_tokens: int = 256,
    num_heads: int = 2,
    num_value_heads: int = 4,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    lengths: list[int] | None = None,
    tail: int = 0,
    with_initial_state: bool = False,
    gate_strength: float = 1.0,
    normalised: bool = True,
    seed: int = 0,
    **options: Any,
) -> ForwardArguments:
    """A fresh random problem. `lengths` makes a packed batch of that many sequences with `tail` unused tokens behind
    them.

    Gates are logsigmoid(normal + 3) * gate_strength, beta uniform in (0, 1); keys and queries have unit norm where
    `normalised`. `options` are further fields of ForwardArguments.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_sequences = batch
    cu_seqlens = None
    if lengths is not None:
        num_sequences, batch, num_tokens = len(lengths), 1, sum(lengths) + tail
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    q, k = normal(batch, num_tokens, num_heads, key_dim), normal(batch, num_tokens, num_heads, key_dim)
    if normalised:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    v = normal(batch, num_tokens, num_value_heads, value_dim)
    g = torch.nn.functional.logsigmoid(normal(batch, num_tokens, num_value_heads) + 3) * gate_strength
    beta = torch.rand(batch, num_tokens, num_value_heads, generator=generator)
    state = normal(num_sequences, num_value_heads, key_dim, value_dim) if with_initial_state else None
    if state is not None and options.get("state_v_first"):
        state = state.transpose(-1, -2).contiguous()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ForwardArguments(
        q=q.to(device, dtype),
        k=k.to(device, dtype),
        v=v.to(device, dtype),
        g=g.to(device, wide),
        beta=beta.to(device, wide),
        scale=options.pop("scale", key_dim**-0.5),
        initial_state=None if state is None else state.to(device, wide),
        cu_seqlens=cu_seqlens,
        **options,
    )


def as_float64(arguments: ForwardArguments, device: torch.device | str | None = None) -> ForwardArguments:
    """The same problem with every floating-point tensor exactly widened to float64 (and moved to `device` where
    given)."""
    fields: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        if isinstance(value, torch.Tensor):
            value = value.to(device) if device is not None else value
            fields[name] = value.double() if value.is_floating_point() else value
    return replace(arguments, **fields)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, head_dim: int = 2) -> float:
    """max over heads of |actual - expected| / |expected| (Frobenius norms). NaN anywhere gives NaN, which fails every
    bound.

    head_dim: which dimension is the head (2 for o [B, T, HV, V] and h, 1 for states [N, HV, K, V]).
    """
    actual, expected = actual.double().cpu(), expected.double().cpu()
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    difference = (actual - expected).movedim(head_dim, 0).flatten(1).norm(dim=1)
    size = expected.movedim(head_dim, 0).flatten(1).norm(dim=1)
    ratio = torch.where(size == 0, torch.where(difference == 0, 0.0, float("inf")), difference / size.clamp_min(1e-300))
    return float(ratio.max()) if not ratio.isnan().any() else float("nan")
