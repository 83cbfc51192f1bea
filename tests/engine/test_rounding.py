"""Random rounding in torch changes results that are rounded, and no others."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_pairs import logistic, reordered_logistic

from parity_tests import compare
from parity_tests.engine.bounds.tolerance import OPERATION_ULPS, ulp
from parity_tests.engine.bounds.torch_rounding import RandomRounding


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_each_operation_is_off_by_its_ulps(dtype):
    x = torch.linspace(1, 2, 1001, dtype=torch.float64)
    with RandomRounding(dtype, seed=0):
        y = x.exp()
    error = (y / x.exp() - 1).abs().max().item() / ulp(dtype)
    assert 0.9 * OPERATION_ULPS < error < OPERATION_ULPS + 1
    if dtype != "float64":
        assert torch.equal(y, y.to(getattr(torch, dtype)).double())


def test_what_is_exact_stays():
    x = torch.arange(12, dtype=torch.float64, requires_grad=True)
    with RandomRounding("bfloat16", seed=0):
        y = torch.cat([x.view(3, 4) + 1, x.view(3, 4)]).t().clone()
        y.backward(2 * torch.ones_like(y))
    assert torch.equal(y, torch.cat([x.view(3, 4) + 1, x.view(3, 4)]).t())
    assert torch.equal(x.grad, 4 * torch.ones_like(x))


def test_writes_in_place_and_gradients_are_rounded():
    x = torch.full((5,), 0.3, dtype=torch.float64, requires_grad=True)
    with RandomRounding("bfloat16", seed=0):
        y = torch.zeros(5, dtype=torch.float64)
        y.add_(x)
        (x * x * x).sum().backward()
    assert torch.equal(y, y.bfloat16().double())
    assert torch.equal(x.grad, x.grad.bfloat16().double())


def compared(port, function, **options):
    """Compares a port of a function with it on numbers between 0 and 1."""
    x = np.random.default_rng(0).uniform(0.1, 0.9, (7,))
    call_twin = lambda twin, x: function(twin(x))  # noqa: E731
    return compare(torch.nn.Identity(), port, x, call_twin=call_twin, **options)


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-9])
def test_an_ill_conditioned_pair_agrees_as_far_as_it_is_determined(factor):
    report = compared(partial(reordered_logistic, factor=factor), logistic)
    assert report.passed == (factor == 1), str(report)
    assert report.errors["float32"]["outputs"].jax < 1e-3
    assert factor == 1 or report.errors["float64"]["outputs"].share > 100


@pytest.mark.parametrize("factor", [0, 1])
def test_nothing_is_shown_where_nothing_is_determined(factor):
    port = lambda x: factor * reordered_logistic(x, steps=100)  # noqa: E731
    report = compared(port, partial(logistic, steps=100))
    errors = [groups["outputs"] for groups in report.errors.values()]
    assert [e.verdict for e in errors] == ["undetermined", "undetermined"]
    assert all(e.unstable for e in errors)
    assert "unstable reference" in str(report)
    assert not report.passed


class Buckets(torch.nn.Module):
    """An embedding of logarithmic buckets of distances, as in T5, and a mask."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 5).double())

    def forward(self, x):
        buckets = (torch.log1p(torch.arange(72.0)) / math.log(128) * 31).long()
        mask = torch.arange(72) < 60
        scores = (self.weight[buckets] * x) + (1 - mask.to(x.dtype))[:, None] * -1e9
        return torch.softmax(scores, 0)


def bucketed(weight, x, scale=1.0):
    buckets = jnp.astype(jnp.log1p(jnp.arange(72.0, dtype=x.dtype)) / math.log(128) * 31, int)
    scores = scale * weight[buckets] * x
    return jax.nn.softmax(jnp.where((jnp.arange(72) < 60)[:, None], scores, -1e9), 0)


@pytest.mark.parametrize("scale", [1.0, 1 + 1e-7])
def test_what_is_decided_by_numbers_stays_decided(scale):
    """Rounding changes no index of a bucket, and no element of a mask."""
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((72, 5))
    port = partial(bucketed, scale=scale)
    report = compare(Buckets(), port, x, weights=lambda state_dict: state_dict["weight"])
    assert report.passed == (scale == 1), str(report)


def test_a_reference_that_overflows_is_no_reference():
    large = lambda x: x * 1e30 * 1e30  # noqa: E731
    report = compared(large, large, dtypes=["float32"])
    assert not report.passed
    assert report.faults[0].startswith("outputs, y: 7 of 7 numbers of the float32 torch side")
