"""RWKV-4 beside transformers' RwkvForCausalLM, and its faults."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_models import generate, rwkv_from_torch, to_torch
from parity_tests import assert_parity
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

TEXT, RESCALE_EVERY = 64, 2
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 17))


@pytest.fixture
def model():
    """A random model in float64 that has not run."""
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


def copied(model):
    """Its weights as they are now: transformers changes them in place."""
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def logits_of(model, tokens, **options):
    """Of transformers' model in evaluation, with what it returns beside them."""
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens), **options)


def test_logits_and_gradients_are_those_of_transformers(model):
    model.config.rescale_every = 0
    for dtype in (jnp.float64, jnp.float32):
        weights = {k: v.to(getattr(torch, dtype.__name__)) for k, v in model.state_dict().items()}
        with jax.enable_x64(True):
            port = rwkv_from_torch(weights, param_dtype=dtype)
        assert_parity(
            model,
            port,
            TOKENS,
            weights="hf",
            call=lambda port, tokens: port(tokens)[0],
            call_twin=lambda model, tokens: model(tokens, use_cache=False).logits,
            dtypes=[dtype.__name__],
        )


def test_the_greedy_text_is_that_of_transformers(model):
    """One row: of several its state is wrong, as below."""
    weights = copied(model)
    text = model.eval().generate(
        torch.tensor(TOKENS[:1]), max_new_tokens=TEXT, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[:, TOKENS.shape[1] :]  # fmt: skip
    with jax.enable_x64(True):
        port = rwkv_from_torch(weights, param_dtype=jnp.float64)
        own = generate(port, TOKENS[:1], TEXT, key=jax.random.key(0), temperature=0)
    assert len({*text[0].tolist()}) > 5
    np.testing.assert_array_equal(own, text.numpy())


def test_what_is_exported_loads_in_transformers(model):
    with jax.enable_x64(True):
        port = rwkv_from_torch(model.state_dict(), param_dtype=jnp.float64)
        weights = {key: torch.from_numpy(a) for key, a in to_torch(port, "hf").items()}
    again = type(model)(model.config).double()
    again.load_state_dict(weights, strict=True)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_weights_that_were_saved_after_a_run_are_multiplied_back(model):
    before = copied(model)
    logits_of(model, TOKENS)
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) == 2 * (model.config.num_hidden_layers - RESCALE_EVERY)
    with jax.enable_x64(True):
        port = rwkv_from_torch(after, param_dtype=jnp.float64, rescaled_every=RESCALE_EVERY)
        for key, array in to_torch(port, "hf").items():
            np.testing.assert_array_equal(array, before[key].numpy(), err_msg=key)


def test_transformers_saves_other_weights_after_a_run(model):
    """It divides those that it reads once more: logits are off by a hundredth of the largest."""
    first = logits_of(model, TOKENS).logits
    again = type(model)(model.config).double()
    again.load_state_dict(copied(model))
    second = logits_of(again, TOKENS).logits
    assert (first - second).abs().max() > 0.01 * first.abs().max()


def test_transformers_goes_on_wrongly_from_a_state_of_several_rows(model):
    """A broadcast mixes the rows' last inputs; ours does not."""
    with jax.enable_x64(True):
        port = rwkv_from_torch(copied(model), param_dtype=jnp.float64)
        logits, state = port(TOKENS[:, :8])
        own = np.concatenate([logits, port(TOKENS[:, 8:], state)[0]], axis=1)
        assert_same(own, port(TOKENS)[0], "in two pieces")
    whole = logits_of(model, TOKENS).logits
    head = logits_of(model, TOKENS[:, :8], use_cache=True)
    step = logits_of(model, TOKENS[:, 8:9], state=head.state).logits
    assert (step[:, 0] - whole[:, 8]).abs().max() > 0.01 * whole.abs().max()
