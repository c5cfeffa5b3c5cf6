"""A small Qwen3-Next with random weights generates text ids through tilecrew; transformers' own functions agree.

pip install 'tilecrew[transformers]'; python examples/qwen3_next.py
"""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import tilecrew.integrations.transformers as integration

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
model = Qwen3NextForCausalLM(config).eval()
prompt = torch.randint(512, (1, 200))
options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}

print("patched:", *integration.enable(), sep="\n  ")
with_tilecrew = model.generate(prompt, **options)[0, 200:].tolist()
integration.disable()

# transformers' torch functions, even where flash-linear-attention is installed.
with integration.torch_path():
    with_torch = model.generate(prompt, **options)[0, 200:].tolist()

print("tilecrew:    ", with_tilecrew)
print("transformers:", with_torch)
assert with_tilecrew == with_torch
