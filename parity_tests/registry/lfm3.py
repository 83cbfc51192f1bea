"""The language model of LFM3."""

import dataclasses
from functools import partial

from jax_models import LFM3LanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    exchanged,
    replaced,
    submodule_at,
    with_value,
    zeroed,
)

lfm3 = partial(paired, layout="hf", architecture="lfm3", twin_state=False, prefix=5)
config = LFM3LanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=3,
    mlp_features=7,
    block_types=("conv", "sliding_attention", "full_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_features=4,
    window=3,
    rope_theta=10.0,
    sliding_rope_theta=3.0,
    kernel_size=4,
    max_length=40,
)
CASE, OTHER = "LFM3LanguageModel", "LFM3LanguageModel, norms of inputs, biases, no gates"
CASES = [
    lfm3(CASE, config.build),
    lfm3(
        OTHER,
        dataclasses.replace(
            config,
            sandwich_norm=False,
            head_gate=False,
            attention_bias=True,
            conv_bias=True,
            sliding_rotary_fraction=0.5,
            tied_head=False,
        ).build,
    ),
]


def ungated(layer):
    """Leaves out the gates of the heads."""
    submodule_at(layer, "blocks.2.mixer").gate_proj = None


def without_last_norm(_):
    """Adds the output of the MLP without its norm."""

    def wrong(block, x, state, rows):
        y, state = block.mixer.sequence(block.mixer_norm(x), state, rows)
        x = x + block.mixer_out_norm(y)
        return x + block.mlp(block.mlp_norm(x)), state

    return wrong


attention = "model.layers.{}.self_attn"
forward = partial(Mutation, case=CASE, kind="forward")
weights = partial(Mutation, case=CASE, kind="weights")
MUTATIONS = [
    forward("gates forgotten", plant=edited(ungated), culprit=attention.format(2)),
    forward(
        "all pairs rotated",
        plant=with_value("blocks.2.mixer", "rotary_pairs", None),
        culprit=attention.format(2),
    ),
    forward(
        "θ of full attention in a window",
        plant=with_value("blocks.1.mixer", "rope_theta", 10.0),
        culprit=attention.format(1),
    ),
    forward(
        "a window one step too long",
        plant=with_value("blocks.1.mixer", "window", 4),
        culprit=attention.format(1),
    ),
    forward(
        "outputs of the MLP not normed",
        plant=replaced("jax_models.models.hybrid.HybridBlock.sequence", without_last_norm),
    ),
    weights(
        "norms of inputs and of outputs exchanged",
        plant=edited(exchanged("blocks.1", "mixer_norm", "mixer_out_norm")),
    ),
    Mutation(
        "a bias of the attention forgotten",
        OTHER,
        "weights",
        plant=zeroed("blocks.2.mixer.out_proj.bias"),
        culprit=f"{attention.format(2)}.o_proj",
    ),
]
