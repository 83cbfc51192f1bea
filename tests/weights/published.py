"""The language models of the registry, for the tests that load weights."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import to_torch
from jax_models.models.architecture import Checkpoint
from jax_models.weights.layouts import params_of
from parity_tests.registry import CASES

MODELS = {name: case.config for name, case in CASES.items() if case.config is not None}
RWKV, RWKV7, GRIFFIN, HIPPOGRIFF, HYENA_DNA = (
    MODELS[f"{name}LanguageModel"]
    for name in ("RWKV", "RWKV7", "Griffin", "Hippogriff", "HyenaDNA")
)
FAMILIES = {type(config): name for name, config in reversed(MODELS.items())}.values()
"""The first model of each config's class."""
HIPPOGRIFF_3 = MODELS["HippogriffLanguageModel, 0.0.3, no attention"]


def build(config, **options):
    return config.build(**options, rngs=nnx.Rngs(0))


def abstract(config):
    """A model whose parameters have shapes but no values yet."""
    return nnx.eval_shape(lambda: build(config))


@functools.cache
def initial(config):
    """A model with random weights in [0, 1), which tests share and must not change.

    XLA would compile each initializer for each shape.
    """
    model, rng = abstract(config), np.random.default_rng(0)
    for param in params_of(model).values():
        like = param.get_value()
        param.set_value(jnp.asarray(rng.random(like.shape).astype(like.dtype)))
    return model


def weights_of(config, layout=None):
    """The random weights of a model, which is built once for all tests."""
    return to_torch(initial(config), layout)


def fields_of_shapes(config):
    """The fields of a config that are read from shapes, and those that the user may pass."""

    class Recorded(Checkpoint):
        def given(self, name, default=...):
            given.add(name)
            return super().given(name, default)

    given, layout = set(), next(iter(initial(config).torch_layouts()))
    checkpoint = Recorded(weights_of(config, layout), config.layouts[layout], vars(config))
    return checkpoint.fields().keys() - given, given


def fields_without_shape(config):
    """The fields of a config that no weight's shape determines."""
    read, _ = fields_of_shapes(config)
    return {name: value for name, value in vars(config).items() if name not in read}


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for key, array in expected.items():
        assert actual[key].tobytes() == array.tobytes(), key
