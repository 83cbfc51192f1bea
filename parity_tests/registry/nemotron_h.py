"""The language model of Nemotron-H."""

import dataclasses
from functools import partial

from jax_models import NemotronHLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.experts import biased_weights, without_output
from parity_tests.registry.mamba2 import HYBRID_SIZES
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    with_value,
)

nemotron_h = partial(paired, layout="hf", architecture="nemotron_h", twin_state=False, prefix=5)
config = NemotronHLanguageModelConfig(
    **HYBRID_SIZES,
    num_layers=4,
    block_types=("linear_attention", "moe", "full_attention", "mlp"),
    dt_limits=(0.6, 0.9),
    num_experts=6,
    experts_per_token=2,
    expert_features=5,
    shared_features=9,
    latent_features=4,
    experts_scale=2.5,
    num_expert_groups=3,
    expert_groups_per_token=2,
    mlp_bias=True,
)
CASE, PLAIN = "NemotronHLanguageModel", "NemotronHLanguageModel, no latent features, biases"
CASES = [
    nemotron_h(CASE, config.build),
    nemotron_h(
        PLAIN,
        dataclasses.replace(
            config,
            latent_features=None,
            normalize_experts=False,
            num_expert_groups=1,
            expert_groups_per_token=1,
            mlp_bias=False,
            mamba_bias=True,
            conv_bias=False,
            kernel_size=3,
        ).build,
    ),
]


def factor_after_projection(model):
    """Applies the factor after the output projection, and so to its bias, too."""
    experts = model.blocks[1].mixer
    experts.latent_out.scale, experts.scale = experts.scale, 1.0


forward = partial(Mutation, case=CASE, kind="forward")
mamba, experts, attention, mlp = (f"model.layers.{i}.mixer" for i in range(4))
MUTATIONS = [
    forward(
        "norm over all groups",
        plant=with_value("blocks.0.mixer.norm", "num_groups", 1),
        culprit=f"{mamba}.norm",
    ),
    forward(
        "limits forgotten",
        plant=with_value("blocks.0.mixer", "dt_limits", (0.0, float("inf"))),
        culprit=mamba,
    ),
    forward(
        "bias in the weights",
        plant=replaced("jax_models.layers.experts.Experts.weigh", biased_weights),
    ),
    forward("groups ignored", plant=with_value("blocks.1.mixer", "num_groups", 1)),
    forward("factor after the latent features", plant=edited(factor_after_projection)),
    forward("weights without their factor", plant=with_value("blocks.1.mixer", "scale", 1.0)),
    forward(
        "shared expert forgotten",
        plant=replaced("jax_models.layers.experts.Experts.shared_output", without_output),
    ),
    forward("experts with relu", plant=with_value("blocks.1.mixer", "activation", "relu")),
    forward(
        "positions in the attention",
        plant=with_value("blocks.2.mixer", "rotary_features", 6),
        culprit=attention,
    ),
    forward(
        "relu instead of its square",
        plant=with_value("blocks.3.mixer", "activation", "relu"),
        culprit=mlp,
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="model.norm_f"),
    *mask_ignored(CASE, "jax_models.ops.causal_conv"),
]
