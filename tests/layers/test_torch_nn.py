"""Unusual options, lengths and dropout of torch.nn.RNN, LSTM and GRU, and torch's norms."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_models import GRU, LSTM, RNN, GroupNorm, LayerNorm, RMSNorm, from_torch
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.registry import BATCH, Case
from parity_tests.registry.torch_nn import run_packed

FAMILIES = {"RNN": (nn.RNN, RNN), "LSTM": (nn.LSTM, LSTM), "GRU": (nn.GRU, GRU)}
STACK = {"num_layers": 3, "bidirectional": True}
"""Sizes and options that no case of the registry has, in addition to having no biases."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "of_twin", "of_layer"),
    [
        ("RNN", {"nonlinearity": "relu"}, {"nonlinearity": "relu"}),
        ("LSTM", {"proj_size": 1}, {"proj_features": 1}),
        ("GRU", {}, {}),
    ],
)
@pytest.mark.parametrize("lengths", [None, np.arange(BATCH) + 1])
def test_three_layers_both_ways_without_biases_equal_torch_nn(
    family, of_twin, of_layer, lengths, x64
):
    twin, layer = FAMILIES[family]
    case = Case(
        "",
        partial(twin, 1, 2, batch_first=True, bias=False, **STACK, **of_twin),
        partial(layer, 1, 2, use_bias=False, **STACK, **of_layer),
        layout="torch.nn",
        architecture="",
        call=run_packed,
    )
    problem = case.problem(given_state=lengths is None, lengths=lengths)
    report = measure_twin(problem, ("float64",))
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_where_torch_has_it(family, x64):
    """With a rate of 1, and one so near to 1 that no element is kept, nothing is random."""
    twin, layer = FAMILIES[family]
    twin = twin(5, 6, 3, bidirectional=True, batch_first=True, dropout=1.0).double()
    stack = {"num_layers": 3, "bidirectional": True, "dropout_rate": 1 - 1e-12}
    layer = layer(5, 6, **stack, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 7, 5))
    y, _ = from_torch(layer, twin.state_dict())(x)
    assert_same(y, twin(torch.from_numpy(x))[0].detach().numpy(), "outputs")


@pytest.mark.parametrize(
    ("twin", "norm"),
    [
        (nn.LayerNorm(12), LayerNorm),
        (nn.RMSNorm(12, eps=0.03), partial(RMSNorm, epsilon=0.03)),
        (nn.GroupNorm(3, 12, eps=0.03), partial(GroupNorm, num_groups=3, epsilon=0.03)),
        (nn.GroupNorm(1, 12), partial(GroupNorm, num_groups=1)),
    ],
)
def test_norms_are_torchs(twin, norm, x64):
    rng = np.random.default_rng(0)
    weights = {key: rng.standard_normal(12) for key in twin.state_dict()}
    twin.double().load_state_dict({key: torch.from_numpy(w) for key, w in weights.items()})
    ours = norm(12, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    ours.scale[...] = weights["weight"]
    if "bias" in weights:
        ours.bias[...] = weights["bias"]
    x = 0.1 * rng.standard_normal((5, 12))
    assert_same(ours(x), twin(torch.from_numpy(x)).detach().numpy(), "outputs")


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_norm_without_a_scale_is_one_whose_scale_is_1(num_groups):
    options = {"num_groups": num_groups, "epsilon": 0.03, "rngs": nnx.Rngs(0)}
    x = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    np.testing.assert_array_equal(
        RMSNorm(12, use_scale=False, **options)(x), RMSNorm(12, **options)(x)
    )


@pytest.mark.parametrize("shape", [(5, 12), (12,)])
def test_a_mask_selects_what_counts_in_the_mean_of_each_group(shape, x64):
    """The norm of a group divides all of its elements by the root mean square of the selected."""
    rng = np.random.default_rng(0)
    norm = RMSNorm(12, num_groups=3, epsilon=0.03, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    scale, x, mask = rng.standard_normal(12), rng.standard_normal((5, 12)), rng.random(shape) < 0.5
    mask[..., ::4] = True  # a mean needs at least one element
    norm.scale[...] = scale
    groups = x.reshape(5, 3, 4)
    counted = np.broadcast_to(mask, x.shape).reshape(groups.shape)
    square = np.where(counted, groups**2, 0).sum(-1) / counted.sum(-1)
    expected = (groups / np.sqrt(square + 0.03)[..., None]).reshape(x.shape) * scale
    assert_same(norm(x, mask), expected, "outputs")
