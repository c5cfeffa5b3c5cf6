"""What both implementations of decode (`recurrent` in torch, `kernel_recurrent`) take, after the checks of `api`.

Symbols: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K and V head sizes, N sequences, P
pool rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecurrentArguments:
    """Checked inputs. All tensors are on one device; q, k, v are of one dtype; every tensor is contiguous in its last
    dimension (g and a per-head beta may have any strides).

    q, k                [B, T, H, K]   queries and keys
    v                   [B, T, HV, V]  values
    g                   [B, T, HV]     natural-log decay of a head, or the raw gate `a` where A_log is given, or None
                        for no decay
    gk                  [B, T, HV, K]  further natural-log decay of each key channel, or None
    gv                  [B, T, HV, V]  further natural-log decay of each value channel, or None
    beta                [B, T, HV] or [B, T, HV, V]  write strength, or its logit where use_beta_sigmoid; None for 1
    scale               factor on the queries
    initial_state       [N, HV, K, V] ([N, HV, V, K] if state_v_first), or None for zeros; with state_indices a pool
                        [P, HV, K, V]. float32, or bfloat16 as the caller's choice to store a state in half the bytes;
                        each row contiguous, any stride between rows
    state_indices       [N] int32 or int64: sequence n starts from row state_indices[n] of initial_state. A negative
                        index marks padding: its outputs are zeros, nothing is read or written for it, its final state
                        is zeros where a new tensor is returned. The other indices must be below P and, with
                        inplace_state, differ from each other: they are on the device, so nobody checks
    inplace_state       the final state replaces the row of initial_state that it started from, and initial_state is
                        returned
    output_final_state  return the final state (implied by inplace_state): a new tensor [N, HV, K, V] in the dtype of
                        initial_state, float32 without one
    cu_seqlens          [N + 1] int32 or int64 on the device of q (B is 1), or None: every batch row is one sequence.
                        Rows behind the last sequence give zeros
    A_log, dt_bias      [HV]           g becomes -exp(A_log) * softplus(g + dt_bias); dt_bias may be None
    use_qk_l2norm       q and k are divided by sqrt(sum of squares + 1e-6) along K
    use_beta_sigmoid    beta becomes sigmoid(beta), times 2 where allow_neg_eigval
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    scale: float
    gk: torch.Tensor | None = None
    gv: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    inplace_state: bool = False
    output_final_state: bool = False
    cu_seqlens: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """One row of the state, (HV, K, V) or (HV, V, K)."""
        num_value_heads, value_dim = self.v.shape[2:]
        key_dim = self.q.shape[-1]
        return (num_value_heads, value_dim, key_dim) if self.state_v_first else (num_value_heads, key_dim, value_dim)
