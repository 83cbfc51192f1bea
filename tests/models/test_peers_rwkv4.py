"""Compares RWKV-4 with transformers' RwkvForCausalLM."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peers import assert_same_logits_and_gradients, call_transformers, logits_of

from jax_models import from_weights, to_torch, undo_rescale
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

RESCALE_EVERY = 2
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 17))


@pytest.fixture
def model():
    """A random model in float64 that has not been called yet."""
    transformers = pytest.importorskip("transformers")
    config = transformers.RwkvConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=5, intermediate_size=40,
        rescale_every=RESCALE_EVERY,
    )  # fmt: skip
    model = transformers.RwkvForCausalLM(config).double()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
        scale *= 4 if name.endswith(("output.weight", "value.weight")) else 1
        mean = 1 if re.search(r"ln.*weight", name) else 0
        draw = in_every_dtype(mean + scale * rng.standard_normal(parameter.shape))
        parameter.data = torch.from_numpy(draw)
    return model


def test_logits_and_gradients_are_those_of_transformers(model):
    model.config.rescale_every = 0
    assert_same_logits_and_gradients(model, from_weights, TOKENS, "hf", call_transformers)


def test_weights_that_were_saved_after_a_run_are_multiplied_back(model):
    """Transformers changes the weights in place when it runs in evaluation mode."""
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    logits_of(model.eval(), TOKENS)
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) == 2 * (model.config.num_hidden_layers - RESCALE_EVERY)
    with jax.enable_x64(True):
        port = from_weights(undo_rescale(after, RESCALE_EVERY), param_dtype=jnp.float64)
        for key, array in to_torch(port, "hf").items():
            np.testing.assert_array_equal(array, before[key].numpy(), err_msg=key)
