"""Lightning attention, with the keys of MiniMax."""

from functools import partial
from typing import Any

import jax

from jax_models import LightningAttention
from jax_models.layers.lightning_attention import slopes
from parity_tests.registry.case import paired
from parity_tests.registry.gated_delta_net import contiguous
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    identity,
    mask_ignored,
    replaced,
)

SIZES: dict[str, Any] = {"num_heads": 3, "head_features": 4, "layer_index": 2, "num_layers": 4}
CASE = "LightningAttention"
CASES = [
    paired(
        CASE,
        partial(LightningAttention, 7, **SIZES),
        layout="minimax",
        architecture="lightning_attention",
    )
]


def of_lowest_layer(layer):
    """Gives a layer the slopes of the lowest one."""
    layer.slopes = tuple(slopes(layer.num_heads, 0, 1).tolist())


def from_zero(layer):
    """Counts the heads from 0 instead of 1, so that they forget faster."""
    layer.slopes = tuple(2 ** (8 / layer.num_heads) * slope for slope in layer.slopes)


def gated_by_silu(_):
    """Computes norm(o) ⊙ silu(g), as in Gated DeltaNet, instead of norm(o) ⊙ σ(g)."""
    return lambda layer, o, g: layer.norm(o) * jax.nn.silu(g)


def norm_after_gate(_):
    """Computes norm(o ⊙ σ(g)) instead of norm(o) ⊙ σ(g)."""
    return lambda layer, o, g: layer.norm(o * jax.nn.sigmoid(g))


def norm_by_head(layer):
    """Norms each head instead of all heads together."""
    layer.norm.num_groups = layer.num_heads


LAYER = "jax_models.layers.lightning_attention.LightningAttention"
OPERATOR = "jax_models.ops.gated_delta_rule"
forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    *(
        forward(name, plant=replaced(target, wrong))
        for name, target, wrong in (
            ("gate by silu", f"{LAYER}.gated", gated_by_silu),
            ("norm after the gate", f"{LAYER}.gated", norm_after_gate),
            ("q, k and v without silu", "jax.nn.silu", identity),
        )
    ),
    forward(
        "contiguous split of q, k and v",
        plant=replaced("jax_models.models.minimax.side_by_side", contiguous),
    ),
    forward("slopes of the lowest layer", plant=edited(of_lowest_layer)),
    forward("heads counted from 0", plant=edited(from_zero)),
    forward("norm by head", plant=edited(norm_by_head), culprit="norm"),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="norm"),
    *mask_ignored(CASE, OPERATOR),
]
