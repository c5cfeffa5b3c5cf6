"""The operator alone: prefill of two packed sequences, then decode, on whatever device there is.

python examples/gated_delta_rule.py
"""

import torch

import tilecrew

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
num_heads, num_value_heads, head_dim = 2, 4, 128


def inputs(num_tokens: int, batch: int = 1) -> dict[str, torch.Tensor]:
    """Random queries, keys, values [B, T, heads, 128], log decays and write strengths [B, T, value heads]."""
    shape = (batch, num_tokens)
    return {
        "q": torch.randn(*shape, num_heads, head_dim, device=device, dtype=dtype),
        "k": torch.randn(*shape, num_heads, head_dim, device=device, dtype=dtype),
        "v": torch.randn(*shape, num_value_heads, head_dim, device=device, dtype=dtype),
        "g": torch.nn.functional.logsigmoid(torch.randn(*shape, num_value_heads, device=device) + 3),
        "beta": torch.rand(*shape, num_value_heads, device=device),
    }


# Two sequences of 300 and 724 tokens, packed into one row: the state starts from zero at each offset.
prompt = inputs(1024)
offsets = torch.tensor([0, 300, 1024], dtype=torch.int32, device=device)
options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": offsets, "output_final_state": True}
o, state = tilecrew.chunk_gated_delta_rule(**prompt, **options)
print("prefill:", tuple(o.shape), "state:", tuple(state.shape), state.dtype)
print("served by", tilecrew.explain_chunk_gated_delta_rule(**prompt, **options))

# Decode: one token of each sequence per step, the state of both updated in place.
for step in range(3):
    o, state = tilecrew.fused_recurrent_gated_delta_rule(
        **inputs(1, batch=2), initial_state=state, inplace_state=True, use_qk_l2norm_in_kernel=True
    )
    print(f"decode step {step + 1}:", tuple(o.shape), f"|state| = {float(state.norm()):.2f}")
