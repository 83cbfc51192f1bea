"""The config of a language model is read from the shapes of its weights, or an error names them."""

import numpy as np
import pytest
from flax import nnx

from jax_models import (
    GriffinLanguageModelConfig,
    HippogriffLanguageModelConfig,
    from_torch,
    to_torch,
)
from jax_models.models.architecture import architectures
from jax_models.models.language_model import LanguageModelConfig
from jax_models.models.silero_vad import SileroVADConfig
from parity_tests.registry import CASES

MODELS = {f"{name}, {case.layout}": case for name, case in CASES.items() if case.config is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_config_of_a_models_weights_builds_a_model_that_they_fit(name):
    case = MODELS[name]
    model = case.layer(rngs=nnx.Rngs(0))
    # No shape determines the number of heads of The Annotated Hyena's attention.
    heads = {"num_heads": model.config.num_heads} if name.startswith("GPModel") else {}
    config = type(model.config).from_state_dict(to_torch(model, case.layout), **heads)
    assert config.vocab_size == model.config.vocab_size
    built = config.build(rngs=nnx.Rngs(1))
    from_torch(built, to_torch(model, case.layout), case.layout)
    assert to_torch(built, case.layout).keys() == to_torch(model, case.layout).keys()


def test_every_language_model_is_read():
    assert {type(case.config) for case in MODELS.values()} == {*architectures(LanguageModelConfig)}


def test_a_wrong_option_or_an_empty_weight_is_named():
    model = HippogriffLanguageModelConfig(features=8, num_heads=2).build(rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^num_kv_heads: expected a positive integer, got 0$"):
        HippogriffLanguageModelConfig.from_state_dict(to_torch(model), num_kv_heads=0)
    sizes = {"features": 16, "recurrent_features": 8, "mlp_features": 12}
    weights = to_torch(GriffinLanguageModelConfig(**sizes).build(rngs=nnx.Rngs(0)))
    weights["model.embed_tokens.weight"] = np.zeros((256, 0))
    with pytest.raises(ValueError, match=r"^state_dict: model.embed_tokens.weight: .*none empty"):
        GriffinLanguageModelConfig.from_state_dict(weights)


@pytest.mark.parametrize(
    "weights", [{}, {"a": np.zeros(3)}, {"stft": 3}, {"stft": np.zeros(())}, {3: np.zeros(256)}]
)
def test_weights_without_an_stft_are_no_silero_vads(weights):
    with pytest.raises(
        ValueError, match=r"^state_dict: expected an stft .*, got (no keys|a|stft|3)$"
    ):
        SileroVADConfig.from_state_dict(weights)
    with pytest.raises(TypeError, match=r"^state_dict: expected a mapping"):
        SileroVADConfig.from_state_dict([*weights])
