"""RWKV-6's parts, block and language model."""

from functools import partial
from typing import Any

import jax.numpy as jnp

import torch_ref
from jax_models import RWKV6Block, RWKV6ChannelMix, RWKV6LanguageModelConfig, RWKV6TimeMix
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    transposed,
    two_swapped,
    zeroed,
)

rwkv6 = partial(paired, layout="blinkdl", architecture="rwkv6")
sizes: dict[str, Any] = {"head_size": 3, "mix_rank": 2, "decay_rank": 4}
config = RWKV6LanguageModelConfig(
    vocab_size=11, features=6, num_layers=2, hidden_features=8, **sizes
)

CASES = [
    rwkv6("RWKV6TimeMix", partial(RWKV6TimeMix, 6, **sizes)),
    rwkv6(
        "RWKV6TimeMix by chunks",
        partial(RWKV6TimeMix, 6, **sizes, method="chunked"),
        partial(torch_ref.RWKV6TimeMix, 6, **sizes),
    ),
    rwkv6("RWKV6ChannelMix", partial(RWKV6ChannelMix, 5, 7), reach=2),
    rwkv6("RWKV6Block", partial(RWKV6Block, 6, 7, **sizes)),
    rwkv6(
        "RWKV6LanguageModel", config.build, architecture="rwkv6_language_model", twin_state=False
    ),
]


def in_the_order_of_fla(layer):
    """Reorders the five mixes w, k, v, r, g of BlinkDL's file to r, w, k, v, g, as fla has them."""
    w, k, v, r, g = jnp.split(layer.time_maa_w1[...], 5, axis=-1)
    layer.time_maa_w1[...] = jnp.concatenate([r, w, k, v, g], axis=-1)


def read_after_the_step(delta_rule):
    """Reads the output from the state after its update by the current step, without a bonus."""
    return lambda *args, u, **options: delta_rule(*args, **options)


def with_state_transposed(delta_rule):
    """Transposes the state, a matrix of keys and values, before and after the operator."""

    def wrong(*args, state, **options):
        y, last = delta_rule(*args, state=state.mT, **options)
        return y, last.mT

    return wrong


def other_way_round(lerp_to_previous):
    """Swaps the current and the previous step, as if μ were 1 − μ."""
    return lambda x, previous, *mix: lerp_to_previous(previous, x, *mix)


weights = partial(Mutation, kind="weights")
forward = partial(Mutation, kind="forward")
LAYERS = "jax_models.layers"
DELTA_RULE = "jax_models.ops.delta_rule"

MUTATIONS = [
    weights("two weights of one shape swapped", "RWKV6ChannelMix", plant=two_swapped()),
    weights("mixes in fla's order", "RWKV6TimeMix", plant=edited(in_the_order_of_fla)),
    weights(
        "ln0's bias forgotten",
        "RWKV6LanguageModel",
        plant=zeroed("blocks.0.ln0.bias"),
        culprit="blocks.0.ln0",
    ),
    weights(
        "time mix's output transposed",
        "RWKV6LanguageModel",
        plant=transposed("blocks.1.att.output.kernel"),
        culprit="blocks.1.att.output",
    ),
    forward(
        "state read after its update",
        "RWKV6TimeMix",
        plant=replaced(DELTA_RULE, read_after_the_step),
    ),
    forward("state transposed", "RWKV6TimeMix", plant=replaced(DELTA_RULE, with_state_transposed)),
    forward(
        "one exponential of two for the decay",
        "RWKV6TimeMix by chunks",
        plant=replaced(
            "jax_models.layers.rwkv6.RWKV6TimeMix.log_decay",
            lambda log_decay: lambda layer, x: -jnp.log1p(-log_decay(layer, x)),
        ),
    ),
    *(
        forward("μ for 1 − μ", case, plant=replaced(f"{LAYERS}.{target}", other_way_round))
        for case, target in (
            ("RWKV6TimeMix", "rwkv6.lerp_to_previous"),
            ("RWKV6ChannelMix", "rwkv_parts.lerp_to_previous"),
        )
    ),
    forward("epsilon doubled", "RWKV6TimeMix", plant=epsilon_doubled("ln_x"), culprit="ln_x"),
    forward("epsilon doubled", "RWKV6Block", plant=epsilon_doubled("ln1"), culprit="ln1"),
    *mask_ignored("RWKV6TimeMix", DELTA_RULE),
    *mask_ignored("RWKV6TimeMix by chunks", DELTA_RULE),
]

COMPARED = {"RWKV6Block": partial(RWKV6Block, head_size=16)}
