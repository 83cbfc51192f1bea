"""The mLSTM, with the keys of xLSTM in transformers."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import torch_ref
from jax_models import MLSTM
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
)

mlstm = partial(paired, layout="xlstm", architecture="mlstm")
SIZES: dict[str, Any] = {"num_heads": 3, "key_features": 2, "value_features": 4}
CAPPED: dict[str, Any] = {**SIZES, "gate_soft_cap": 2.0, "normalizer_epsilon": 0.1, "epsilon": 1e-3}
CASE = "MLSTM"
CASES = [
    mlstm(CASE, partial(MLSTM, 7, **CAPPED)),
    mlstm(
        "MLSTM, fused, default options",
        partial(MLSTM, 7, **SIZES),
        partial(torch_ref.MLSTM, 7, **SIZES, fused=True),
        layout="xlstm-fused",
    ),
]


def divided_by(divisor):
    """Divides C q by another function of nᵀ q, exp(−m) and ε."""

    def wrong(_):
        return lambda layer, value, total, m: (
            value / divisor(total, jnp.exp(-m), layer.normalizer_epsilon)
        )

    return replaced(f"{LAYER}.normalized", wrong)


def gated_by_silu(_):
    """Computes norm(h) ⊙ silu(o) instead of norm(h) ⊙ σ(o)."""

    def wrong(layer, h, o):
        return layer.norm(h.reshape(-1, h.shape[-1])).reshape(h.shape) * jax.nn.silu(o)

    return wrong


def without_caps(_):
    """Takes i and f without soft caps."""
    return lambda layer, gate: gate


def from_minus_infinity(max_plus):
    """Starts m at −∞ instead of 0, so that the first m is i."""
    return lambda a, b, m, *, rows: max_plus(a, b, m - jnp.inf, rows=rows)


def norm_of_all(layer):
    """Norms all heads together instead of each head."""
    layer.norm.num_groups, layer.norm.group_size = 1, layer.norm.scale.size


def exchange_gates(layer):
    """Exchanges the input and the forget gate."""
    layer.i_proj, layer.f_proj = layer.f_proj, layer.i_proj


def unscaled_query(gated_delta_rule):
    """Forgets the factor of q."""
    return lambda *args, scale, **options: gated_delta_rule(*args, **options)


LAYER = "jax_models.layers.mlstm.MLSTM"
MAX_PLUS = "jax_models.layers.mlstm.max_plus"
OPERATOR = "jax_models.ops.gated_delta_rule"
forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    forward("ε forgotten", plant=divided_by(lambda n, one, e: jnp.maximum(abs(n), one))),
    forward("ε not scaled", plant=divided_by(lambda n, one, e: jnp.maximum(abs(n), one) + e * one)),
    forward("maximum with 1 forgotten", plant=divided_by(lambda n, one, e: abs(n) + e)),
    forward("1 not scaled", plant=divided_by(lambda n, one, e: jnp.maximum(abs(n), 1) + e)),
    forward("sign of n q kept", plant=divided_by(lambda n, one, e: jnp.maximum(n, one) + e)),
    forward("gate by silu", plant=replaced(f"{LAYER}.gated", gated_by_silu)),
    forward("no soft caps", plant=replaced(f"{LAYER}.soft_capped", without_caps)),
    forward("q not scaled", plant=replaced(OPERATOR, unscaled_query)),
    forward("norm of all heads", plant=edited(norm_of_all), culprit="multihead_norm"),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="multihead_norm"),
    Mutation("m not carried", CASE, "states and masks", replaced(MAX_PLUS, from_minus_infinity)),
    Mutation("i and f exchanged", CASE, "weights", edited(exchange_gates)),
    *mask_ignored(CASE, OPERATOR),
    *(replace(m, name=f"{m.name} by m") for m in mask_ignored(CASE, MAX_PLUS)),
]
