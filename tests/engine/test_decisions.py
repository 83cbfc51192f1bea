"""Integers, masks and roundings that are made from real numbers are the same as in a user's run."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests import compare

pytestmark = pytest.mark.usefixtures("standard_promotion")
BINS, EXACT, FURTHEST = 32, 8, 128


class Port(NamedTuple):
    """A torch function of a linear layer and x, with a right and a wrong port."""

    torch: Callable[..., Any]
    right: Callable[..., Any]
    wrong: Callable[..., Any]


def of_torch(decide):
    """Scales the layer's outputs by what a function of x decides."""
    return lambda twin, x: twin(x) * decide(x)


def of_jax(decide):
    return lambda w, x: (x @ w["weight"].T) * decide(x)


def bucket(n, dtype=jnp.float32, log=jnp.log):
    """T5's bucket of each distance."""
    share = log(n.astype(dtype) / EXACT) / math.log(FURTHEST / EXACT)
    far = jnp.minimum(EXACT + (share * EXACT).astype(jnp.int32), 2 * EXACT - 1)
    return jnp.where(n < EXACT, n, far)


def distances():
    return jnp.abs(jnp.arange(160)[:, None] - jnp.arange(160))[:, :4]


def t5(twin, x):
    """The buckets of transformers' own T5."""
    module = pytest.importorskip("transformers.models.t5.modeling_t5")
    n = (torch.arange(160) - torch.arange(160)[:, None])[:, :4]
    buckets = module.T5Attention._relative_position_bucket(-n.abs(), num_buckets=BINS)
    return twin(x).mean(0) * buckets


def one_hot(scores):
    return torch.nn.functional.one_hot(scores.argmax(-1), 4)


def sampled(x):
    """The token at 0.6 of a distribution whose tokens have a probability of a fifth each."""
    sums = torch.full_like(x, 0.2).float().cumsum(-1)
    return torch.searchsorted(sums, torch.full_like(x[:, :1], 0.6).float())


TENTHS = torch.arange(10) / 10
PORTS = {
    "T5's buckets": Port(
        t5,
        lambda w, x: (x @ w["weight"].T).mean(0) * bucket(distances()),
        lambda w, x: (x @ w["weight"].T).mean(0) * bucket(distances() + 1),
    ),
    "buckets that nobody casts": Port(
        t5,
        lambda w, x: (x @ w["weight"].T).mean(0) * bucket(distances(), float),
        lambda w, x: (x @ w["weight"].T).mean(0) * bucket(distances(), log=jnp.log1p),
    ),
    "a threshold": Port(
        of_torch(lambda x: torch.where(x.float() > 0.3, 2.0, 1.0)),
        of_jax(lambda x: jnp.where(x.astype(jnp.float32) > 0.3, 2.0, 1.0)),
        of_jax(lambda x: jnp.where(x.astype(jnp.float32) >= 0.3, 2.0, 1.0)),
    ),
    "a floor": Port(
        of_torch(lambda x: torch.floor(x.float() / 0.1)),
        of_jax(lambda x: jnp.floor(x.astype(jnp.float32) / 0.1)),
        of_jax(lambda x: jnp.floor(x.astype(jnp.float32) / 0.1 - 0.01)),
    ),
    "a floor that only torch casts": Port(
        of_torch(lambda x: torch.floor(x.float() / 0.1)),
        of_jax(lambda x: jnp.floor(x / 0.1)),
        of_jax(lambda x: jnp.floor(x / 0.1 - 0.01)),
    ),
    "a ceiling that only JAX casts": Port(
        of_torch(lambda x: torch.ceil(x / 0.1)),
        of_jax(lambda x: jnp.ceil(x.astype(jnp.float32) / 0.1)),
        of_jax(lambda x: jnp.ceil(x.astype(jnp.float32) / 0.1 + 0.01)),
    ),
    "bins": Port(
        of_torch(lambda x: torch.bucketize(x.float(), TENTHS.float())),
        of_jax(lambda x: jnp.searchsorted(jnp.arange(10) / 10, x.astype(jnp.float32))),
        of_jax(lambda x: jnp.searchsorted(jnp.arange(10) / 10, x.astype(jnp.float32), "right")),
    ),
    "codes in float16": Port(
        lambda twin, x: (twin(x), torch.round(x.half() * 10007).int()),
        lambda w, x: (x @ w["weight"].T, jnp.round(x.astype("float16") * 10007).astype(int)),
        lambda w, x: (x @ w["weight"].T, jnp.round(x * 10007).astype(int)),
    ),
    "an argmax in bfloat16": Port(
        of_torch(lambda x: one_hot((1 + x / 500).bfloat16())),
        of_jax(lambda x: jax.nn.one_hot((1 + x / 500).astype(jnp.bfloat16).argmax(-1), 4)),
        of_jax(lambda x: jax.nn.one_hot((1 + x / 500).argmax(-1), 4)),
    ),
    "the two best of a router": Port(
        of_torch(lambda x: torch.softmax(x, -1, dtype=torch.float32).topk(2)[1].sum(-1)[:, None]),
        of_jax(
            lambda x: jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32)), 2)[1].sum(-1)[:, None]
        ),
        of_jax(lambda x: jax.lax.top_k(-x, 2)[1].sum(-1)[:, None]),
    ),
    "a sample": Port(
        of_torch(sampled),
        of_jax(lambda x: (jnp.cumsum(jnp.full(4, 0.2, "float32")) < np.float32(0.6)).sum()),
        of_jax(lambda x: (jnp.cumsum(jnp.full(4, 0.2, "float32")) <= np.float32(0.6)).sum()),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_right_ports_pass_and_wrong_ones_fail(name):
    call_twin, *ports = PORTS[name]
    x = np.random.default_rng(0).permuted(np.tile(np.arange(8) / 10, (40, 1)), axis=1)[:, :4]
    twin = torch.nn.Linear(4, 4, bias=False)
    right, wrong = (compare(twin, port, x, weights=dict, call_twin=call_twin) for port in ports)
    assert right.passed, f"\n{right}"
    assert {*right.errors} == {"float64", "float32"}
    assert all(e.bound <= 1e-5 for each in right.errors.values() for e in each.values())
    assert not wrong.passed
