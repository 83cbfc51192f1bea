"""RWKV-7's parts, blocks and language model."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import torch_ref
from jax_models import RWKV7Block, RWKV7ChannelMix, RWKV7LanguageModelConfig, RWKV7TimeMix
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    transposed,
    zeroed,
)
from parity_tests.registry.rwkv6 import other_way_round

rwkv7 = partial(paired, layout="blinkdl", architecture="rwkv7")
sizes: dict[str, Any] = {
    "head_size": 3,
    "decay_rank": 2,
    "rate_rank": 3,
    "value_rank": 4,
    "gate_rank": 5,
}
above: dict[str, Any] = {"layer_index": 1, **sizes}
config = RWKV7LanguageModelConfig(
    vocab_size=11, features=6, num_layers=2, hidden_features=8, **sizes
)

CASES = [
    rwkv7("RWKV7TimeMix", partial(RWKV7TimeMix, 6, **sizes)),
    rwkv7(
        "RWKV7TimeMix by chunks",
        partial(RWKV7TimeMix, 6, **sizes, method="chunked"),
        partial(torch_ref.RWKV7TimeMix, 6, **sizes),
    ),
    rwkv7(
        "RWKV7TimeMix above the lowest",
        partial(RWKV7TimeMix, 6, num_layers=2, **above),
        partial(torch_ref.RWKV7TimeMix, 6, **above),
    ),
    rwkv7("RWKV7ChannelMix", partial(RWKV7ChannelMix, 5, 7), reach=2),
    rwkv7("RWKV7Block", partial(RWKV7Block, 6, 7, **sizes)),
    rwkv7(
        "RWKV7Block above the lowest",
        partial(RWKV7Block, 6, 7, num_layers=2, **above),
        partial(torch_ref.RWKV7Block, 6, 7, **above),
    ),
    rwkv7(
        "RWKV7LanguageModel", config.build, architecture="rwkv7_language_model", twin_state=False
    ),
]


def without_the_lowest_values(layer):
    """Uses only the layer's own values, without a share of the lowest layer's."""
    layer.v0[...] = jnp.full_like(layer.v0[...], -1e3)


def read_before_the_step(delta_rule):
    """Reads the output from the state before its update by the current step, as RWKV-6 does."""

    def wrong(r, log_w, k, v, a, b, state, **options):
        late = jnp.concatenate([jnp.zeros_like(r[:, :1]), r], axis=1)[:, :-1]
        return delta_rule(late, log_w, k, v, a, b, state, **options)

    return wrong


def with_state_transposed(delta_rule):
    """Transposes the state, a matrix of keys and values, before and after the operator."""

    def wrong(*args, **options):
        *others, state = args
        y, last = delta_rule(*others, state.mT, **options)
        return y, last.mT

    return wrong


def with_changed_key(removal_and_key):
    """Computes the removal key κ̂ from the changed key that is written to the state."""

    def wrong(layer, k, rate):
        _, changed = removal_and_key(layer, k, rate)
        return removal_and_key(layer, changed, rate)[0], changed

    return wrong


def with_sigmoid_outside(low_rank):
    """Computes the gate as g = σ(x g_1 g_2) instead of σ(x g_1) g_2."""

    def wrong(x, down, up, nonlinearity=lambda y: y, base=None):
        if nonlinearity is jax.nn.sigmoid:
            return jax.nn.sigmoid(low_rank(x, down, up))
        return low_rank(x, down, up, nonlinearity, base)

    return wrong


def with_bonus_before(normed):
    """Computes GroupNorm(o + bonus) instead of GroupNorm(o) + bonus."""
    return lambda layer, o, bonus: normed(layer, o + bonus, jnp.zeros_like(bonus))


weights = partial(Mutation, kind="weights")
forward = partial(Mutation, kind="forward")
LAYER = "jax_models.layers.rwkv7"
DELTA_RULE = "jax_models.ops.delta_rule"

MUTATIONS = [
    weights(
        "the lowest layer's values forgotten",
        "RWKV7TimeMix above the lowest",
        plant=edited(without_the_lowest_values),
    ),
    weights(
        "ln0's bias forgotten",
        "RWKV7LanguageModel",
        plant=zeroed("blocks.0.ln0.bias"),
        culprit="blocks.0.ln0",
    ),
    weights(
        "time mix's output transposed",
        "RWKV7LanguageModel",
        plant=transposed("blocks.1.att.output.kernel"),
        culprit="blocks.1.att.output",
    ),
    *(
        forward(name, "RWKV7TimeMix", plant=replaced(target, wrong))
        for name, target, wrong in (
            ("state read before its update", DELTA_RULE, read_before_the_step),
            ("state transposed", DELTA_RULE, with_state_transposed),
            (
                "κ̂ of the changed key",
                f"{LAYER}.RWKV7TimeMix.removal_and_key",
                with_changed_key,
            ),
            ("sigmoid outside of g", f"{LAYER}.low_rank", with_sigmoid_outside),
            ("bonus before the norm", f"{LAYER}.RWKV7TimeMix.normed", with_bonus_before),
            ("μ for 1 − μ", f"{LAYER}.lerp_to_previous", other_way_round),
        )
    ),
    forward("epsilon doubled", "RWKV7TimeMix", plant=epsilon_doubled("ln_x"), culprit="ln_x"),
    forward("epsilon doubled", "RWKV7Block", plant=epsilon_doubled("ln1"), culprit="ln1"),
    forward(
        "|k| for max(k, 0)", "RWKV7ChannelMix", plant=replaced("jax.nn.relu", lambda _: jnp.abs)
    ),
    *mask_ignored("RWKV7TimeMix", DELTA_RULE),
    *mask_ignored("RWKV7TimeMix by chunks", DELTA_RULE),
]

COMPARED = {"RWKV7Block": partial(RWKV7Block, head_size=16, layer_index=0)}
