"""The language models of the registry, for the tests that load weights."""

import functools
from collections.abc import Callable

from flax import nnx

from jax_models import GPModelConfig, to_torch
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
    """A new model, which tests share and must not change."""
    return build(config)


def weights_of(config, layout=None):
    """The initial weights of a model, which is built once for all tests."""
    return to_torch(initial(config), layout)


def fields_without_shape(config):
    """The fields of a config that no weight's shape determines."""
    layout = next(iter(config.layouts.values()))
    told = {name for name, size in layout.sizes.items() if isinstance(size, tuple | Callable)}
    told |= {"vocab_size", "features", "num_layers"}
    told -= {"implicit", "num_heads"} if isinstance(config, GPModelConfig) else set()
    told -= {"experts_per_token"}  # undetermined if the model has experts
    return {name: value for name, value in vars(config).items() if name not in told}


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for key, array in expected.items():
        assert actual[key].tobytes() == array.tobytes(), key
