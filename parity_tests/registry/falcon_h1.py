"""The language model of Falcon-H1."""

import dataclasses
from functools import partial

from jax_models import FalconH1LanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mamba2 import HYBRID_SIZES
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    with_value,
)

falcon_h1 = partial(paired, layout="hf", architecture="falcon_h1", twin_state=False, prefix=5)
config = FalconH1LanguageModelConfig(
    **HYBRID_SIZES,
    num_layers=2,
    rope_theta=10.0,
    embedding_multiplier=3.0,
    head_multiplier=0.6,
    key_multiplier=0.7,
    attention_in_multiplier=1.3,
    attention_out_multiplier=0.9,
    mamba_in_multiplier=1.2,
    mamba_out_multiplier=0.8,
    mamba_multipliers=(0.5, 1.5, 0.8, 1.2, 0.6),
    mlp_multipliers=(1.4, 0.7),
)
CASE, NORM = "FalconH1LanguageModel", "FalconH1LanguageModel, norm, biases, untied, limits of Δ"
CASES = [
    falcon_h1(CASE, config.build),
    falcon_h1(
        NORM,
        dataclasses.replace(
            config,
            num_layers=1,
            mamba_norm=True,
            tied_head=False,
            attention_bias=True,
            mlp_bias=True,
            mamba_bias=True,
            mamba_out_bias=True,
            conv_bias=False,
            kernel_size=3,
            dt_limits=(0.6, 0.9),
        ).build,
    ),
]


def with_multiplier(name: str, value: float = 1.0, block: int | None = None):
    """Computes with another value of a multiplier in the config of the model or of a block."""

    def edit(model):
        owner = model if block is None else model.blocks[block].mixer
        owner.config = dataclasses.replace(owner.config, **{name: value})

    return edited(edit)


def multipliers_exchanged(model):
    """Multiplies z and u by each other's multipliers."""
    mamba = model.blocks[1].mixer.mamba
    mamba.z_proj.scale, mamba.u_proj.scale = mamba.u_proj.scale, mamba.z_proj.scale


forward = partial(Mutation, case=CASE, kind="forward")
block, mamba = "model.layers.1", "model.layers.1.mamba"
MUTATIONS = [
    forward("embeddings not multiplied", plant=with_multiplier("embedding_multiplier")),
    forward("logits not multiplied", plant=with_multiplier("head_multiplier"), culprit=""),
    forward("multipliers of z and u exchanged", plant=edited(multipliers_exchanged), culprit=mamba),
    forward(
        "input of the Mamba-2 not multiplied",
        plant=with_multiplier("mamba_in_multiplier", block=1),
        culprit=block,
    ),
    forward(
        "output of the Mamba-2 not multiplied",
        plant=with_multiplier("mamba_out_multiplier", block=1),
        culprit=block,
    ),
    forward(
        "input of the attention not multiplied",
        plant=with_multiplier("attention_in_multiplier", block=1),
        culprit=block,
    ),
    forward(
        "output of the attention not multiplied",
        plant=with_multiplier("attention_out_multiplier", block=1),
        culprit=block,
    ),
    forward(
        "keys not multiplied",
        plant=with_value("blocks.1.mixer.attention", "scale", None),
        culprit=f"{block}.self_attn",
    ),
    forward(
        "gate of the MLP not multiplied",
        plant=with_value("blocks.1.mlp.gate_proj", "scale", 1.0),
        culprit=f"{block}.feed_forward",
    ),
    forward(
        "gate before the norm",
        case=NORM,
        plant=with_value("blocks.0.mixer.mamba", "norm_before_gate", False),
        culprit="model.layers.0.mamba",
    ),
    forward(
        "norm over all groups",
        case=NORM,
        plant=with_value("blocks.0.mixer.mamba.norm", "num_groups", 1),
        culprit="model.layers.0.mamba.norm",
    ),
    forward(
        "limits forgotten",
        case=NORM,
        plant=with_value("blocks.0.mixer.mamba", "dt_limits", (0.0, float("inf"))),
        culprit="model.layers.0.mamba",
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="model.final_layernorm"),
    *mask_ignored(CASE, "jax_models.ops.causal_conv"),
]
