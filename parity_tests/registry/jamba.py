"""The language model of Jamba."""

import dataclasses
from functools import partial

from jax_models import JambaLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mamba import norms_forgotten
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    with_value,
)

jamba = partial(paired, layout="hf", architecture="jamba", twin_state=False, prefix=5)
config = JambaLanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=2,
    mlp_features=7,
    block_types=("linear_attention", "full_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_features=4,
    inner_features=16,
    state_features=5,
    dt_rank=3,
    num_experts=6,
    experts_per_token=3,
    experts_offset=0,
    max_length=40,
)
CASE, BIASES = "JambaLanguageModel", "JambaLanguageModel, biases, untied, experts beside attention"
CASES = [
    jamba(CASE, config.build),
    jamba(
        BIASES,
        dataclasses.replace(
            config,
            experts_offset=1,
            tied_head=False,
            mamba_bias=True,
            conv_bias=False,
            kernel_size=3,
        ).build,
    ),
]
forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    forward(
        "norms of δ, B and C forgotten",
        plant=edited(lambda model: norms_forgotten(model.blocks[0].mixer)),
        culprit="model.layers.0.mamba",
    ),
    forward(
        "epsilon of the norm of B doubled",
        plant=epsilon_doubled("blocks.0.mixer.B_norm"),
        culprit="model.layers.0.mamba.b_layernorm",
    ),
    forward(
        "positions in the attention",
        plant=with_value("blocks.1.mixer", "rotary_features", 4),
        culprit="model.layers.1.self_attn",
    ),
    forward(
        "experts' weights normalized",
        plant=with_value("blocks.0.mlp", "normalize", True),
        culprit="model.layers.0.feed_forward",
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="model.final_layernorm"),
    Mutation(
        "gate and up of the experts exchanged",
        BIASES,
        "weights",
        plant=edited(exchanged("blocks.1.mlp", "gate_kernel", "up_kernel")),
        culprit="model.layers.1.feed_forward.experts",
    ),
]
