"""The configs of the larger models that several families measure."""

from typing import Any

from jax_models import (
    GraniteLanguageModelConfig,
    LFM2LanguageModelConfig,
    Mamba2LanguageModelConfig,
    Qwen35LanguageModelConfig,
    RWKV7LanguageModelConfig,
)


def large_configs(num_layers: int = 12, features: int = 768) -> dict[str, Any]:
    """The configs of a few architectures by family, with the proportions of published models."""
    sizes: dict[str, Any] = {"features": features, "num_layers": num_layers}
    heads = features // 64
    attention: dict[str, Any] = {"num_heads": heads, "num_kv_heads": heads // 3}
    attention["mlp_features"] = 8 * features // 3
    configs = (
        RWKV7LanguageModelConfig(65_536, **sizes),
        Mamba2LanguageModelConfig(32_768, **sizes, num_heads=2 * heads, state_features=128),
        Qwen35LanguageModelConfig(
            32_768,
            **sizes,
            **attention,
            num_key_heads=heads,
            num_value_heads=heads,
            key_features=128,
            value_features=128,
        ),
        LFM2LanguageModelConfig(32_768, **sizes, **attention),
        GraniteLanguageModelConfig(
            32_768,
            **sizes,
            **attention,
            mamba_heads=2 * heads,
            mamba_head_features=64,
            state_features=128,
        ),
    )
    return {config.family: config for config in configs}
