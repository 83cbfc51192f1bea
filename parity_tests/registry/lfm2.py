"""The language model of LFM2, without and with experts."""

import dataclasses
from functools import partial

from jax_models import LFM2LanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.experts import biased_weights
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    replaced,
    zeroed,
)

lfm2 = partial(paired, layout="hf", architecture="lfm2", twin_state=False, prefix=5)
config = LFM2LanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=2,
    mlp_features=7,
    block_types=("conv", "full_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_features=4,
    rope_theta=10.0,
    max_length=40,
)
EXPERTS = "LFM2LanguageModel, experts"
CASES = [
    lfm2("LFM2LanguageModel", config.build),
    lfm2(
        "LFM2LanguageModel, biases, untied",
        dataclasses.replace(config, conv_bias=True, kernel_size=4, tied_head=False).build,
    ),
    lfm2(
        EXPERTS,
        dataclasses.replace(
            config,
            num_experts=6,
            experts_per_token=3,
            expert_features=5,
            num_dense_layers=1,
            use_expert_bias=True,
            experts_scale=1.5,
        ).build,
    ),
]
weights = partial(Mutation, case="LFM2LanguageModel", kind="weights")
MUTATIONS = [
    weights(
        "gate and up exchanged",
        plant=edited(exchanged("blocks.1.mlp", "gate_proj", "up_proj")),
        culprit="model.layers.1.feed_forward",
    ),
    weights(
        "norms of a block exchanged", plant=edited(exchanged("blocks.0", "mixer_norm", "mlp_norm"))
    ),
    weights(
        "the convolution's bias forgotten",
        case="LFM2LanguageModel, biases, untied",
        plant=zeroed("blocks.0.mixer.conv.bias"),
        culprit="model.layers.0.conv.conv",
    ),
    weights(
        "experts' bias forgotten",
        case=EXPERTS,
        plant=zeroed("blocks.1.mlp.expert_bias"),
        culprit="model.layers.1.feed_forward.gate",
    ),
    Mutation(
        "experts' bias in the weights",
        EXPERTS,
        "forward",
        plant=replaced("jax_models.layers.experts.Experts.weigh", biased_weights),
    ),
    Mutation(
        "epsilon doubled",
        "LFM2LanguageModel",
        "forward",
        plant=epsilon_doubled("norm"),
        culprit="model.embedding_norm",
    ),
]
