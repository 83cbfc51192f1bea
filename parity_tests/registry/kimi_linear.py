"""The language model of Kimi Linear."""

from functools import partial

from jax_models import KimiLinearLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.experts import biased_weights, without_output
from parity_tests.registry.mutation import Mutation, edited, exchanged, replaced, with_value

CASE = "KimiLinearLanguageModel"
CASES = [
    paired(
        CASE,
        KimiLinearLanguageModelConfig(
            vocab_size=12,
            features=8,
            num_layers=2,
            mlp_features=7,
            block_types=("linear_attention", "full_attention"),
            num_heads=3,
            latent_features=5,
            key_features=4,
            shared_features=6,
            value_features=3,
            delta_heads=2,
            delta_head_features=4,
            num_experts=6,
            experts_per_token=2,
            expert_features=5,
            num_shared_experts=2,
            num_expert_groups=3,
            expert_groups_per_token=2,
            max_length=40,
        ).build,
        layout="hf",
        architecture="kimi_linear",
        twin_state=False,
        prefix=5,
    )
]
forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    Mutation(
        "gate and up of the experts exchanged",
        CASE,
        "weights",
        edited(exchanged("blocks.1.mlp", "gate_kernel", "up_kernel")),
        culprit="model.layers.1.mlp.experts",
    ),
    forward(
        "bias in the weights",
        plant=replaced("jax_models.layers.experts.Experts.weigh", biased_weights),
    ),
    forward("groups ignored", plant=with_value("blocks.1.mlp", "num_groups", 1)),
    forward("weights without their factor", plant=with_value("blocks.1.mlp", "scale", 1.0)),
    forward(
        "shared expert forgotten",
        plant=replaced("jax_models.layers.experts.Experts.shared_output", without_output),
    ),
    forward(
        "epsilon of the latents that of the model",
        plant=with_value("blocks.1.mixer.latent_norm", "epsilon", 1e-5),
        culprit="model.layers.1.self_attn.kv_a_layernorm",
    ),
]
