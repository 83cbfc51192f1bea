"""Gated DeltaNet, with the keys of Qwen3.5, OLMo Hybrid and Qwen3-Next."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import torch_ref
from jax_models import GatedDeltaNet
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, mask_ignored, replaced

gated = partial(paired, layout="qwen3_5", architecture="gated_delta_net")
SIZES: dict[str, Any] = {"num_key_heads": 2, "key_features": 3, "value_features": 5}
GROUPED: dict[str, Any] = {**SIZES, "num_value_heads": 4}
OLMO: dict[str, Any] = {**SIZES, "num_value_heads": 2, "negative_eigenvalues": True}
OLMO |= {"epsilon": 1e-5, "kernel_size": 3}
CASES = [
    gated("GatedDeltaNet", partial(GatedDeltaNet, 7, **GROUPED)),
    gated(
        "GatedDeltaNet by chunks",
        partial(GatedDeltaNet, 7, **GROUPED, method="chunked"),
        partial(torch_ref.GatedDeltaNet, 7, **GROUPED),
    ),
    gated(
        "GatedDeltaNet of OLMo Hybrid",
        partial(GatedDeltaNet, 7, **OLMO),
        partial(torch_ref.OLMoHybridGatedDeltaNet, 7, **OLMO),
        layout="olmo_hybrid",
    ),
    gated(
        "GatedDeltaNet of Qwen3-Next",
        partial(GatedDeltaNet, 7, **GROUPED),
        partial(torch_ref.Qwen3NextGatedDeltaNet, 7, **GROUPED),
        layout="qwen3_next",
    ),
]


def contiguous(side_by_side):
    """Splits the rows of qkvz and of ba as if all heads of q came first, then those of k, …"""

    def wrong(projections, key, sizes, num_heads=1):
        return side_by_side(projections, key, [num_heads * size for size in sizes])

    return wrong


def heads_in_turns(gated_delta_rule):
    """Repeats all key heads in turn, instead of each of them for consecutive value heads."""

    def wrong(q, k, v, *args, **options):
        q, k = (jnp.tile(x, (1, 1, v.shape[2] // x.shape[2], 1)) for x in (q, k))
        return gated_delta_rule(q, k, v, *args, **options)

    return wrong


def normalized_without_epsilon(gated_delta_rule):
    """Divides q and k by their norms, with no ε under the root."""

    def wrong(q, k, *args, **options):
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True)) for x in (q, k))
        return gated_delta_rule(q, k, *args, **{**options, "normalize": False})

    return wrong


def unscaled(gated_delta_rule):
    """Leaves out the factor key_features^−1/2 of q."""
    return lambda *args, **options: gated_delta_rule(*args, **{**options, "scale": 1.0})


def norm_after_gate(_):
    """Computes norm(o ⊙ silu(z)) instead of norm(o) ⊙ silu(z)."""
    return lambda layer, o, z: layer.norm(o * z * (1 / (1 + jnp.exp(-z))))


def with_small_rates(layer):
    """Computes β = σ(b) without the factor 2."""
    layer.negative_eigenvalues = False


def epsilon_of_config(layer):
    """Uses the ε of the config for the norm of o, which is 1e-5 in OLMo Hybrid."""
    layer.norm.epsilon = 1e-6


def taps_reversed(layer):
    """Reverses the taps of the convolution, as if the first weighed the current input."""
    layer.conv.kernel[...] = jnp.flip(layer.conv.kernel[...], axis=0)


OPERATOR = "jax_models.ops.gated_delta_rule"
LAYER = "jax_models.layers.gated_delta_net"
OF_OLMO = "GatedDeltaNet of OLMo Hybrid"
forward = partial(Mutation, kind="forward")

MUTATIONS = [
    forward(
        "contiguous split of qkvz",
        "GatedDeltaNet of Qwen3-Next",
        plant=replaced("jax_models.models.qwen3_5.side_by_side", contiguous),
    ),
    *(
        forward(name, "GatedDeltaNet", plant=replaced(target, wrong))
        for name, target, wrong in (
            ("key heads repeated in turns", OPERATOR, heads_in_turns),
            ("l2 norm without epsilon", OPERATOR, normalized_without_epsilon),
            ("queries unscaled", OPERATOR, unscaled),
            ("norm after the gate", f"{LAYER}.GatedDeltaNet.gated", norm_after_gate),
        )
    ),
    forward("taps reversed", "GatedDeltaNet", plant=edited(taps_reversed), culprit=""),
    forward("rates without the factor 2", OF_OLMO, plant=edited(with_small_rates)),
    forward("epsilon of the config", OF_OLMO, plant=edited(epsilon_of_config), culprit="o_norm"),
    *mask_ignored("GatedDeltaNet", OPERATOR),
    *mask_ignored("GatedDeltaNet by chunks", "jax_models.ops.causal_conv"),
]


def slow_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initializes dt_bias so that softplus(dt_bias) is log-uniform in [0.001, 0.1]."""
    step_size = jnp.exp(jax.random.uniform(key, shape, dtype, np.log(1e-3), np.log(0.1)))
    return jnp.log(jnp.expm1(step_size))


def with_four_heads(width: int, **options: Any) -> GatedDeltaNet:
    """A `GatedDeltaNet` with four heads that together are as wide as its input."""
    sizes = {"num_key_heads": 4, "num_value_heads": 4}
    sizes |= {"key_features": width // 4, "value_features": width // 4}
    return GatedDeltaNet(width, **sizes, **options)


COMPARED = {
    "GatedDeltaNet": with_four_heads,
    "GatedDeltaNet, slow decay": partial(
        with_four_heads, dt_init=slow_decay, negative_eigenvalues=True
    ),
}
