"""What every forward implementation of the chunked gated delta rule takes and returns, after the checks of `api`.

Symbols: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K and V head sizes, N sequences, C
chunk size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardArguments:
    """Checked inputs. All tensors are on one device; q, k, v are of one dtype and contiguous in their last dimension.

    q, k                [B, T, H, K]   queries and keys, any strides in the leading dimensions
    v                   [B, T, HV, V]  values
    g                   [B, T, HV]     natural-log decay (<= 0), or the raw gate `a` where A_log is given; any float
    beta                [B, T, HV]     write strength, or its logit where use_beta_sigmoid; any float dtype
    scale               factor on the queries
    initial_state       [N, HV, K, V] ([N, HV, V, K] if state_v_first), float32, contiguous, or None for zeros
    cu_seqlens          [N + 1] int32 or int64 on the device of q (B is 1), or None: every batch row is one sequence
    cu_seqlens_cpu      the same values on the host, or None: only implementations that say so need it
    A_log, dt_bias      [HV]           g becomes -exp(A_log) * softplus(g + dt_bias); dt_bias may be None
    use_qk_l2norm       q and k are divided by sqrt(sum of squares + 1e-6) along K
    use_beta_sigmoid    beta becomes sigmoid(beta), times 2 where allow_neg_eigval
    history_tolerance   in context parallelism, a piece whose gates multiply to less passes no state on; 0: exact
    batch_invariant     the bits of a sequence do not depend on the batch that it is in
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    initial_state: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    output_h: bool = False
    chunk_size: int = 64
    history_tolerance: float = 0.0
    batch_invariant: bool = False

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """Rows of a per-chunk buffer: known on the host without reading cu_seqlens.

        Chunk c of sequence n that starts at token s has the slot s // C + n + c (varlen), or n * ceil(T / C) + c
        (batch). Slots of different chunks never coincide, because ceil(L / C) <= (s + L) // C - s // C + 1.
        """
        num_tokens = self.q.shape[1]
        if self.cu_seqlens is None:
            return self.q.shape[0] * -(-num_tokens // self.chunk_size)
        return num_tokens // self.chunk_size + self.num_sequences


@dataclass(frozen=True)
class ForwardResult:
    """o [B, T, HV, V] in q's dtype, rows of no sequence are zeros; final_state float32 in the layout of initial_state,
    or None; h [B, slots / B, HV, K, V] in q's dtype: the state before each chunk, slots of no chunk are zeros, or
    None."""

    o: torch.Tensor
    final_state: torch.Tensor | None = None
    h: torch.Tensor | None = None
