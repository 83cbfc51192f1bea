"""Random configurations, shapes and lengths of torch.nn.RNN, LSTM and GRU, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_models import GRU, LSTM, RNN, from_torch
from parity_tests.engine.bounds.tolerance import assert_same

pytestmark = pytest.mark.usefixtures("x64")

FAMILIES = {"RNN": (torch.nn.RNN, RNN), "LSTM": (torch.nn.LSTM, LSTM), "GRU": (torch.nn.GRU, GRU)}


@st.composite
def configurations(draw):
    """Constructor arguments of both sides, batch, time, lengths, and whether a state is given."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    hidden = draw(st.integers(2, 6))
    stack = {"num_layers": draw(st.integers(1, 3)), "bidirectional": draw(st.booleans())}
    bias = draw(st.booleans())
    twin_options, options = {"bias": bias}, {"use_bias": bias}
    if family == "RNN":
        twin_options["nonlinearity"] = options["nonlinearity"] = draw(
            st.sampled_from(["tanh", "relu"])
        )
    if family == "LSTM" and draw(st.booleans()):
        twin_options["proj_size"] = options["proj_features"] = draw(st.integers(1, hidden - 1))
    batch, time = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    lengths = draw(
        st.none() | st.lists(st.integers(1, time), min_size=batch, max_size=batch).map(np.array)
    )
    return {
        "family": family,
        "sizes": (draw(st.integers(1, 5)), hidden),
        "twin_options": {**stack, **twin_options},
        "options": {**stack, **options},
        "shape": (batch, time),
        "lengths": lengths,
        "given_state": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@pytest.mark.slow
@given(configurations())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_equals_torch_nn(configuration):
    c = configuration
    twin_class, layer_class = FAMILIES[c["family"]]
    torch.manual_seed(c["seed"])
    twin = twin_class(*c["sizes"], batch_first=True, **c["twin_options"]).double()
    layer = layer_class(
        *c["sizes"], **c["options"], dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    from_torch(layer, twin.state_dict())
    rng = np.random.default_rng(c["seed"])
    batch, time = c["shape"]
    x = rng.standard_normal((batch, time, c["sizes"][0]))
    state = torch_state = None
    if c["given_state"]:
        state = jax.tree.map(lambda s: rng.standard_normal(s.shape), layer.init_state(batch))
        tensors = [torch.tensor(s) for s in state]
        torch_state = tuple(tensors) if c["family"] == "LSTM" else tensors[0]
    inputs = torch.tensor(x)
    if c["lengths"] is not None:
        inputs = torch.nn.utils.rnn.pack_padded_sequence(
            inputs, torch.tensor(c["lengths"]), batch_first=True, enforce_sorted=False
        )
    with torch.no_grad():
        expected, last = twin(inputs, torch_state)
    if c["lengths"] is not None:
        expected, _ = torch.nn.utils.rnn.pad_packed_sequence(
            expected, batch_first=True, total_length=time
        )
    y, state = jax.jit(partial(layer, lengths=c["lengths"]))(x, state)
    assert_same(y, expected.numpy(), "outputs")
    for ours, theirs in zip(state, last if c["family"] == "LSTM" else [last], strict=True):
        assert_same(ours, theirs.numpy(), "final state")


def test_unbatched_sequence_equals_torch_nn():
    twin = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True).double()
    layer = LSTM(3, 4, num_layers=2, bidirectional=True, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    from_torch(layer, twin.state_dict())
    x = np.random.default_rng(0).standard_normal((6, 3))
    with torch.no_grad():
        expected, (h, c) = twin(torch.tensor(x))
    y, state = layer(x)
    assert_same(y, expected.numpy(), "outputs")
    assert_same(state.h, h.numpy(), "h")
    assert_same(state.c, c.numpy(), "c")
