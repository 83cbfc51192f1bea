"""Mamba and its language model, with the keys of transformers and of mamba_ssm."""

import dataclasses
from functools import partial
from typing import Any

import jax

import torch_ref
from jax_models import Mamba, MambaLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    zeroed,
)

mamba = partial(paired, layout="mamba", architecture="mamba")
SIZES: dict[str, Any] = {"inner_features": 10, "state_features": 5, "dt_rank": 3}
NORMED, SCALED = "Mamba, plain norms, biases", "Mamba, scaled norms, no conv bias"
BIASED: dict[str, Any] = {"norm": "plain", "use_bias": True, "kernel_size": 3, "epsilon": 0.01}
model = partial(
    paired, layout="hf", architecture="mamba_language_model", twin_state=False, prefix=5
)
config = MambaLanguageModelConfig(vocab_size=11, features=6, num_layers=2, **SIZES)
CASES = [
    mamba("Mamba", partial(Mamba, 7, **SIZES)),
    mamba(NORMED, partial(Mamba, 7, **SIZES, **BIASED)),
    mamba(SCALED, partial(Mamba, 7, **SIZES, norm="scaled", conv_bias=False)),
    mamba(
        "Mamba by definition",
        partial(Mamba, 7, **SIZES, method="definition"),
        partial(torch_ref.Mamba, 7, **SIZES),
    ),
    model("MambaLanguageModel", config.build),
    model(
        "MambaLanguageModel of FalconMamba",
        dataclasses.replace(config, tied_head=False, mixer_norm=True, use_bias=True).build,
    ),
]
COMPARED = {"Mamba": Mamba}


def keys_exchanged(selective_scan):
    """Reads the state with B, and stores under C."""

    def wrong(u, dt, A, B, C, *args, **options):
        return selective_scan(u, dt, A, C, B, *args, **options)

    return wrong


def input_not_scaled(selective_scan):
    """Adds u Bᵀ to the state instead of Δ u Bᵀ."""

    def wrong(u, dt, *args, **options):
        return selective_scan(u / dt, dt, *args, **options)

    return wrong


def relu_for_softplus(softplus):
    """Computes Δ with relu."""
    return jax.nn.relu


def projections_exchanged(layer):
    """Takes the gate z for the input u."""
    layer.u_proj, layer.z_proj = layer.z_proj, layer.u_proj


def norms_forgotten(layer):
    """Computes the layer of Mamba instead of FalconMamba's."""
    layer.delta_norm = layer.B_norm = layer.C_norm = None


OPERATOR = "jax_models.ops.selective_scan"
MUTATIONS = [
    Mutation("B and C exchanged", "Mamba", "forward", replaced(OPERATOR, keys_exchanged)),
    Mutation("u not multiplied by Δ", "Mamba", "forward", replaced(OPERATOR, input_not_scaled)),
    Mutation(
        "relu for softplus",
        "Mamba",
        "forward",
        replaced("jax_models.ops.softplus", relu_for_softplus),
    ),
    Mutation("u and z exchanged", "Mamba", "forward", edited(projections_exchanged)),
    Mutation("D forgotten", "Mamba", "weights", zeroed("D")),
    Mutation("norms forgotten", NORMED, "forward", edited(norms_forgotten)),
    Mutation(
        "epsilon doubled", NORMED, "forward", epsilon_doubled("B_norm"), culprit="b_layernorm"
    ),
    Mutation(
        "epsilon doubled",
        "MambaLanguageModel",
        "forward",
        epsilon_doubled("norm"),
        culprit="backbone.norm_f",
    ),
    *mask_ignored("Mamba", OPERATOR),
    *mask_ignored("MambaLanguageModel", "jax_models.ops.causal_conv"),
]
