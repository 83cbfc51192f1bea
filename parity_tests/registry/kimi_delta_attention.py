"""Kimi Delta Attention, with the keys of Kimi Linear and Ling 3."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import torch_ref
from jax_models import KimiDeltaAttention
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
)

kimi = partial(paired, layout="kimi_linear", architecture="kimi_delta_attention")
SIZES: dict[str, Any] = {"num_heads": 3, "head_features": 4}
LING: dict[str, Any] = {"low_rank": False, "min_log_decay": -5.0, "kernel_size": 3}
OF_LING, FULL_RANK = "KimiDeltaAttention of Ling 3", "KimiDeltaAttention of Ling 3, no bound"
CASES = [
    kimi("KimiDeltaAttention", partial(KimiDeltaAttention, 7, **SIZES)),
    kimi(
        "KimiDeltaAttention by chunks",
        partial(KimiDeltaAttention, 7, **SIZES, method="chunked"),
        partial(torch_ref.KimiDeltaAttention, 7, **SIZES),
    ),
    kimi(OF_LING, partial(KimiDeltaAttention, 7, **SIZES, **LING), layout="bailing_hybrid"),
    kimi(
        FULL_RANK,
        partial(KimiDeltaAttention, 7, **SIZES, low_rank=False),
        layout="bailing_hybrid",
    ),
]


def decay_by_head(gated_delta_rule):
    """Gives all features of a head the decay of its first one."""

    def wrong(q, k, v, log_decay, *args, **options):
        return gated_delta_rule(q, k, v, log_decay[..., 0], *args, **options)

    return wrong


def unscaled(gated_delta_rule):
    """Leaves out the factor head_features^−1/2 of q."""
    return lambda *args, **options: gated_delta_rule(*args, **{**options, "scale": 1.0})


def gated_by_silu(_):
    """Computes norm(o) ⊙ silu(g), as in Gated DeltaNet, instead of norm(o) ⊙ σ(g)."""
    return lambda layer, o, g: layer.norm(o) * jax.nn.silu(g)


def norm_after_gate(_):
    """Computes norm(o ⊙ σ(g)) instead of norm(o) ⊙ σ(g)."""
    return lambda layer, o, g: layer.norm(o * jax.nn.sigmoid(g))


def without_bound(layer):
    """Computes the decay by softplus instead of the bounded σ."""
    layer.min_log_decay = None


def clipped(_):
    """Raises the unbounded decay to its lower bound instead of computing it by σ."""

    def wrong(layer, f):
        f = layer.by_head(f + layer.dt_bias[...][None, None])
        rate = jnp.exp(layer.A_log[...])[None, None, :, None]
        return jnp.maximum(-rate * jax.nn.softplus(f), layer.min_log_decay)

    return wrong


OPERATOR = "jax_models.ops.gated_delta_rule"
LAYER = "jax_models.layers.kimi_delta_attention.KimiDeltaAttention"
forward = partial(Mutation, kind="forward")
MUTATIONS = [
    *(
        forward(name, case, plant=replaced(target, wrong))
        for name, case, target, wrong in (
            ("decay by head", "KimiDeltaAttention", OPERATOR, decay_by_head),
            ("queries unscaled", "KimiDeltaAttention", OPERATOR, unscaled),
            ("gate by silu", "KimiDeltaAttention", f"{LAYER}.gated", gated_by_silu),
            ("norm after the gate", "KimiDeltaAttention", f"{LAYER}.gated", norm_after_gate),
            ("decay clipped at the bound", OF_LING, f"{LAYER}.log_decay", clipped),
        )
    ),
    forward("softplus for the bounded decay", OF_LING, plant=edited(without_bound)),
    forward(
        "epsilon doubled", "KimiDeltaAttention", plant=epsilon_doubled("norm"), culprit="o_norm"
    ),
    *mask_ignored("KimiDeltaAttention", OPERATOR),
    *mask_ignored("KimiDeltaAttention by chunks", "jax_models.ops.causal_conv"),
]
