"""Other libraries' chunked forward for the same problem, each by its own convention.

A peer's `prepare` turns a problem into a call that returns (o [B, T, HV, V], final state [N, HV, K, V] float32).
Conversions that a library's caller would have done anyway (layout of packed sequences, gates as factors) happen in
`prepare` and are not timed; what a problem leaves to the operator and a library does not do (norms, gates) is timed as
torch does it.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.gates import softplus_decay

Call = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
Gates = tuple[torch.Tensor, torch.Tensor]
Convert = Callable[[torch.Tensor, torch.Tensor], Gates]


@dataclass(frozen=True)
class Peer:
    """module: what must be importable; distribution: whose version is reported."""

    name: str
    module: str
    distribution: str
    prepare: Callable[[ForwardArguments], Call]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


def _flash_qla(arguments: ForwardArguments) -> Call:
    import flash_qla

    a, gates = arguments, gates_of(arguments)
    return lambda: flash_qla.chunk_gated_delta_rule(
        a.q,
        a.k,
        a.v,
        *gates(),
        scale=a.scale,
        output_final_state=True,
        use_qk_l2norm_in_kernel=a.use_qk_l2norm,
    )


def _flash_linear_attention(arguments: ForwardArguments) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    a, gates = arguments, gates_of(arguments, lambda g, beta: (g, beta.to(arguments.q.dtype)))
    return lambda: chunk_gated_delta_rule(
        a.q,
        a.k,
        a.v,
        *gates(),
        scale=a.scale,
        output_final_state=True,
        use_qk_l2norm_in_kernel=a.use_qk_l2norm,
    )


def _flash_infer(arguments: ForwardArguments) -> Call:
    """Packed [T, H, K] inputs, gates as factors e^g, states [N, HV, V, K]; its l2norm flag is ignored."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    a = arguments
    batch, num_tokens = a.q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (a.q, a.k, a.v))
    gates = gates_of(arguments, lambda g, beta: (g.exp().flatten(0, 1).float(), beta.flatten(0, 1).float()))
    cu_seqlens = torch.arange(batch + 1, device=q.device, dtype=torch.int64) * num_tokens

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        unit = (normalised(q), normalised(k)) if a.use_qk_l2norm else (q, k)
        decay, beta = gates()
        o, state = chunk_gated_delta_rule(
            *unit, v, g=decay, beta=beta, scale=a.scale, output_final_state=True, cu_seqlens=cu_seqlens
        )
        return o.view(a.v.shape), state.mT

    return call


def gates_of(arguments: ForwardArguments, convert: Convert = lambda g, beta: (g, beta)) -> Callable[[], Gates]:
    """What gives (g, beta) in a library's form: made now, or in each call where the problem leaves them to it."""
    a = arguments
    if a.A_log is None:
        made = convert(a.g, a.beta)
        return lambda: made
    A_log, dt_bias = a.A_log, a.dt_bias
    return lambda: convert(softplus_decay(a.g, A_log, dt_bias), a.beta.sigmoid())


def normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum of squares + 1e-6) along the last dimension, in float32, back in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("flashqla", "flash_qla", "flash-qla", _flash_qla),
        Peer("flashinfer", "flashinfer", "flashinfer-python", _flash_infer),
        Peer("fla", "fla", "flash-linear-attention", _flash_linear_attention),
    )
}


def choose(names: str) -> list[Peer]:
    """`installed` for all that are there, or names with commas between; "" for none.

    Raises ValueError for an unknown name, and for a peer that is named and not installed: it is never left out in
    silence.
    """
    if names == "installed":
        return [peer for peer in PEERS.values() if peer.is_installed]
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in PEERS:
            raise ValueError(f"--peers must be 'installed' or some of {', '.join(PEERS)}, got {name!r}")
        if not PEERS[name].is_installed:
            peer = PEERS[name]
            raise ValueError(f"--peers {name}: {peer.module} is not installed (pip install {peer.distribution})")
        chosen.append(PEERS[name])
    return chosen
