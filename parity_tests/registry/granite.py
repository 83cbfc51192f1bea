"""The language model of Granite 4, without and with experts."""

import dataclasses
from functools import partial

from jax_models import GraniteLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.experts import without_output
from parity_tests.registry.mamba2 import HYBRID_SIZES
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    replaced,
    with_value,
)

granite = partial(paired, layout="hf", architecture="granite", twin_state=False, prefix=5)
config = GraniteLanguageModelConfig(
    **HYBRID_SIZES,
    num_layers=2,
    block_types=("linear_attention", "full_attention"),
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    attention_multiplier=0.8,
    logits_scaling=2.0,
)
CASE, ROTARY, EXPERTS = (
    "GraniteLanguageModel",
    "GraniteLanguageModel, rotary positions, biases, limits of Δ",
    "GraniteLanguageModel, experts",
)
CASES = [
    granite(CASE, config.build),
    granite(
        ROTARY,
        dataclasses.replace(
            config,
            rope_theta=10.0,
            tied_head=False,
            attention_bias=True,
            mamba_bias=True,
            conv_bias=False,
            kernel_size=3,
            dt_limits=(0.6, 0.9),
        ).build,
    ),
    granite(
        EXPERTS,
        dataclasses.replace(config, num_experts=6, experts_per_token=3, expert_features=5).build,
    ),
]


def with_multiplier(name: str, value: float):
    """Computes with another value of a multiplier of the config."""

    def edit(model):
        model.config = dataclasses.replace(model.config, **{name: value})

    return edited(edit)


forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    forward("embeddings not multiplied", plant=with_multiplier("embedding_multiplier", 1.0)),
    forward("logits not divided", plant=with_multiplier("logits_scaling", 1.0), culprit=""),
    forward(
        "branches not multiplied",
        plant=with_value("blocks.1", "residual_scale", 1.0),
        culprit="model.layers.1",
    ),
    forward(
        "scores multiplied by 1 / √head_features",
        plant=with_value("blocks.1.mixer", "scale", None),
        culprit="model.layers.1.self_attn",
    ),
    forward(
        "positions without rope",
        plant=with_value("blocks.1.mixer", "rotary_features", 6),
        culprit="model.layers.1.self_attn",
    ),
    forward(
        "no positions in spite of rope",
        case=ROTARY,
        plant=with_value("blocks.1.mixer", "rotary_features", 0),
        culprit="model.layers.1.self_attn",
    ),
    forward(
        "norm over all groups",
        plant=with_value("blocks.0.mixer.norm", "num_groups", 1),
        culprit="model.layers.0.mamba.norm",
    ),
    forward(
        "gate after the norm",
        plant=with_value("blocks.0.mixer", "norm_before_gate", True),
        culprit="model.layers.0.mamba",
    ),
    forward(
        "limits forgotten",
        case=ROTARY,
        plant=with_value("blocks.0.mixer", "dt_limits", (0.0, float("inf"))),
        culprit="model.layers.0.mamba",
    ),
    forward(
        "experts' weights not normalized",
        case=EXPERTS,
        plant=with_value("blocks.1.mlp", "normalize", False),
        culprit="model.layers.1.block_sparse_moe",
    ),
    forward(
        "shared MLP forgotten",
        case=EXPERTS,
        plant=replaced("jax_models.layers.experts.Experts.shared_output", without_output),
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="model.norm"),
    Mutation(
        "gate and up exchanged",
        CASE,
        "weights",
        plant=edited(exchanged("blocks.1.mlp", "gate_proj", "up_proj")),
        culprit="model.layers.1.shared_mlp",
    ),
    Mutation(
        "gate and up of the experts exchanged",
        EXPERTS,
        "weights",
        plant=edited(exchanged("blocks.1.mlp", "gate_kernel", "up_kernel")),
        culprit="model.layers.1.block_sparse_moe.experts",
    ),
]
