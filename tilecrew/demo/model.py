"""What the demo runs: bundled text, a tokenizer trained on it, a small Qwen3-Next with random weights. No download."""

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

VOCABULARY_SIZE = 1024


@dataclass(frozen=True)
class ModelSize:
    """What differs between devices: hidden size, layers, and heads of the Gated DeltaNet layers (head size 128)."""

    hidden_size: int
    num_layers: int
    num_key_heads: int
    num_value_heads: int


# Every fourth layer is full attention, as in Qwen3-Next. Heads of 128 are what the fast kernels are made for.
CPU_SIZE = ModelSize(hidden_size=256, num_layers=4, num_key_heads=8, num_value_heads=16)
GPU_SIZE = ModelSize(hidden_size=1024, num_layers=8, num_key_heads=16, num_value_heads=32)
HEAD_DIM = 128


def read_text() -> str:
    """The bundled English text, about 4,700 characters."""
    return files("tilecrew.demo").joinpath("text.txt").read_text(encoding="utf-8")


def train_tokenizer(text: str) -> ByteLevelBPETokenizer:
    """A byte-level BPE tokenizer trained on `text`: it can encode any string."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(), vocab_size=VOCABULARY_SIZE, min_frequency=2, show_progress=False)
    return tokenizer


def token_ids(tokenizer: ByteLevelBPETokenizer, text: str, num_tokens: int, device: torch.device) -> torch.Tensor:
    """[1, num_tokens] int64: the text's tokens, the text repeated where it is too short."""
    ids = tokenizer.encode(text).ids
    repeated = ids * math.ceil(num_tokens / len(ids))
    return torch.tensor([repeated[:num_tokens]], device=device)


def build_config(size: ModelSize) -> Qwen3NextConfig:
    """Qwen3-Next with three Gated DeltaNet layers to each full-attention layer and eight experts, two per token."""
    return Qwen3NextConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=size.num_key_heads,
        linear_num_value_heads=size.num_value_heads,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=size.hidden_size // 2,
        shared_expert_intermediate_size=size.hidden_size // 2,
        max_position_embeddings=1 << 20,
    )


def build_model(size: ModelSize, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """The model in evaluation mode, the same weights for the same seed.

    transformers draws decay rates so fast that most heads forget within a few tokens. Trained models keep many heads
    that hardly forget, so the rates are drawn again, e^A_log log-uniform in [0.001, 1]: errors in the carried state
    then reach the logits.
    """
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(build_config(size)).eval().requires_grad_(False)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.uniform_(math.log(1e-3), 0.0)
    return model.to(device=device, dtype=dtype)
