"""RWKV-4's parts, block and language model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import torch_ref
from jax_models import RWKVBlock, RWKVChannelMix, RWKVLanguageModelConfig, RWKVTimeMix, WKVState
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    epsilon_doubled,
    mask_ignored,
    replaced,
    transposed,
    two_swapped,
    zeroed,
)


def with_positive_weights(state):
    """A state with positive denominators, because they are sums of positive weights."""
    return jax.tree.map(
        lambda s: s._replace(den=np.abs(s.den) + 1) if isinstance(s, WKVState) else s,
        state,
        is_leaf=lambda s: isinstance(s, WKVState),
    )


rwkv = partial(paired, layout="blinkdl", architecture="rwkv", valid_state=with_positive_weights)
config = RWKVLanguageModelConfig(vocab_size=11, features=6, num_layers=2, hidden_features=8)

CASES = [
    rwkv("RWKVTimeMix", partial(RWKVTimeMix, 5)),
    rwkv(
        "RWKVTimeMix by associative scan",
        partial(RWKVTimeMix, 5, method="associative"),
        partial(torch_ref.RWKVTimeMix, 5),
    ),
    rwkv("RWKVChannelMix", partial(RWKVChannelMix, 5, 7), reach=2),
    rwkv("RWKVBlock", partial(RWKVBlock, 5, 7)),
    rwkv("RWKVLanguageModel", config.build, architecture="rwkv_language_model", twin_state=False),
]


def without_bonus(wkv):
    """Sets the bonus u of the current step to zero."""
    return lambda k, v, state, *, u, **options: wkv(k, v, state, u=jnp.zeros_like(u), **options)


def with_a_faster_decay(wkv):
    """Makes the decay of the past a little faster."""
    return lambda k, v, state, *, w, **options: wkv(k, v, state, w=w + 1e-9, **options)


def with_late_values(wkv):
    """Gives each step the value of the previous step."""
    return lambda k, v, *args, **options: wkv(k, jnp.roll(v, 1, axis=1), *args, **options)


def late_by_a_step(delayed):
    """Gives each step the input of two steps before instead of that of the previous step."""

    def late(*args, **options):
        (previous, current), state = delayed(*args, **options)
        return (jnp.roll(previous, 1, axis=1), current), state

    return late


weights = partial(Mutation, kind="weights")
forward = partial(Mutation, kind="forward")

MUTATIONS = [
    weights("two weights of one shape swapped", "RWKVChannelMix", plant=two_swapped()),
    weights(
        "ln0's bias forgotten",
        "RWKVLanguageModel",
        plant=zeroed("blocks.0.ln0.bias"),
        culprit="blocks.0.ln0",
    ),
    weights(
        "time mix's output transposed",
        "RWKVLanguageModel",
        plant=transposed("blocks.1.att.output.kernel"),
        culprit="blocks.1.att.output",
    ),
    *(
        forward(name, "RWKVTimeMix", plant=replaced("jax_models.ops.wkv", wrong))
        for name, wrong in (
            ("no bonus", without_bonus),
            ("decay 1e-9 larger", with_a_faster_decay),
            ("values late by a step", with_late_values),
        )
    ),
    forward(
        "|k| for max(k, 0)", "RWKVChannelMix", plant=replaced("jax.nn.relu", lambda _: jnp.abs)
    ),
    forward("epsilon doubled", "RWKVBlock", plant=epsilon_doubled("ln2"), culprit="ln2"),
    forward(
        "token shift late by a step",
        "RWKVLanguageModel",
        plant=replaced("jax_models.ops.delayed", late_by_a_step),
        culprit="blocks.0.att",
    ),
    *mask_ignored("RWKVTimeMix", "jax_models.ops.wkv"),
]

COMPARED = {"RWKVBlock": RWKVBlock}
