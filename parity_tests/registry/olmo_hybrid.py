"""The language model of OLMo Hybrid."""

import dataclasses
from functools import partial

from jax_models import OLMoHybridLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, exchanged, submodule_at, zeroed

olmo = partial(paired, layout="hf", architecture="olmo_hybrid", twin_state=False, prefix=5)
config = OLMoHybridLanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=2,
    mlp_features=7,
    block_types=("linear_attention", "full_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_features=2,
    rope_theta=10.0,
    tied_head=False,
    num_key_heads=2,
    num_value_heads=4,
    key_features=3,
    value_features=5,
    max_length=40,
)
CASES = [
    olmo("OLMoHybridLanguageModel", config.build),
    olmo(
        "OLMoHybridLanguageModel, no rotation, biases",
        dataclasses.replace(
            config,
            rope_theta=None,
            attention_bias=True,
            tied_head=True,
            negative_eigenvalues=False,
        ).build,
    ),
]


def pre_normed(layer):
    """Norms the inputs of attention and of its MLP, instead of their outputs."""
    submodule_at(layer, "blocks.1").norms_outputs = False


weights = partial(Mutation, case="OLMoHybridLanguageModel", kind="weights")
MUTATIONS = [
    weights(
        "gate and up exchanged",
        plant=edited(exchanged("blocks.1.mlp", "gate_proj", "up_proj")),
        culprit="model.layers.1.mlp",
    ),
    weights(
        "norms of a block exchanged",
        plant=edited(exchanged("blocks.1", "mixer_norm", "mlp_norm")),
    ),
    weights(
        "a bias forgotten",
        case="OLMoHybridLanguageModel, no rotation, biases",
        plant=zeroed("blocks.1.mixer.out_proj.bias"),
        culprit="model.layers.1.self_attn.o_proj",
    ),
    Mutation(
        "attention pre-normed",
        "OLMoHybridLanguageModel",
        "forward",
        plant=edited(pre_normed),
    ),
]
