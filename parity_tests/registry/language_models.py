"""A language model of every kind."""

from functools import partial

import torch_ref
from jax_models import (
    GPModelConfig,
    HawkLanguageModelConfig,
    LanguageModelConfig,
    RNNLanguageModelConfig,
    RWKVLanguageModelConfig,
)
from parity_tests.registry.case import Case


def call_language_model(twin, tokens, state, lengths=None):
    """RNNLanguageModel: tokens to logits. The twin neither takes nor returns a state."""
    return twin(tokens)[0], ()


def language_model_case(
    config: LanguageModelConfig, name: str, layout: str, prefix: int = 0
) -> Case:
    """A language model of this config and the twin that the config describes."""
    twin = getattr(torch_ref, type(config).__name__.removesuffix("Config"))
    return Case(
        name,
        partial(twin.from_config, config),
        config.build,
        layout=layout,
        call=call_language_model,
        prefix=prefix,
    )


def language_model_cases() -> list[Case]:
    """A model of every kind."""
    rnn = partial(RNNLanguageModelConfig, vocab_size=11)
    return [
        language_model_case(RNNLanguageModelConfig(), "RNNLanguageModel", "scratch"),
        language_model_case(
            rnn(context_length=None, cell="lstm", num_layers=2),
            "RNNLanguageModel of LSTM",
            "torch.nn",
        ),
        language_model_case(
            rnn(context_length=9, cell="gru"), "RNNLanguageModel of GRU", "torch.nn"
        ),
        language_model_case(
            HawkLanguageModelConfig(vocab_size=11, features=6, num_layers=2, mlp_features=8),
            "HawkLanguageModel",
            "hawk",
        ),
        language_model_case(
            RWKVLanguageModelConfig(vocab_size=11, features=6, num_layers=2, hidden_features=8),
            "RWKVLanguageModel",
            "blinkdl",
        ),
        *(
            language_model_case(
                GPModelConfig(
                    vocab_size=11,
                    context_length=13,
                    features=6,
                    num_layers=2,
                    block=block,
                    embed_features=5,
                    mlp_features=6,
                    num_filter_layers=2,
                    num_heads=2,
                ),
                f"GPModel of {block}",
                "annotated-hyena",
                prefix=5,
            )
            for block in ("hyena", "attention")
        ),
    ]
