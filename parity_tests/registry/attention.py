"""Attention with grouped queries, rotary positions, norms of queries and keys, and a gate."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jax_models import Attention
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    CUT,
    DOCUMENTS,
    Mutation,
    edited,
    mask_ignored,
    replaced,
    zeroed,
)

attention = partial(paired, architecture="attention", prefix=5)
MAX_LENGTH = 21
qwen = {"num_kv_heads": 2, "head_features": 6, "rotary_features": 3, "rope_theta": 10.0}
qwen |= {"qk_norm": "head", "zero_centered_norm": True, "output_gate": True}
CASES = [
    attention(
        "Attention",
        partial(Attention, 8, 4, max_length=MAX_LENGTH, use_bias=True, **qwen),
        layout="qwen3_5",
    ),
    attention(
        "Attention, norm over all heads",
        partial(Attention, 8, 2, max_length=MAX_LENGTH, qk_norm="all", epsilon=1e-5, out_bias=True),
        layout="olmo_hybrid",
    ),
    attention(
        "Attention, window",
        partial(
            Attention,
            12,
            4,
            num_kv_heads=2,
            window=3,
            qk_norm="head",
            rotary_features=0,
            head_gate=True,
        ),
        layout="lfm3",
        reach=3,
    ),
]


def rotating_whole_heads(rotary):
    """Rotates all features of a head instead of a part of them."""
    return lambda x, positions, *, rotated, **options: rotary(
        x, positions, rotated=x.shape[-1], **options
    )


def with_even_frequencies(rotary):
    """Computes frequencies from the number of rotated features, although n is one less."""
    return lambda x, positions, *, theta, **options: rotary(
        x, positions, theta=theta ** (3 / 4), **options
    )


def with_columns(order):
    """Puts the columns of each head's query and gate, (heads, 2, features), into another order."""

    def edit(layer):
        for name in ("kernel", "bias"):
            array = getattr(layer.q_proj, name)
            columns = jnp.arange(array.shape[-1])
            columns = order(columns, (layer.num_heads, 2, layer.head_features)).reshape(-1)
            array[...] = array[...][..., columns]

    return edit


def gate_first(columns, shape):
    """Exchanges the query and the gate of each head."""
    return jnp.flip(columns.reshape(shape), axis=1)


def all_queries_first(columns, shape):
    """Splits the columns of all heads at once into queries and gates."""
    return columns.reshape(shape[1], shape[0], shape[2]).swapaxes(0, 1)


def without_1(layer):
    """Multiplies normed queries by `scale` instead of `1 + scale`."""
    layer.q_norm.scale[...] -= 1


def norm_of_each_head(norm):
    """Norms each of two heads separately."""

    def wrong(layer, x):
        heads = x.reshape(*x.shape[:-1], 2, -1)
        of_heads = heads * jax.lax.rsqrt(jnp.mean(heads**2, -1, keepdims=True) + layer.epsilon)
        return of_heads.reshape(x.shape) * jnp.broadcast_to(layer.scale[...], x.shape)

    return wrong


def positions_of_the_row(positions):
    """Counts positions from the beginning of a row instead of that of each document."""
    return lambda rows, *args: positions(dataclasses.replace(rows, reset=None), *args)


def without_keys(local_attention):
    """Forgets the keys of the previous call."""
    return lambda *args, empty, **options: local_attention(*args, empty=True, **options)


ROTARY, LOCAL = "jax_models.ops.rotary", "jax_models.ops.local_attention"
weights = partial(Mutation, case="Attention", kind="weights")
forward = partial(Mutation, case="Attention", kind="forward")
states = partial(Mutation, case="Attention", kind="states and masks")
MUTATIONS = [
    weights("a bias forgotten", plant=zeroed("v_proj.bias")),
    weights("query and gate exchanged", plant=edited(with_columns(gate_first))),
    weights("gates after all queries", plant=edited(with_columns(all_queries_first))),
    weights("norm's weight without 1", plant=edited(without_1)),
    forward("whole heads rotated", plant=replaced(ROTARY, rotating_whole_heads)),
    forward("frequencies of an even number", plant=replaced(ROTARY, with_even_frequencies)),
    Mutation(
        "each head normed",
        "Attention, norm over all heads",
        "forward",
        replaced("jax_models.layers.norm.RMSNorm.__call__", norm_of_each_head),
    ),
    states("pieces begin without keys", plant=replaced(LOCAL, without_keys), check=CUT),
    states(
        "positions of the row",
        plant=replaced("jax_models.ops.Rows.positions", positions_of_the_row),
        check=DOCUMENTS,
    ),
    *mask_ignored("Attention", LOCAL),
]

COMPARED = {"Attention": partial(Attention, num_heads=4)}
