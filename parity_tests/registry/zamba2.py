"""The language model of Zamba2."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp

from jax_models import Zamba2LanguageModelConfig, Zamba2State
from parity_tests.registry.case import paired
from parity_tests.registry.mamba2 import HYBRID_SIZES
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    mask_ignored,
    replaced,
    with_value,
)

zamba2 = partial(paired, layout="hf", architecture="zamba2", twin_state=False, prefix=5)
SIZES: dict[str, Any] = HYBRID_SIZES | {"num_kv_heads": 4}
del SIZES["head_features"]  # it follows from the others
config = Zamba2LanguageModelConfig(
    **SIZES,
    num_layers=4,
    block_types=("linear_attention", "hybrid", "hybrid", "hybrid"),
    num_shared_blocks=2,
    adapter_rank=3,
    attention_adapters=True,
    rope_theta=10.0,
)
CASE, OTHER = "Zamba2LanguageModel", "Zamba2LanguageModel, no adapters of attention, biases, untied"
CASES = [
    zamba2(CASE, config.build),
    zamba2(
        OTHER,
        dataclasses.replace(
            config,
            num_layers=2,
            block_types=("hybrid",),
            num_shared_blocks=1,
            num_kv_heads=2,
            attention_adapters=False,
            rope_theta=None,
            tied_head=False,
            mamba_bias=True,
            kernel_size=3,
            dt_limits=(0.6, float("inf")),
            epsilon=1e-3,
        ).build,
    ),
]


def other_transformer(model):
    """Lets the third hybrid block use the second's transformer instead of the first's."""
    model.blocks[3].transformer = model.blocks[2].transformer


def other_adapters(name: str):
    """Exchanges adapters of two blocks with the same transformer."""

    def edit(model):
        first, third = model.blocks[1], model.blocks[3]
        one, other = getattr(first, name), getattr(third, name)
        setattr(first, name, other)
        setattr(third, name, one)

    return edited(edit)


def without_embedding(streams):
    """Reads x twice instead of x and e."""

    def wrong(block, x):
        x, _ = streams(block, x)
        return x, x

    return wrong


def with_residuals(_):
    """Adds the inputs of the attention and of the MLP to their outputs, as usual."""

    def wrong(transformer, x, e, state, rows, adapters):
        n = transformer.attention_norm(jnp.concatenate([x, e], axis=-1))
        y, state = transformer.attention.sequence(n, state, rows, adapters[0])
        y = x + y
        return y + transformer.mlp(transformer.mlp_norm(y), adapters[1]), state

    return wrong


def with_added_residual(_):
    """Computes `x + t + mamba(norm(x + t))` instead of `x + mamba(norm(x + t))`."""

    def wrong(block, x, state, rows):
        x, e = block.streams(x)
        adapters = block.attention_adapter, block.mlp_adapter
        t, attention = block.transformer(x, e, state.attention, rows, adapters)
        x = x + block.linear(t)
        y, mamba = block.mamba.sequence(block.norm(x), state.mamba, rows)
        return (x + y, e), Zamba2State(mamba, attention)

    return wrong


forward = partial(Mutation, case=CASE, kind="forward")
weights = partial(Mutation, case=CASE, kind="weights")
TRANSFORMER = "model.layers.2.shared_transformer"
CLASSES = "jax_models.models.zamba2"
MUTATIONS = [
    weights("transformers not in turns", plant=edited(other_transformer)),
    weights("adapters of another block's MLP", plant=other_adapters("mlp_adapter")),
    weights("adapters of another block's attention", plant=other_adapters("attention_adapter")),
    forward(
        "scores divided by √head_features",
        plant=with_value("blocks.2.transformer.attention", "scale", None),
        culprit=f"{TRANSFORMER}.self_attn",
    ),
    forward(
        "no positions",
        plant=with_value("blocks.2.transformer.attention", "rotary_features", 0),
        culprit=f"{TRANSFORMER}.self_attn",
    ),
    forward(
        "embeddings left out",
        plant=replaced(f"{CLASSES}.Zamba2Block.streams", without_embedding),
    ),
    forward(
        "residuals in the transformer",
        plant=replaced(f"{CLASSES}.Zamba2Transformer.__call__", with_residuals),
    ),
    forward(
        "transformer added to the residual",
        plant=replaced(f"{CLASSES}.Zamba2HybridBlock.sequence", with_added_residual),
    ),
    forward(
        "epsilon of the model in a Mamba-2",
        case=OTHER,
        plant=with_value("blocks.0.mamba.norm", "epsilon", 1e-3),
        culprit="model.layers.0.mamba_decoder.mamba.norm",
    ),
    forward(
        "limits forgotten",
        case=OTHER,
        plant=with_value("blocks.0.mamba", "dt_limits", (0.0, float("inf"))),
        culprit="model.layers.0.mamba_decoder.mamba",
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="model.final_layernorm"),
    weights(
        "gate and up exchanged",
        plant=edited(exchanged("blocks.2.transformer.mlp", "gate_proj", "up_proj")),
        culprit=f"{TRANSFORMER}.feed_forward",
    ),
    *mask_ignored(CASE, "jax_models.ops.causal_conv"),
]
