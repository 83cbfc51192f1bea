"""The language model of Lara Mini."""

import dataclasses
from functools import partial

from jax_models import LaraMiniLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, exchanged, with_value, zeroed

lara = partial(paired, layout="hf", architecture="lara_mini", twin_state=False, prefix=5)
config = LaraMiniLanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=3,
    block_types=("linear_attention", "sliding_attention", "full_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_features=4,
    window=3,
    rope_theta=10.0,
    num_key_heads=2,
    num_value_heads=4,
    key_features=4,
    value_features=3,
    num_experts=4,
    experts_per_token=3,
    expert_features=5,
    shared_features=4,
    max_length=40,
)
CASE, OTHER = "LaraMiniLanguageModel", "LaraMiniLanguageModel, biases, untied"
CASES = [
    lara(CASE, config.build),
    lara(
        OTHER,
        dataclasses.replace(
            config,
            num_layers=2,
            block_types=config.block_types[::2],
            attention_bias=True,
            normalize_experts=False,
            tied_head=False,
        ).build,
    ),
]
forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    forward(
        "positions in full attention",
        plant=with_value("blocks.2.mixer", "rotary_features", 4),
        culprit="model.layers.2.self_attn",
    ),
    forward(
        "no positions in a window",
        plant=with_value("blocks.1.mixer", "rotary_features", 0),
        culprit="model.layers.1.self_attn",
    ),
    Mutation(
        "gate and up of the shared expert exchanged",
        CASE,
        "weights",
        edited(exchanged("blocks.0.mlp.shared", "gate_proj", "up_proj")),
        culprit="model.layers.0.mlp.shared_expert",
    ),
    Mutation(
        "a bias of the attention forgotten",
        OTHER,
        "weights",
        plant=zeroed("blocks.1.mixer.out_proj.bias"),
        culprit="model.layers.1.self_attn.o_proj",
    ),
]
