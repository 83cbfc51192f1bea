"""The language model of MiniMax."""

import dataclasses
from functools import partial

from jax_models import MiniMaxLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.lightning_attention import of_lowest_layer
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    mask_ignored,
    replaced,
    with_value,
)

minimax = partial(paired, layout="hf", architecture="minimax", twin_state=False, prefix=5)
config = MiniMaxLanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=2,
    num_experts=4,
    experts_per_token=3,
    expert_features=5,
    num_heads=4,
    head_features=4,
    rope_theta=10.0,
    full_alpha=0.7,
    full_beta=1.5,
    lightning_alpha=1.4,
    lightning_beta=0.6,
    mlp_alpha=0.8,
    mlp_beta=1.3,
    tied_head=False,
    max_length=40,
)
CASE, PARTLY = "MiniMaxLanguageModel", "MiniMaxLanguageModel, partly rotated, tied"
CASES = [
    minimax(CASE, config.build),
    minimax(PARTLY, dataclasses.replace(config, rotary_fraction=0.5, tied_head=True).build),
]


def residual_before_norm(_):
    """Adds to x instead of norm(x), without factors, as in other hybrids."""

    def wrong(block, x, state, rows):
        y, state = block.mixer.sequence(block.mixer_norm(x), state, rows)
        x = x + y
        return x + block.mlp(block.mlp_norm(x)), state

    return wrong


forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    forward(
        "residual before the norm",
        plant=replaced("jax_models.models.minimax.MiniMaxBlock.sequence", residual_before_norm),
    ),
    forward(
        "factors of lightning attention in all blocks",
        plant=with_value("blocks.0", "factors", (1.4, 0.6, 0.8, 1.3)),
    ),
    forward(
        "slopes of the lowest layer",
        plant=edited(lambda model: of_lowest_layer(model.blocks[1].mixer)),
        culprit="model.layers.1.self_attn",
    ),
    forward(
        "experts' weights not normalized",
        plant=with_value("blocks.0.mlp", "normalize", False),
        culprit="model.layers.0.mlp",
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="model.norm"),
    Mutation(
        "whole heads rotated",
        PARTLY,
        "forward",
        plant=with_value("blocks.0.mixer", "rotary_features", 4),
        culprit="model.layers.0.self_attn",
    ),
    Mutation(
        "gate and up of the experts exchanged",
        CASE,
        "weights",
        plant=edited(exchanged("blocks.1.mlp", "gate_kernel", "up_kernel")),
        culprit="model.layers.1.mlp.experts",
    ),
    *mask_ignored(CASE, "jax_models.ops.gated_delta_rule"),
]
