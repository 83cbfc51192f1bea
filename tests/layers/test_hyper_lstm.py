"""The HyperLSTM beyond parity: the printed formulas, what its scan holds, where it starts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend.core import jaxprs_in_params

import torch_ref
from jax_models import HyperLSTM, LayerNormLSTM, from_torch, to_torch
from parity_tests.engine.bounds.tolerance import assert_same

SIZES = (5, 7, 4, 3)
"""Of x, h, ĥ and z."""


def random_weights(num_layers: int) -> dict[str, np.ndarray]:
    """A state_dict under the seed's keys, every number random."""
    twin = torch_ref.HyperLSTM(*SIZES, num_layers=num_layers)
    rng = np.random.default_rng(0)
    return {key: 0.5 * rng.standard_normal(w.shape) for key, w in twin.state_dict().items()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normalised(w, key: str, x: np.ndarray) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{key}.weight"] + w[f"{key}.bias"]


def lstm_cell(w, key: str, gates: list[np.ndarray], c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    i, f, g, o = (normalised(w, f"{key}.layer_norm.{k}", gate) for k, gate in enumerate(gates))
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(normalised(w, f"{key}.layer_norm_c", c)), c


def printed_cell(w, key: str, x, state):
    """The seed's HyperLSTMCell, a gate and a matrix at a time."""
    h, c, hyper_h, hyper_c = state
    joined = np.concatenate([h, x], axis=-1)
    gates = joined @ w[f"{key}.hyper.input_lin.weight"].T
    gates = gates + hyper_h @ w[f"{key}.hyper.hidden_lin.weight"].T
    gates = np.split(gates + w[f"{key}.hyper.hidden_lin.bias"], 4, axis=-1)
    hyper_h, hyper_c = lstm_cell(w, f"{key}.hyper", gates, hyper_c)
    z = {name: hyper_h @ w[f"{key}.z_{name}.weight"].T for name in "hxb"}
    z = {name: z[name] + w.get(f"{key}.z_{name}.bias", 0) for name in "hxb"}
    gates = []
    for k in range(4):
        d_h, d_x, d_b = (
            np.split(z[name], 4, axis=-1)[k] @ w[f"{key}.d_{name}.{k}.weight"].T for name in "hxb"
        )
        scaled = d_h * (h @ w[f"{key}.w_h.{k}"].T) + d_x * (x @ w[f"{key}.w_x.{k}"].T)
        gates.append(scaled + d_b + w[f"{key}.d_b.{k}.bias"])
    return *lstm_cell(w, key, gates, c), hyper_h, hyper_c


def test_it_is_the_printed_formulas():
    """Every layer at every step, in the seed's order of loops."""
    rng = np.random.default_rng(1)
    weights, x = random_weights(num_layers=2), rng.standard_normal((3, 6, SIZES[0]))
    with jax.enable_x64(True):
        layer = HyperLSTM(*SIZES, num_layers=2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        start = jax.tree.map(lambda s: rng.standard_normal(s.shape), layer.init_state(3))
        y, last = from_torch(layer, weights)(x, start)
    states = list(zip(*start, strict=True))
    for t in range(x.shape[1]):
        read = x[:, t]
        for index in range(2):
            states[index] = printed_cell(weights, f"cells.{index}", read, states[index])
            read = states[index][0]
        assert_same(y[:, t], read, f"step {t}")
    for actual, expected in zip(last, zip(*states, strict=True), strict=True):
        assert_same(actual, np.stack(expected), "last state")


def loop_products(layer, x) -> list[tuple[int, ...]]:
    """The sizes over which the products inside the layer's scan sum."""

    def products(jaxpr, inside: bool):
        for equation in jaxpr.eqns:
            if inside and equation.primitive.name == "dot_general":
                (axes, _), _ = equation.params["dimension_numbers"]
                yield tuple(equation.invars[0].aval.shape[axis] for axis in axes)
            for inner in jaxprs_in_params(equation.params):
                yield from products(inner, inside or equation.primitive.name == "scan")

    return sorted(products(jax.make_jaxpr(lambda x: layer(x)[0])(x).jaxpr, inside=False))


def test_only_what_is_recurrent_is_in_the_scan():
    """Products of h, of h with ĥ, of ĥ and of z; none of x."""
    x = np.ones((2, 6, SIZES[0]), np.float32)
    layer = HyperLSTM(*SIZES, rngs=nnx.Rngs(0))
    assert loop_products(layer, x) == [(3,), (4,), (7,), (7 + 4,)]
    assert loop_products(LayerNormLSTM(5, 7, rngs=nnx.Rngs(0)), x) == [(7,)]


def gradients(layer, x) -> dict[str, np.ndarray]:
    """By the seed's keys, of the outputs' squares."""

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params)(x)[0] ** 2)

    graphdef, params = nnx.split(layer)
    return to_torch(nnx.merge(graphdef, jax.jit(jax.grad(loss))(params)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_weight_can_train_from_the_start(dtype):
    x = np.random.default_rng(0).standard_normal((2, 6, 32)).astype(np.float32)
    layer = HyperLSTM(32, 16, 8, 4, num_layers=2, param_dtype=dtype, rngs=nnx.Rngs(0))
    assert all(gradient.any() for gradient in gradients(layer, x.astype(dtype)).values())


def test_the_matrices_start_orthogonal_and_as_lecuns():
    weights = to_torch(HyperLSTM(400, 50, 8, 4, rngs=nnx.Rngs(0)))
    for k in range(4):
        w_h, w_x = weights[f"cells.0.w_h.{k}"], weights[f"cells.0.w_x.{k}"]
        np.testing.assert_allclose(w_h @ w_h.T, np.eye(50), atol=1e-5)
        assert w_x.std() == pytest.approx(400**-0.5, rel=0.05)
    assert np.abs(weights["cells.0.hyper.hidden_lin.weight"]).max() <= 8**-0.5
    assert np.abs(weights["cells.0.d_h.0.weight"]).max() <= 4**-0.5
    twin = torch_ref.HyperLSTM(400, 50, 8, 4, num_layers=1)
    for w_h, w_x in zip(twin.cells[0].w_h, twin.cells[0].w_x, strict=True):
        torch.testing.assert_close(w_h @ w_h.T, torch.eye(50))
        assert w_x.std().item() == pytest.approx(400**-0.5, rel=0.05)


def test_the_seeds_zeros_load_and_block_the_scales():
    """With W_h and W_x at zero nothing teaches the hyper network how to scale them."""
    twin = torch_ref.HyperLSTM(*SIZES, num_layers=1, zero_init=True)
    layer = from_torch(HyperLSTM(*SIZES, rngs=nnx.Rngs(0)), twin.state_dict())
    x = np.random.default_rng(0).standard_normal((2, 6, SIZES[0])).astype(np.float32)
    blocked = {key for key, gradient in gradients(layer, x).items() if not gradient.any()}
    scales = {f"d_{name}.{k}.weight" for name in "hx" for k in range(4)}
    scales |= {f"z_{name}.{kind}" for name in "hx" for kind in ("weight", "bias")}
    assert blocked == {f"cells.0.{key}" for key in scales}
