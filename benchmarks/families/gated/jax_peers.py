"""Gated recurrences of other JAX libraries."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from benchmarks.families.gated.problem import GATES, Gated
from benchmarks.problem import CannotSolve, Contenders, Function

contenders = Contenders()


def one_direction_only(make: Callable[[Gated], Function]) -> Callable[[Gated], Function]:
    """Leaves a peer out of problems with two directions or with lengths."""

    def without_options(problem: Gated) -> Function:
        if problem.bidirectional or problem.padded:
            raise CannotSolve("it is measured in one direction and without lengths")
        return make(problem)

    return without_options


def named_gradients(x, w_ih, w_hh, bias) -> dict[str, Any]:
    """Names gradients as torch does. Matrices are (in, gates), `bias` is the sum of both biases."""
    return {"x": x, "weight_ih_l0": w_ih.T, "weight_hh_l0": w_hh.T, "bias_ih_l0": bias}


def zero_state(problem: Gated):
    """The zero state of a cell, which is a pair for an LSTM."""
    zeros = jnp.zeros((problem.batch, problem.hidden))
    return (zeros, zeros) if problem.cell == "LSTM" else zeros


@contenders.jax("equinox")
@one_direction_only
def equinox(problem: Gated):
    """Equinox's cells in a `lax.scan`."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    cells: dict[str, Any] = {"LSTM": eqx.nn.LSTMCell, "GRU": eqx.nn.GRUCell}
    if problem.cell not in cells:
        raise CannotSolve("it has no simple cell")
    x, w_ih, w_hh, b_ih, b_hh = problem.arrays().values()
    cell = cells[problem.cell](problem.hidden, problem.hidden, key=jax.random.key(0))
    weights = {"weight_ih": w_ih, "weight_hh": w_hh, "bias": b_ih + b_hh}
    if problem.cell == "GRU":
        weights["bias_n"] = b_hh[-problem.hidden :]

    def apply(params):
        x, weights = params
        full = eqx.tree_at(lambda c: [getattr(c, n) for n in weights], cell, [*weights.values()])

        def step(state, x_t):
            state = jax.vmap(full)(x_t, state)
            return state, state[0] if problem.cell == "LSTM" else state

        _, ys = jax.lax.scan(step, zero_state(problem), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(ys, 0, 1)

    def as_torch(gradients):
        x, weights = gradients
        return named_gradients(x, weights["weight_ih"].T, weights["weight_hh"].T, weights["bias"])

    return Function((x, weights), apply, as_torch)


@contenders.jax("haiku")
@one_direction_only
def haiku(problem: Gated):
    """Haiku's LSTM in `hk.dynamic_unroll`."""
    import haiku as hk  # pyright: ignore[reportMissingImports]

    if problem.cell != "LSTM":
        raise CannotSolve("its GRU resets before the product, its RNN has relu")
    x, w_ih, w_hh, b_ih, b_hh = problem.arrays().values()

    def reordered(w):  # from torch's order i, f, g, o to haiku's i, g, f, o, or back
        i, f, g, o = np.split(np.asarray(w), 4, axis=-1)
        return np.concatenate([i, g, f, o], axis=-1)

    bias = reordered(b_ih + b_hh)
    bias[2 * problem.hidden : 3 * problem.hidden] -= 1  # haiku adds 1 to the forget gate's bias
    weights = {"lstm/linear": {"w": reordered(np.concatenate([w_ih.T, w_hh.T])), "b": bias}}

    def unroll(x):
        core = hk.LSTM(problem.hidden)
        return hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)[0]

    transformed = hk.without_apply_rng(hk.transform(unroll))

    def as_torch(gradients):
        x, weights = gradients
        kernel, bias = (reordered(weights["lstm/linear"][key]) for key in "wb")
        w_ih, w_hh = np.split(kernel, 2)
        return named_gradients(x, w_ih, w_hh, bias)

    return Function((x, weights), lambda params: transformed.apply(params[1], params[0]), as_torch)


