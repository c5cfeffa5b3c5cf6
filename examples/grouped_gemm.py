"""The experts of a mixture-of-experts layer as two grouped GEMMs, on whatever device there is.

python examples/grouped_gemm.py
"""

import torch

import tilecrew
from tilecrew.grouped_gemm import RouteWeight, SwiGLU

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
num_tokens, hidden, intermediate, num_experts, top_k = 256, 128, 192, 8, 2

tokens = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
swiglu = SwiGLU(run=8)
gate, up = (torch.randn(num_experts, hidden, intermediate, device=device, dtype=dtype) / hidden**0.5 for _ in range(2))
w1 = swiglu.interleave(gate, up)
w2 = torch.randn(num_experts, intermediate, hidden, device=device, dtype=dtype) / intermediate**0.5

# The router: each token goes to its top_k experts; rows are then sorted by expert.
probabilities, experts = torch.randn(num_tokens, num_experts, device=device).softmax(-1).topk(top_k)
order = experts.flatten().argsort(stable=True)
ids = torch.arange(num_experts, device=device)
offs = torch.searchsorted(experts.flatten()[order], ids, right=True).to(torch.int32)
x = tokens[order // top_k]

h = tilecrew.grouped_gemm(x, w1, offs, epilogue=swiglu)
y = tilecrew.grouped_gemm(h, w2, offs, epilogue=RouteWeight(probabilities.flatten()[order]))
out = torch.zeros(num_tokens, hidden, device=device).index_add_(0, order // top_k, y.float())

print("rows of each expert:", offs.diff(prepend=offs.new_zeros(1)).tolist())
print("first layer:", tilecrew.explain_grouped_gemm(x, w1, offs, epilogue=swiglu))
print("hidden:", tuple(h.shape), "out:", tuple(out.shape))

# The same, one expert after the other.
wanted = torch.zeros_like(out)
for expert in range(num_experts):
    rows, slots = (experts == expert).nonzero(as_tuple=True)
    hidden_rows = torch.nn.functional.silu(tokens[rows] @ gate[expert]) * (tokens[rows] @ up[expert])
    wanted.index_add_(0, rows, (hidden_rows @ w2[expert]).float() * probabilities[rows, slots, None])
print(f"relative difference from a loop over experts: {float((out - wanted).norm() / wanted.norm()):.1e}")
