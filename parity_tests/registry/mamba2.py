"""Mamba-2 and its language model, with the keys of transformers and of mamba_ssm."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp

import torch_ref
from jax_models import Mamba2, Mamba2LanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    zeroed,
)

mamba2 = partial(paired, layout="mamba2", architecture="mamba2")
SIZES: dict[str, Any] = {"num_heads": 4, "num_groups": 2, "head_features": 3, "state_features": 5}
HYBRID_SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "features": 8,
    "mlp_features": 7,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_features": 6,
    "mamba_heads": 4,
    "mamba_head_features": 3,
    "state_features": 5,
    "num_groups": 2,
    "max_length": 40,
}
"""The sizes of the hybrids of Mamba-2 and attention."""
LIMITED: dict[str, Any] = {"use_bias": True, "kernel_size": 3, "dt_limits": (0.6, 0.9)}
NORM_FIRST, NO_NORM = "Mamba2, norm before the gate", "Mamba2, no norm, no conv bias"
LIMITS = "Mamba2, biases, limits of Δ"
model = partial(
    paired, layout="hf", architecture="mamba2_language_model", twin_state=False, prefix=5
)
config = Mamba2LanguageModelConfig(vocab_size=11, features=6, num_layers=2, **SIZES)
CASES = [
    mamba2("Mamba2", partial(Mamba2, 7, **SIZES)),
    mamba2(
        "Mamba2 by chunks",
        partial(Mamba2, 7, **SIZES, method="chunked"),
        partial(torch_ref.Mamba2, 7, **SIZES),
    ),
    mamba2(LIMITS, partial(Mamba2, 7, **SIZES, **LIMITED)),
    mamba2(NORM_FIRST, partial(Mamba2, 7, **SIZES, norm_before_gate=True)),
    mamba2(NO_NORM, partial(Mamba2, 7, **SIZES, use_norm=False, conv_bias=False)),
    model("Mamba2LanguageModel", config.build),
    model(
        "Mamba2LanguageModel, tied, limits of Δ",
        dataclasses.replace(config, tied_head=True, dt_limits=(0.6, 0.9), use_bias=True).build,
    ),
]
COMPARED = {"Mamba2": lambda width, **options: Mamba2(width, num_heads=width // 32, **options)}


def groups_in_turns(gated_delta_rule):
    """Lets each group serve every second head, instead of consecutive heads."""

    def wrong(C, B, v, *args, **options):
        B, C = (jnp.tile(x, (1, 1, v.shape[2] // x.shape[2], 1)) for x in (B, C))
        return gated_delta_rule(C, B, v, *args, **options)

    return wrong


def gate_after_norm(layer):
    """Computes norm(o) ⊙ silu(z) instead of norm(o ⊙ silu(z))."""
    layer.norm_before_gate = not layer.norm_before_gate


def norm_over_all(layer):
    """Takes the mean over all features instead of each group's."""
    layer.norm.num_groups = 1


def without_limits(layer):
    """Forgets the limits of Δ."""
    layer.dt_limits = 0.0, float("inf")


OPERATOR = "jax_models.ops.gated_delta_rule"
MUTATIONS = [
    Mutation("groups in turns", "Mamba2", "forward", replaced(OPERATOR, groups_in_turns)),
    Mutation("gate after the norm", "Mamba2", "forward", edited(gate_after_norm)),
    Mutation("gate before the norm", NORM_FIRST, "forward", edited(gate_after_norm)),
    Mutation("norm over all groups", "Mamba2", "forward", edited(norm_over_all), culprit="norm"),
    Mutation("limits forgotten", LIMITS, "forward", edited(without_limits)),
    Mutation("D forgotten", "Mamba2", "weights", zeroed("D")),
    Mutation(
        "epsilon doubled",
        "Mamba2LanguageModel",
        "forward",
        epsilon_doubled("norm"),
        culprit="backbone.norm_f",
    ),
    *mask_ignored("Mamba2", OPERATOR),
    *mask_ignored("Mamba2 by chunks", "jax_models.ops.causal_conv"),
]
