"""The language model of Qwen3.5, without and with experts."""

from functools import partial

from jax_models import Qwen35LanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.experts import without_gate
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    replaced,
    with_value,
    without_1,
)

qwen = partial(paired, layout="hf", architecture="qwen3_5", twin_state=False, prefix=5)
sizes = {"vocab_size": 12, "features": 8, "mlp_features": 7, "max_length": 40, "rope_theta": 10.0}
EXPERTS = "Qwen35LanguageModel, experts"
CASES = [
    qwen(
        "Qwen35LanguageModel",
        Qwen35LanguageModelConfig(
            **sizes,
            num_layers=2,
            block_types=("linear_attention", "full_attention"),
            num_heads=4,
            num_kv_heads=2,
            head_features=12,  # 3 of them are rotated, as 4 are
            num_key_heads=2,
            num_value_heads=4,
            key_features=4,
            value_features=5,
        ).build,
    ),
    qwen(
        "Qwen35LanguageModel, untied",
        Qwen35LanguageModelConfig(
            **sizes,
            num_layers=2,
            block_types=("full_attention", "linear_attention"),
            head_features=4,
            num_key_heads=2,
            num_value_heads=2,
            key_features=2,
            value_features=2,
            rotary_fraction=0.5,
            attention_bias=True,
            tied_head=False,
        ).build,
    ),
    qwen(
        EXPERTS,
        Qwen35LanguageModelConfig(
            **sizes,
            num_layers=2,
            block_types=("full_attention", "linear_attention"),
            head_features=4,
            num_key_heads=2,
            num_value_heads=2,
            key_features=2,
            value_features=2,
            num_experts=6,
            experts_per_token=3,
            expert_features=5,
        ).build,
    ),
]
forward = partial(Mutation, case="Qwen35LanguageModel", kind="forward")
MUTATIONS = [
    Mutation(
        "gate and up exchanged",
        "Qwen35LanguageModel",
        "weights",
        plant=edited(exchanged("blocks.1.mlp", "gate_proj", "up_proj")),
        culprit="model.layers.1.mlp",
    ),
    forward(
        "norm's weight without 1",
        plant=replaced("jax_models.layers.norm.ZeroCenteredRMSNorm.scaled", without_1),
    ),
    forward(
        "experts' weights not normalized",
        case=EXPERTS,
        plant=with_value("blocks.1.mlp", "normalize", False),
        culprit="model.layers.1.mlp",
    ),
    forward(
        "shared gate forgotten",
        case=EXPERTS,
        plant=replaced("jax_models.layers.experts.Experts.shared_output", without_gate),
    ),
    forward(
        "epsilon doubled",
        plant=epsilon_doubled("blocks.1.mlp_norm"),
        culprit="model.layers.1.post_attention_layernorm",
    ),
]
