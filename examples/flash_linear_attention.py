"""flash-linear-attention's own functions, served by tilecrew: also on the CPU, where FLA has no kernels.

pip install 'tilecrew[fla]'; python examples/flash_linear_attention.py
"""

import torch

import tilecrew.integrations.fla as integration

print("decode patched in:", *integration.enable(), sep="\n  ")

from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 200, 4, 64, device=device) for _ in range(3))
a, beta = torch.randn(1, 200, 4, device=device), torch.randn(1, 200, 4, device=device)
gates = {"use_gate_in_kernel": True, "A_log": torch.zeros(4, device=device), "use_beta_sigmoid_in_kernel": True}
options = {**gates, "use_qk_l2norm_in_kernel": True, "output_final_state": True}

o, state = chunk_gated_delta_rule(q, k, v, a, beta, **options)
step_by_step, state_of_steps = fused_recurrent_gated_delta_rule(q, k, v, g=a, beta=beta, **options)
print("largest difference of chunks and single tokens:", float((o - step_by_step).abs().max()))
assert torch.allclose(state, state_of_steps, atol=2e-3)
