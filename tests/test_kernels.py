"""The kernels of the linear recurrence and of WKV, on a machine that has neither TPU nor GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_models.ops import row_scan_tpu
from jax_models.ops.linear_recurrence import linear_recurrence
from jax_models.ops.wkv import WKVState, wkv
from parity_tests.tolerance import K, assert_same, rms, ulp

POISONED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SIZES = [(1, 1, 5), (3, 2, 130), (1, 127, 5), (3, 127, 130)]
SMALL_BLOCKS = {"BLOCK_BYTES": 1, "WIDTH": 256}
"""Of 32 steps, as few as there can be, 256 features, or 2 rows of up to 128."""


def numbers(batch: int, time: int, features: int) -> dict[str, np.ndarray]:
    """Inputs of both operators, exact in bfloat16; some factors are 0."""
    rng = np.random.default_rng(0)
    draws = {
        name: rng.standard_normal((batch, time, features)).astype(jnp.bfloat16).astype(np.float64)
        for name in ("b", "k", "v")
    }
    a = rng.uniform(0, 1, (batch, time, features)).astype(jnp.bfloat16).astype(np.float64)
    rows = {name: rng.standard_normal((batch, features)) for name in ("h0", "num", "max")}
    vectors = {"w": rng.uniform(0.01, 2, features), "u": rng.standard_normal(features)}
    den = {"den": 1 + np.abs(rows["num"])}
    return {"a": np.where(a < 0.1, 0, a), **draws, **rows, **den, **vectors}


def recurrence(x, **options):
    return linear_recurrence(x["a"], x["b"], x["h0"], **options)


def sums(x, **options):
    state = WKVState(x["num"], x["den"], x["max"])
    return wkv(x["k"], x["v"], state, w=x["w"], u=x["u"], **options)


OPERATORS = {recurrence: ("a", "b", "h0"), sums: ("k", "v", "w", "u", "num", "den", "max")}


def results_and_gradients(operator, x, dtype, **options):
    """All results and, for random gradients of them, those of the inputs, in float64."""
    x = {name: jnp.asarray(x[name], dtype) for name in OPERATORS[operator]}

    @jax.jit
    def run(x):
        results, pullback = jax.vjp(partial(operator, **options), x)
        rng = np.random.default_rng(1)
        cotangents = [
            jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in jax.tree.leaves(results)
        ]
        return results, pullback(jax.tree.unflatten(jax.tree.structure(results), cotangents))

    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree.leaves_with_path(run(x))
    }


def masks(batch: int, time: int):
    reset = np.random.default_rng(2).uniform(size=(batch, time)) < 0.2
    return {"lengths": jnp.arange(batch) * time // batch, "reset": jnp.asarray(reset)}


@pytest.mark.parametrize("blocks", [{}, SMALL_BLOCKS], ids=["whole", "ragged"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_tpu_kernel_in_poisoned_memory(operator, size, blocks, monkeypatch, capfd):
    """In float32, forward and backward, from a state, against float64: as exact as step by step."""
    for name, value in blocks.items():
        monkeypatch.setattr(row_scan_tpu, name, value)
    reverse = {"reverse": size[0] == 3} if operator is recurrence else {}
    x = numbers(*size)
    run = partial(results_and_gradients, operator, x, **reverse)
    plain = run(jnp.float32, method="sequential")
    with pltpu.force_tpu_interpret_mode(POISONED):
        ours = run(jnp.float32, method="pallas_interpreted")
    with jax.enable_x64(True):
        exact = run(jnp.float64, method="sequential")
    for name, expected in exact.items():
        bound = K * (rms(plain[name] - expected) + ulp(np.float32) * rms(expected))
        assert rms(ours[name] - expected) <= bound, name
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_masks_in_the_tpu_kernel(x64, operator, reverse, monkeypatch):
    for name, value in SMALL_BLOCKS.items():
        monkeypatch.setattr(row_scan_tpu, name, value)
    if reverse and operator is sums:
        pytest.skip("WKV only runs forward")
    size = (3, 70, 5)
    options = masks(*size[:2]) | ({"reverse": reverse} if operator is recurrence else {})
    run = partial(results_and_gradients, operator, numbers(*size), jnp.float64, **options)
    ours, expected = run(method="pallas_interpreted"), run(method="sequential")
    active = np.arange(70) < np.asarray(options["lengths"])[:, None]
    for name in expected:
        if expected[name].shape == size:
            ours[name], expected[name] = ours[name][active], expected[name][active]
        assert_same(ours[name], expected[name], name)
