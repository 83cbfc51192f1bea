"""Compares StripedHyena's block with the package `stripedhyena`, which runs on torch alone."""

from functools import partialmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import StripedHyenaBlock, from_torch, to_torch
from parity_tests import assert_parity
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

FEATURES, MLP = 24, 40
SIZES: dict[str, Any] = {"num_heads": 4, "state_size": 6, "epsilon": 1e-3}
CONFIG = {
    "hidden_size": FEATURES,
    "num_filters": FEATURES,
    "num_attention_heads": SIZES["num_heads"],
    "state_size": SIZES["state_size"],
    "inner_mlp_size": MLP,
    "eps": SIZES["epsilon"],
    "model_parallel_size": 1,
    "hyena_filter_groups": 1,
    "short_filter_length": 3,
    "short_filter_bias": True,
    "params_dtype": torch.float32,
    "mlp_dtype": torch.float32,
}
OPTIONS = {
    "": ({}, {}),
    "in thirds": ({"column_split_hyena": False}, {"num_heads": 1}),
    "with gelu and 5 taps": (
        {"mlp_activation": "gelu", "short_filter_length": 5},
        {"activation": "gelu", "kernel_size": 5},
    ),
}
TIME = 50
X = np.random.default_rng(0).standard_normal((2, TIME, FEATURES))


class InFloat64:
    """Makes the package's casts to float32 casts to float64."""

    float32, complex64 = torch.float64, torch.complex128

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(scope="module")
def package():
    """The package, computing in float64 where it would compute in float32."""
    model = pytest.importorskip("stripedhyena.model")
    engine = pytest.importorskip("stripedhyena.engine")
    prefill = engine.HyenaInferenceEngine.prefill_via_modal_fft
    with pytest.MonkeyPatch.context() as patch:
        for module in (model, engine):
            patch.setattr(module, "torch", InFloat64())
        patch.setattr(
            engine.HyenaInferenceEngine,
            "prefill_via_modal_fft",
            partialmethod(prefill, state_dtype=torch.complex128),
        )
        yield model


def built(package: Any, **config: Any) -> Any:
    """The package's block, built as its users do, with random weights in float64."""
    config = pytest.importorskip("stripedhyena.utils").dotdict(CONFIG | config)
    block = package.ParallelGatedConvBlock(config, layer_idx=0).double()
    rng = np.random.default_rng(1)
    for name, parameter in block.named_parameters():
        draw = rng.standard_normal(tuple(parameter.shape))
        if name.endswith("poles"):
            draw *= rng.uniform(0.3, 0.98, (*draw.shape[:-1], 1)) / np.linalg.norm(
                draw, axis=-1, keepdims=True
            )
        elif parameter.ndim == 2:
            draw *= parameter.shape[1] ** -0.5
        parameter.data = torch.from_numpy(in_every_dtype(draw))
    return block


def port(block: Any, **options: Any) -> StripedHyenaBlock:
    with jax.enable_x64(True):
        layer = StripedHyenaBlock(
            FEATURES, MLP, **SIZES | options, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
        )
        return from_torch(layer, block.state_dict())


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_are_those_of_the_package(package, name):
    config, options = OPTIONS[name]
    block = built(package, **config)
    layer = port(block, **options)
    jax.tree.map(np.testing.assert_array_equal, to_torch(layer), dict(block.state_dict()))
    assert_parity(
        block,
        layer,
        X,
        weights="stripedhyena",
        call=lambda layer, x: layer(x)[0],
        call_twin=lambda block, x: block(x)[0],
        dtypes=["float64"],
    )


def test_a_prompt_and_steps_are_those_of_the_package(package):
    block = built(package)
    cache = pytest.importorskip("stripedhyena.cache").RecurrentInferenceParams()
    pieces = torch.from_numpy(X).split([41, *[1] * 9], dim=1)
    with torch.no_grad():
        expected = torch.cat([block(x, inference_params=cache)[0] for x in pieces], dim=1).numpy()
    layer = port(block)
    with jax.enable_x64(True):
        assert_same(layer(X)[0], expected, "the whole sequence")
        y, state = jax.jit(layer.__call__)(X[:, :41])
        step, outputs = jax.jit(layer.step), [y]
        for t in range(41, TIME):
            y_t, state = step(X[:, t], state)
            outputs.append(y_t[:, None])
    assert_same(np.concatenate(outputs, axis=1), expected, "the prompt, then steps")
