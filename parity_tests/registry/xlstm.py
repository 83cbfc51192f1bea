"""The language model of xLSTM."""

from functools import partial

import torch_ref
from jax_models import XLSTMLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    exchanged,
    with_value,
)

xlstm = partial(paired, layout="hf", architecture="xlstm", twin_state=False, prefix=5)
config = XLSTMLanguageModelConfig(
    vocab_size=11,
    features=6,
    num_layers=2,
    num_heads=2,
    key_features=2,
    value_features=3,
    mlp_features=5,
    gate_soft_cap=2.0,
    logits_soft_cap=1.5,
    normalizer_epsilon=0.1,
    epsilon=1e-3,
)
CASE = "XLSTMLanguageModel"
CASES = [
    xlstm(CASE, config.build),
    xlstm(
        "XLSTMLanguageModel, fused",
        config.build,
        partial(torch_ref.XLSTMLanguageModel, config, fused=True),
        layout="fused",
    ),
]


def without_logits_cap(model):
    """Returns the logits without a soft cap."""
    model.logits_soft_cap = 0.0


forward = partial(Mutation, case=CASE, kind="forward")
MUTATIONS = [
    forward("logits without a cap", plant=edited(without_logits_cap)),
    forward(
        "gates with the default cap",
        plant=with_value("blocks.0.mixer", "gate_soft_cap", 15.0),
        culprit="backbone.blocks.0.mlstm_layer",
    ),
    forward("epsilon doubled", plant=epsilon_doubled("norm"), culprit="backbone.out_norm"),
    Mutation(
        "norms of a block exchanged",
        CASE,
        "weights",
        plant=edited(exchanged("blocks.1", "mixer_norm", "mlp_norm")),
    ),
    Mutation(
        "gate and up exchanged",
        CASE,
        "weights",
        plant=edited(exchanged("blocks.0.mlp", "gate_proj", "up_proj")),
    ),
]
