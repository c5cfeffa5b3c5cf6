"""Small random models of the families with Gated DeltaNet layers, and how to run them."""

from typing import Any

import torch

VOCABULARY_SIZE = 96
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}


def build(family: str = "qwen3_next", seed: int = 0, head_dim: int = 16) -> Any:
    """Four layers, the last of full attention, in evaluation mode, with decay rates slow enough to carry a state."""
    import transformers

    config_name, model_name = FAMILIES[family]
    sizes = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "max_position_embeddings": 4096,
        # At the default 0.02 so narrow a model hardly mixes tokens, and a wrong operator would not show in its logits.
        "initializer_range": 0.2,
    }
    if family == "qwen3_5":
        sizes["intermediate_size"] = 64
    else:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**sizes)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.A_log.uniform_(-5.0, 0.0)
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY_SIZE, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits_of_pieces(model: Any, pieces: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Feeds [B, T] pieces one after the other through one cache; the logits of each."""
    from transformers import DynamicCache

    from tilecrew.demo.agreement import cache_argument

    cache = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
    return [model(piece, **cache, **options).logits for piece in pieces]
