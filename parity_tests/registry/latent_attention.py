"""Multi-head latent attention, with the keys of Kimi Linear and Ling 3."""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp

from jax_models import LatentAttention
from parity_tests.registry.attention import positions_of_the_row
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    CUT,
    DOCUMENTS,
    STEPS,
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    with_value,
)

latent = partial(paired, layout="deepseek", architecture="latent_attention", prefix=5)
SIZES: dict[str, Any] = {
    "latent_features": 5,
    "key_features": 4,
    "shared_features": 6,
    "value_features": 3,
    "max_length": 21,
}
LING = {"query_features": 9, "rope_theta": 10.0, "output_gate": True, "use_bias": True}
CASE, PLAIN = "LatentAttention", "LatentAttention, no rotation, gate, biases"
CASES = [
    latent(CASE, partial(LatentAttention, 8, 3, **SIZES, **LING)),
    latent(PLAIN, partial(LatentAttention, 8, 3, **SIZES)),
]


def by_halves(rotary):
    """Rotates (x_i, x_{i + n/2}) instead of neighboring features."""
    return lambda *args, interleaved, **options: rotary(*args, **options)


def scaled_by_own_part(attention):
    """Divides scores by the root of the size of k without κ."""

    def wrong(q, *args, **options):
        own, whole = SIZES["key_features"], SIZES["key_features"] + SIZES["shared_features"]
        return attention(q * math.sqrt(whole / own), *args, **options)

    return wrong


def shared_by_one_head(keys_and_values):
    """Gives κ to the first head alone."""

    def wrong(layer, *args):
        k, v = keys_and_values(layer, *args)
        return k.at[:, :, 1:, layer.key_features :].set(0), v

    return wrong


def all_keys_first(layer):
    """Reads the columns of all heads' keys first, and then those of all values."""
    kernel, own = layer.kv_proj.kernel, layer.key_features
    k, v = jnp.split(kernel[...], [layer.num_heads * own], axis=-1)
    by_head = [part.reshape(len(part), layer.num_heads, -1) for part in (k, v)]
    kernel[...] = jnp.concatenate(by_head, axis=-1).reshape(kernel.shape)


def unscaled_when_absorbed(absorbed):
    """Forgets that attention divides by the root of the larger size of latents."""

    def wrong(layer, q):
        result = absorbed(layer, q)
        return result * math.sqrt(q.shape[-1] / result.shape[-1])

    return wrong


def without_latents(attention):
    """Forgets the latents of the previous call."""
    return lambda *args, empty, **options: attention(*args, empty=True, **options)


LAYER = "jax_models.layers.latent_attention.LatentAttention"
ATTENTION = "jax_models.layers.latent_attention.latent_attention"
forward = partial(Mutation, case=CASE, kind="forward")
states = partial(Mutation, case=CASE, kind="states and masks")
MUTATIONS = [
    Mutation("keys of all heads first", CASE, "weights", edited(all_keys_first)),
    forward("halves rotated", plant=replaced("jax_models.ops.rotary", by_halves)),
    forward("scale of k without κ", plant=replaced(ATTENTION, scaled_by_own_part)),
    forward("κ of one head", plant=replaced(f"{LAYER}.keys_and_values", shared_by_one_head)),
    forward("gate forgotten", plant=with_value("g_proj", "scale", 0.0)),
    forward("epsilon of c doubled", plant=epsilon_doubled("latent_norm"), culprit="kv_a_layernorm"),
    forward(
        "epsilon of the queries doubled", plant=epsilon_doubled("q_norm"), culprit="q_a_layernorm"
    ),
    states(
        "absorbed queries unscaled",
        plant=replaced(f"{LAYER}.absorbed", unscaled_when_absorbed),
        check=STEPS,
    ),
    states("pieces begin without latents", plant=replaced(ATTENTION, without_latents), check=CUT),
    states(
        "positions of the row",
        plant=replaced("jax_models.ops.Rows.positions", positions_of_the_row),
        check=DOCUMENTS,
    ),
    *mask_ignored(CASE, ATTENTION),
]
