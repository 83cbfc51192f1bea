"""The language model of Bamba."""

import dataclasses
from functools import partial
from typing import Any

from jax_models import BambaLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mamba2 import HYBRID_SIZES
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    mask_ignored,
    with_value,
)

bamba = partial(paired, layout="hf", architecture="bamba", twin_state=False, prefix=5)
SIZES: dict[str, Any] = HYBRID_SIZES | {"head_features": 4}
config = BambaLanguageModelConfig(
    **SIZES,
    num_layers=2,
    block_types=("linear_attention", "full_attention"),
    rope_theta=10.0,
)
CASE, BIASES = "BambaLanguageModel", "BambaLanguageModel, biases, untied, odd rotation"
CASES = [
    bamba(CASE, config.build),
    bamba(
        BIASES,
        dataclasses.replace(
            config,
            head_features=6,  # 3 of them are rotated, as 4 are
            tied_head=False,
            attention_bias=True,
            mlp_bias=True,
            mamba_bias=True,
            kernel_size=3,
            dt_limits=(0.6, 0.9),
        ).build,
    ),
]
attention = partial(Mutation, case=CASE, kind="forward", culprit="model.layers.1.self_attn")
MUTATIONS = [
    attention("whole heads rotated", plant=with_value("blocks.1.mixer", "rotary_features", 4)),
    attention("no positions", plant=with_value("blocks.1.mixer", "rotary_features", 0)),
    Mutation(
        "norm over all groups",
        CASE,
        "forward",
        plant=with_value("blocks.0.mixer.norm", "num_groups", 1),
        culprit="model.layers.0.mamba.norm",
    ),
    Mutation(
        "epsilon doubled",
        CASE,
        "forward",
        plant=epsilon_doubled("norm"),
        culprit="model.final_layernorm",
    ),
    Mutation(
        "gate and up exchanged",
        BIASES,
        "weights",
        plant=edited(exchanged("blocks.1.mlp", "gate_proj", "up_proj")),
        culprit="model.layers.1.feed_forward",
    ),
    *mask_ignored(CASE, "jax_models.ops.causal_conv"),
]
