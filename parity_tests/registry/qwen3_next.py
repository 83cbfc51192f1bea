"""The language model of Qwen3-Next."""

from functools import partial

from jax_models import Qwen3NextLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.experts import without_gate
from parity_tests.registry.gated_delta_net import contiguous
from parity_tests.registry.mutation import Mutation, edited, exchanged, replaced, with_value

CASE = "Qwen3NextLanguageModel"
CASES = [
    paired(
        CASE,
        Qwen3NextLanguageModelConfig(
            vocab_size=12,
            features=8,
            num_layers=2,
            mlp_features=7,
            block_types=("linear_attention", "full_attention"),
            head_features=4,
            rope_theta=10.0,
            num_key_heads=2,
            num_value_heads=4,
            key_features=4,
            value_features=3,
            num_experts=4,
            experts_per_token=3,
            expert_features=5,
            shared_features=4,
            dense_layers=(1,),
            max_length=40,
        ).build,
        layout="hf",
        architecture="qwen3_next",
        twin_state=False,
        prefix=5,
    )
]
forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    Mutation(
        "q, k, v and z of all heads side by side",
        CASE,
        "weights",
        replaced("jax_models.models.qwen3_5.side_by_side", contiguous),
    ),
    Mutation(
        "gate and up of the experts exchanged",
        CASE,
        "weights",
        edited(exchanged("blocks.0.mlp", "gate_kernel", "up_kernel")),
        culprit="model.layers.0.mlp.experts",
    ),
    forward(
        "experts' weights not normalized",
        plant=with_value("blocks.0.mlp", "normalize", False),
        culprit="model.layers.0.mlp",
    ),
    forward(
        "shared gate forgotten",
        plant=replaced("jax_models.layers.experts.Experts.shared_output", without_gate),
    ),
]
