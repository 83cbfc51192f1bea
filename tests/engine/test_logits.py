"""Errors of logits as divergences in nats, and as the share of equal likeliest tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from parity_tests import compare
from parity_tests.engine import logits
from parity_tests.engine.logits import TOP, logits_error

TOKENS, VOCABULARY = (3, 7), 50


def rows(rng, scale=1.0):
    return scale * rng.standard_normal((*TOKENS, VOCABULARY))


@pytest.mark.parametrize("block", [1, 4 * VOCABULARY, 2**22])
def test_the_numbers_are_those_of_their_definitions(monkeypatch, block):
    monkeypatch.setattr(logits, "BLOCK", block)
    rng = np.random.default_rng(0)
    oracle = rows(rng, 3.0)
    other = oracle + rows(rng)
    found = logits_error(other, oracle)
    log_p, log_q = log_softmax(oracle, -1), log_softmax(other, -1)
    kl = rel_entr(np.exp(log_p), np.exp(log_q)).sum(-1)
    log_prob = abs(log_p - log_q).max(-1)
    first, ours = (np.argsort(-a, axis=-1)[..., :TOP] for a in (oracle, other))
    shared = (first[..., :, None] == ours[..., None, :]).any(-1)
    same = first[..., 0] == ours[..., 0]
    assert 0 < same.mean() < 1
    np.testing.assert_allclose(
        [found.kl_mean, found.kl_max, found.log_prob_mean, found.log_prob_max],
        [kl.mean(), kl.max(), log_prob.mean(), log_prob.max()],
        rtol=1e-12,
    )
    np.testing.assert_allclose([found.top_1, found.top_k], [same.mean(), shared.mean()])


def test_a_divergence_far_below_rounding_is_not_lost():
    """It is half the variance of the difference; `Σ p·(log p − log q)` is off by 1e-15."""
    rng = np.random.default_rng(0)
    oracle, difference = np.zeros((1, 1, 4096)), 2.0**-40 * np.sign(rows(rng).ravel()[:64])
    difference = np.tile(difference, 64)[None, None]
    kl = logits_error(oracle + difference, oracle).kl_mean
    np.testing.assert_allclose(kl, difference.var() / 2, rtol=1e-3)


def test_infinite_logits():
    oracle = np.array([[0.0, 1.0, -np.inf]])
    assert logits_error(oracle, oracle).kl_max == 0
    assert logits_error(oracle, oracle).log_prob_max == 0
    assert logits_error(np.array([[0.0, -np.inf, -np.inf]]), oracle).kl_max == np.inf
    q = 1 / (1 + np.e + np.exp(-1))
    other = logits_error(np.array([[0.0, 1.0, -1.0]]), oracle)
    np.testing.assert_allclose(other.kl_max, -np.log((1 + np.e) * q), rtol=1e-14)
    assert other.log_prob_max == np.inf
    assert np.isnan(logits_error(np.array([[np.nan, 0, 0]]), oracle).kl_max)


def test_ties_agree():
    """Among several largest logits, each may be called the likeliest token."""
    oracle = np.array([[0.0, 2.0, 1.0, -1.0, -2.0, -3.0, -4.0]])
    coarse = np.array([[0.0, 2.0, 2.0, -1.0, -3.0, -3.0, -3.0]])
    assert (logits_error(coarse, oracle).top_1, logits_error(coarse, oracle).top_k) == (1, 1)
    swapped = np.array([[0.0, 1.0, 2.0, -1.0, -2.0, -3.0, -4.0]])
    assert (logits_error(swapped, oracle).top_1, logits_error(swapped, oracle).top_k) == (0, 1)


def compared(temperature=1.0, outputs=lambda y, x: y, **options):
    """Compares a linear map as a language model, with a temperature on the JAX side."""
    torch.manual_seed(0)
    return compare(
        torch.nn.Linear(4, VOCABULARY),
        lambda w, x: outputs(temperature * (x @ w["weight"].T + w["bias"]), x),
        np.random.default_rng(0).standard_normal((2, 9, 4)),
        call_twin=lambda twin, x: outputs(twin(x), x),
        weights=dict,
        **options,
    )


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        (True, lambda y, x: y),
        (True, lambda y, x: (y, x)),
        ("y['logits']", lambda y, x: {"loss": y.sum(), "logits": y, "hidden": x}),
        ("state", lambda y, x: (x, y)),
    ],
)
def test_a_report_has_the_logits_of_both_sides(name, outputs):
    report = compared(1.01, outputs, logits=name, dtypes=["float64", "float32", "bfloat16"])
    assert not report.passed
    found = report.logits
    assert found["float64"]["torch"].kl_max == found["float64"]["torch"].log_prob_max == 0
    assert 1e-6 < found["float64"]["JAX"].kl_mean < 1e-4
    assert found["float32"]["torch"].kl_max < 1e-12 < found["float32"]["JAX"].kl_mean
    assert found["bfloat16"]["torch"].log_prob_mean > found["float32"]["torch"].log_prob_mean
    for sides in found.values():
        assert all(e.top_1 > 0.8 and e.kl_mean <= e.kl_max for e in sides.values())
    assert "|Δ log p| max" in str(report)
    assert str(report).count("100.00%") >= 4


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "outputs", "message"),
    [
        (True, lambda y, x: [y, x], r"expected one of y\[0\], y\[1\], got True, for 2 outputs"),
        ("logits", lambda y, x: y, "logits:"),
        (
            "y",
            lambda y, x: y.argmax(-1) if isinstance(y, torch.Tensor) else jnp.argmax(y, -1),
            "of none",
        ),
    ],
)
def test_logits_that_no_output_is(name, outputs, message):
    with pytest.raises(ValueError, match=message):
        compared(outputs=outputs, logits=name)