@contenders.jax("nnx.RNN")
def nnx_rnn(problem: Gated):
    """Flax NNX's RNN, with the optimized LSTM cell."""
    arrays = problem.arrays()
    x = arrays.pop("x")
    cells: dict[str, Any] = {
        "LSTM": nnx.OptimizedLSTMCell,
        "GRU": nnx.GRUCell,
        "RNN": nnx.SimpleCell,
    }
    # Build a layer for each direction, with torch's weights. A cell has only one bias.
    biased = "dense_h" if problem.cell == "LSTM" else "dense_i"
    layers = []
    for end in problem.directions:
        cell = cells[problem.cell](problem.hidden, problem.hidden, rngs=nnx.Rngs(0))
        cell.dense_i.kernel.set_value(jnp.asarray(arrays[f"weight_ih{end}"].T))
        cell.dense_h.kernel.set_value(jnp.asarray(arrays[f"weight_hh{end}"].T))
        bias = arrays[f"bias_ih{end}"] + arrays[f"bias_hh{end}"]
        getattr(cell, biased).bias.set_value(jnp.asarray(bias))
        layers.append(nnx.RNN(cell, rngs=False))
    graphdef, weights, rest = nnx.split(nnx.List(layers), nnx.Param, ...)
    # Flax does not zero the outputs after the end of a row, so `apply` does.
    lengths, steps = problem.lengths, jnp.arange(problem.time)
    seq_lengths = None if lengths is None else jnp.asarray(lengths)

    def apply(params):
        x, weights = params
        layers = nnx.merge(graphdef, weights, rest)
        layer: Any = nnx.Bidirectional(*layers, rngs=False) if problem.bidirectional else layers[0]
        zeros: Any = zero_state(problem)
        carry = (zeros, zeros) if problem.bidirectional else zeros
        y = layer(x, initial_carry=carry, seq_lengths=seq_lengths)
        return y if lengths is None else y * (steps < lengths[:, None])[..., None]

    def as_torch(gradients):
        x, weights = gradients
        found = {"x": x}
        for end, layer in zip(problem.directions, nnx.merge(graphdef, weights, rest), strict=True):
            found[f"weight_ih{end}"] = layer.cell.dense_i.kernel[...].T
            found[f"weight_hh{end}"] = layer.cell.dense_h.kernel[...].T
            found[f"bias_ih{end}"] = getattr(layer.cell, biased).bias[...]
        return found

    return Function((x, weights), apply, as_torch)


@contenders.jax("linen.RNN")
@one_direction_only
def linen_rnn(problem: Gated):
    """Flax Linen's RNN, with the optimized LSTM cell."""
    x, w_ih, w_hh, b_ih, b_hh = problem.arrays().values()
    cells: dict[str, Any] = {
        "LSTM": linen.OptimizedLSTMCell,
        "GRU": linen.GRUCell,
        "RNN": linen.SimpleCell,
    }
    gates = {"LSTM": "ifgo", "GRU": "rzn", "RNN": [""]}[problem.cell]
    split = [np.split(w, len(gates)) for w in (w_ih, w_hh, b_ih + b_hh)]
    cell: dict[str, dict[str, Any]] = {}
    for gate, w_i, w_h, bias in zip(gates, *split, strict=True):
        cell[f"i{gate}"], cell[f"h{gate}"] = {"kernel": w_i.T}, {"kernel": w_h.T}
        cell[f"h{gate}" if problem.cell == "LSTM" else f"i{gate}"]["bias"] = bias
    if problem.cell == "GRU":
        cell["hn"]["bias"] = b_hh[-problem.hidden :]
    layer = linen.RNN(cells[problem.cell](problem.hidden))

    def apply(params):
        x, cell = params
        return layer.apply({"params": {"cell": cell}}, x)

    def as_torch(gradients):
        x, cell = gradients
        biased = "h" if problem.cell == "LSTM" else "i"
        parts = [(cell[f"i{g}"], cell[f"h{g}"], cell[f"{biased}{g}"]["bias"]) for g in gates]
        w_i, w_h, bias = zip(*parts, strict=True)
        w_ih, w_hh = (np.concatenate([w["kernel"] for w in ws], axis=-1) for ws in (w_i, w_h))
        return named_gradients(x, w_ih, w_hh, np.concatenate(bias))

    return Function((x, cell), apply, as_torch)


@contenders.jax("keras")
@one_direction_only
def keras(problem: Gated):
    """Keras's layers on the JAX backend."""
    import keras  # pyright: ignore[reportMissingImports]

    x, w_ih, w_hh, b_ih, b_hh = problem.arrays().values()
    layers: dict[str, Any] = {
        "LSTM": keras.layers.LSTM,
        "GRU": keras.layers.GRU,
        "RNN": keras.layers.SimpleRNN,
    }
    layer = layers[problem.cell](problem.hidden, return_sequences=True)
    layer.build(x.shape)
    order = [1, 0, 2] if problem.cell == "GRU" else range(GATES[problem.cell])  # Keras: z, r, n

    def reordered(w):
        gates = np.split(np.asarray(w), GATES[problem.cell], axis=-1)
        return np.concatenate([gates[i] for i in order], axis=-1)

    bias = np.stack([b_ih, b_hh]) if problem.cell == "GRU" else b_ih + b_hh
    weights = [reordered(w) for w in (w_ih.T, w_hh.T, bias)]
    rest = [variable.value for variable in layer.non_trainable_variables]

    def apply(params):
        x, weights = params
        return layer.stateless_call(weights, rest, x)[0]

    def as_torch(gradients):
        x, weights = gradients
        w_ih, w_hh, bias = map(reordered, weights)
        return named_gradients(x, w_ih, w_hh, bias[0] if problem.cell == "GRU" else bias)

    return Function((x, weights), apply, as_torch)
