"""hippogriff's Hawk, block and language model."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jax_models import HippogriffBlock, HippogriffHawk, HippogriffLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import CUT, Mutation, edited, replaced, zeroed

hippogriff = partial(paired, layout="hippogriff", architecture="hippogriff")
WINDOW = 3
config = HippogriffLanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=2,
    hidden_features=6,
    mlp_features=7,
    num_heads=2,
    window=WINDOW,
)
without_attention = dataclasses.replace(config, num_heads=None, version="0.0.3")
CASES = [
    hippogriff("HippogriffHawk", partial(HippogriffHawk, 5, hidden_features=7, kernel_size=3)),
    hippogriff(
        "HippogriffHawk, 0.0.3, no convolution",
        partial(HippogriffHawk, 5, hidden_features=7, kernel_size=None, version="0.0.3"),
    ),
    hippogriff(
        "HippogriffBlock",
        partial(HippogriffBlock, 16, 7, 4, hidden_features=6, num_kv_heads=2, window=3),
        prefix=5,
    ),
    hippogriff(
        "HippogriffBlock, 0.0.3",
        partial(HippogriffBlock, 8, 7, 2, hidden_features=6, window=3, version="0.0.3"),
        prefix=5,
    ),
    hippogriff(
        "HippogriffLanguageModel, 0.0.3, no attention",
        without_attention.build,
        architecture="hippogriff_language_model",
        twin_state=False,
    ),
    hippogriff(
        "HippogriffLanguageModel",
        config.build,
        architecture="hippogriff_language_model",
        twin_state=False,
        prefix=5,
    ),
]


def gates_swapped(layer):
    """Swaps the kernels of the input gate and the recurrence gate."""
    of_input, of_recurrence = layer.rglru.input_gate.kernel, layer.rglru.recurrence_gate.kernel
    of_input[...], of_recurrence[...] = of_recurrence[...], of_input[...]


def first_step_whole(rg_lru):
    """Computes h = i ⊙ u at the first step, as RecurrentGemma does."""

    def wrong(x, state, **options):
        first = jnp.zeros(x.shape[:2], bool).at[:, 0].set(True)
        return rg_lru(x, state, **options | {"first": first})

    return wrong


def without_epsilon(rg_lru):
    """Scales the input by √(1 − a²), without adding the epsilon under the root."""
    return lambda *args, epsilon, **options: rg_lru(*args, **options)


def scale_fixed(layer):
    """Sets `c` to 8, as in version 0.0.2."""
    layer.log_c[...] = jnp.full_like(layer.log_c[...], jnp.log(8.0))


def recurrence_first(layer):
    """Runs the recurrence before the attention, as in version 0.0.2."""
    layer.version = "0.0.2"


def half_of_a_head(rotary):
    """Rotates only half of each head, as RecurrentGemma does."""
    return lambda x, positions, *, rotated, **options: rotary(
        x, positions, rotated=rotated // 2, **options
    )


def with_epsilon(_):
    """A norm that computes `x / √(mean(x²) + 1e-6) · scale`, although it should have no epsilon."""

    def wrong(norm, x):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return y * jnp.broadcast_to(norm.scale[...], x.shape)

    return wrong


def without_previous_keys(local_attention):
    """Forgets the keys of the previous call."""
    return lambda q, k, v, state, **masks: local_attention(
        q, k, v, state._replace(position=state.position * 0), **masks
    )


RG_LRU = "jax_models.ops.rg_lru"
of_hawk = partial(Mutation, case="HippogriffHawk")
of_block = partial(Mutation, case="HippogriffBlock")
MUTATIONS = [
    of_hawk("gates swapped", kind="weights", plant=edited(gates_swapped)),
    of_hawk("a gate's bias forgotten", kind="weights", plant=zeroed("rglru.input_gate.bias")),
    of_hawk("first step whole", kind="forward", plant=replaced(RG_LRU, first_step_whole)),
    of_hawk("no epsilon", kind="forward", plant=replaced(RG_LRU, without_epsilon)),
    Mutation(
        "c not loaded",
        "HippogriffHawk, 0.0.3, no convolution",
        "weights",
        edited(scale_fixed),
    ),
    Mutation(
        "recurrence before attention",
        "HippogriffBlock, 0.0.3",
        "forward",
        edited(recurrence_first),
    ),
    Mutation(
        "convolution's bias forgotten",
        "HippogriffLanguageModel",
        "weights",
        zeroed("blocks.1.hawk.conv.bias"),
        culprit="backbone.1.hawk.conv",
    ),
    of_block(
        "half of a head turned",
        kind="forward",
        plant=replaced("jax_models.ops.rotary", half_of_a_head),
        culprit="smqa",
    ),
    of_block(
        "norm with epsilon",
        kind="forward",
        plant=replaced("jax_models.layers.hippogriff.HippogriffNorm.__call__", with_epsilon),
        culprit="hawk_norm",
    ),
    of_block(
        "pieces begin without keys",
        kind="states and masks",
        plant=replaced("jax_models.ops.local_attention", without_previous_keys),
        check=CUT,
    ),
]
