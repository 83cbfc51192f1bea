"""The code that uses the wrong output of a module is the culprit, and not the module.

A recurrent layer returns its outputs and its last states, and attention returns its outputs and its
weights. A port that takes the cell state for the hidden state, or exchanges two directions, has a
right layer.
"""

import os
from functools import partial
from types import SimpleNamespace

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models.weights import same
from parity_tests import compare

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytestmark = pytest.mark.usefixtures("standard_promotion")

WIDTH, HEADS = 4, 2
X = np.random.default_rng(0).standard_normal((3, 5, WIDTH))


# The functions of JAX's modules, which have the weights of torch's.
def linear(weights, x):
    return x @ weights["weight"].T + weights["bias"]


def attention(weights, q, k, v):
    """The outputs of `nn.MultiheadAttention`, and its weights averaged over the heads."""
    kernels, biases = (jnp.split(weights[f"in_proj_{part}"], 3) for part in ("weight", "bias"))
    q, k, v = (
        (x @ w.T + b).reshape(*x.shape[:2], HEADS, -1)
        for w, b, x in zip(kernels, biases, (q, k, v), strict=True)
    )
    scores = nnx.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH / HEADS) ** 0.5)
    y = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(X.shape)
    return y @ weights["out_proj.weight"].T + weights["out_proj.bias"], scores.mean(1)


def cell(kind, fault, weights, x, h, c):
    """One step of a torch cell; only an LSTM has a cell state."""
    x = jax.lax.stop_gradient(x) if fault == "stopped input" else x
    bias = jax.lax.stop_gradient(weights["bias_hh"]) if fault == "bias" else weights["bias_hh"]
    a, b = x @ weights["weight_ih"].T + weights["bias_ih"], h @ weights["weight_hh"].T + bias
    if kind == "RNN":
        return jnp.tanh(a + b), c
    if kind == "GRU":
        (r, z, n), (s, y, m) = jnp.split(a, 3, -1), jnp.split(b, 3, -1)
        r, z = nnx.sigmoid(r + s), nnx.sigmoid(z + y)
        return (1 - z) * jnp.tanh(n + r * m) + z * h, c
    i, f, g, o = jnp.split(a + b, 4, -1)
    i, f = (f, i) if fault == "gates" else (i, f)
    c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
    return nnx.sigmoid(o) * jnp.tanh(c), c


def scan(step, x, h, c, *, reverse):
    def body(carry, x):
        carry = step(x, *carry)
        return carry, carry[0]

    last, y = jax.lax.scan(body, (h, c), x.swapaxes(0, 1), reverse=reverse)
    return y.swapaxes(0, 1), *last


def layers(cells, x, h, c):
    """The outputs of all layers and directions, and the last states of each."""
    states = []
    for outer in range(0, len(cells), directions := 1 + ("_l0_reverse" in cells)):
        results = [
            scan([*cells.values()][i], x, h[i], c[i], reverse=i > outer)
            for i in range(outer, outer + directions)
        ]
        x = jnp.concatenate([y for y, *_ in results], -1)
        states += [last for _, *last in results]
    return x, *map(jnp.stack, zip(*states, strict=True))


def layer(kind, fault, is_carry_first, weights, x, h, c):
    """A recurrent layer that returns what torch's returns or, as in Flax, the carry first."""
    cells = {
        key.removeprefix("bias_hh"): partial(cell, kind, fault, weights_of(weights, key[7:]))
        for key in weights
        if key.startswith("bias_hh")
    }
    y, h, c = layers(cells, x, h, c)
    if is_carry_first:
        return ((c, h) if kind == "LSTM" else h), y
    return y, ((h, c) if kind == "LSTM" else h)


def weights_of(weights, suffix):
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return {name: weights[name + suffix] for name in names}


# The frameworks. Each makes a model and its weights from a function `call(parts, *inputs)`. `parts`
# has, for each module, its name, its function, and the torch key of each weight.
def of_nnx(call, parts, shapes):
    class Part(nnx.Module):
        def __init__(self, function, keys):
            self.function, self.weights = function, nnx.Dict()
            for name, key in keys.items():
                self.weights[name.replace(".", "_")] = nnx.Param(jnp.zeros(shapes[key]))
            self.names = tuple(keys)

        def __call__(self, *args):
            weights = {name: self.weights[name.replace(".", "_")][...] for name in self.names}
            return self.function(weights, *args)

    class Model(nnx.Module):
        def __init__(self):
            for name, part in parts.items():
                setattr(self, name, Part(*part))

        def __call__(self, *inputs):
            return call(self, *inputs)

    rows = [
        same(f"{part}.weights.{name.replace('.', '_')}", key)
        for part, (_, keys) in parts.items()
        for name, key in keys.items()
    ]
    return Model(), rows


def of_linen(call, parts, shapes):
    class Part(flax.linen.Module):
        function: object
        keys: object

        @flax.linen.compact
        def __call__(self, *args):
            make = partial(self.param, init_fn=lambda _, shape: jnp.zeros(shape))
            weights = {name: make(name, shape=shapes[key]) for name, key in self.keys.items()}
            return self.function(weights, *args)

    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, *inputs):
            each = {name: Part(*part, name=name) for name, part in parts.items()}
            return call(SimpleNamespace(**each), *inputs)

    return Model().apply, lambda weights: {"params": nested(weights, parts)}


def of_haiku(call, parts, shapes):
    haiku = pytest.importorskip("haiku")

    class Part(haiku.Module):
        def __init__(self, name, function, keys):
            super().__init__(name=name)
            self.function, self.keys = function, keys

        def __call__(self, *args):
            make = partial(haiku.get_parameter, dtype=jnp.float64, init=jnp.zeros)
            weights = {name: make(name, shapes[key]) for name, key in self.keys.items()}
            return self.function(weights, *args)

    def model(*inputs):
        each = {name: Part(name, *part) for name, part in parts.items()}
        return call(SimpleNamespace(**each), *inputs)

    apply = haiku.without_apply_rng(haiku.transform(model)).apply
    return apply, lambda weights: nested(weights, parts)


def of_equinox(call, parts, shapes):
    equinox = pytest.importorskip("equinox")

    class Part(equinox.Module):
        weights: dict
        function: object = equinox.field(static=True)

        def __call__(self, *args):
            return self.function(self.weights, *args)

    def load(weights):
        arrays = nested(weights, parts)
        return {name: Part(arrays[name], function) for name, (function, _) in parts.items()}

    return lambda model, *inputs: call(SimpleNamespace(**model), *inputs), load


def of_keras(call, parts, shapes):
    keras = pytest.importorskip("keras")

    class Part(keras.layers.Layer):
        def __init__(self, name, function, keys):
            super().__init__(name=name, dtype="float64")
            self.function, self.keys = function, keys
            self.arrays = {
                name: self.add_weight(shapes[key], name=name.replace(".", "_"))
                for name, key in keys.items()
            }

        def call(self, *args):
            return self.function({n: a.value for n, a in self.arrays.items()}, *args)

    class Model(keras.Model):
        def __init__(self):
            super().__init__(dtype="float64")
            for name, part in parts.items():
                setattr(self, name, Part(name, *part))

        def call(self, *inputs):
            return call(self, *inputs)

    model = Model()
    model.built = True
    keys = [key for _, keys in parts.values() for key in keys.values()]
    return (
        lambda weights, *inputs: model.stateless_call(weights, [], *inputs)[0],
        lambda weights: [jnp.asarray(weights[key]) for key in keys],
    )


def of_function(call, parts, shapes):
    def function(weights, *inputs):
        arrays = nested(weights, parts)
        each = {name: partial(function, arrays[name]) for name, (function, _) in parts.items()}
        return call(SimpleNamespace(**each), *inputs)

    return function, dict


def nested(weights, parts):
    return {
        part: {name: jnp.asarray(weights[key]) for name, key in keys.items()}
        for part, (_, keys) in parts.items()
    }


FRAMEWORKS = {
    "NNX": of_nnx,
    "Linen": of_linen,
    "haiku": of_haiku,
    "Equinox": of_equinox,
    "Keras": of_keras,
    "function": of_function,
}


# The code that calls the modules of either side, with a mistake that only JAX's side makes. `xp` is
# torch or jax.numpy, and `run(name, x, h, c)` returns the outputs and the states of a layer.
def last_state(m, xp, run, fault, x):
    y, h, c = run("rnn", x)
    chosen = {
        "cell state": c[0],
        "first step": y[:, 0],
        "mean": y.mean(1),
        "step before the last": y[:, -2],
        "zeros": 0 * h[0],
        "twice": 2 * h[0],
    }
    return m.head(chosen.get(fault, h[0]))


def last_states(m, xp, run, fault, x):
    """Two layers of two directions."""
    y, h, c = run("rnn", x)
    chosen = {
        "directions exchanged": (h[3], h[2]),
        "first layer": (h[0], h[1]),
        "cell states": (c[2], c[3]),
        "forward states": (h[0], h[2]),
        "backward states": (h[1], h[3]),
        "last step": (y[:, -1],),
    }
    return m.head(xp.concatenate(chosen.get(fault, (h[2], h[3])), -1))


def outputs(m, xp, run, fault, x):
    y, h, _ = run("rnn", x)
    chosen = {
        "reversed in time": xp.flip(y, (1,)),
        "last state": y * 0 + h[-1][:, None],
        "of the step before": xp.concatenate([0 * y[:, :1], y[:, :-1]], 1),
        "with the input": x + y,
    }
    return m.head(chosen.get(fault, y))


def reversed_input(m, xp, run, fault, x):
    y, _, _ = run("rnn", x if fault == "not reversed" else xp.flip(x, (1,)))
    return m.head(y if fault == "not reversed back" else xp.flip(y, (1,)))


def translation(m, xp, run, fault, x, target):
    """The decoder starts from the states of both directions of the encoder."""
    y, h, c = run("enc", x)
    h, c = (h[::-1], c) if fault == "directions exchanged" else (h, c)
    h, c = (c, h) if fault == "states exchanged" else (h, c)
    h, c = (m.bridge(xp.concatenate([*each], -1))[None] for each in (h, c))
    if fault == "first step":
        h = m.bridge(y[:, 0])[None]
    if fault == "no tanh":
        h = xp.tanh(h)
    y, _, _ = run("dec", target, *((0 * h, 0 * c) if fault == "zeros" else (h, c)))
    return m.head(y)


def attended(m, xp, run, fault, x):
    """Attention over the outputs of a layer, queried by its last state."""
    y, h, c = run("rnn", x)
    query = m.query({"cell state": c[0], "last step": y[:, 0]}.get(fault, h[0]))
    scores = (y * query[:, None]).sum(-1)
    shares = xp.exp(scores) / xp.exp(scores).sum(0 if fault == "batch" else 1, **keep(xp))
    if fault == "no softmax":
        shares = scores
    context = (shares[..., None] * (x if fault == "of inputs" else y)).sum(1)
    return m.head(h[0] if fault == "state instead" else context)


def keep(xp):
    return {"keepdim" if xp is torch else "keepdims": True}


def self_attention(m, xp, run, fault, x):
    y, shares = m.mha(x, x, x)
    chosen = {
        "weights": shares @ x,
        "no residual": y,
    }
    return m.head(chosen.get(fault, x + y))


def attention_weights(m, xp, run, fault, x):
    y, shares = m.mha(x, x, x)
    chosen = {
        "transposed": shares.swapaxes(1, 2) @ x,
        "output": y,
        "outputs mixed": shares @ y,
        "one row": shares[:, :1] @ x + 0 * x,
    }
    return m.head(chosen.get(fault, shares @ x))


def stopped(m, xp, run, fault, x):
    """All values are right, and a gradient is not."""
    y, h, _ = run("rnn", x)
    y = stop(xp, y) if fault in ("outputs", "outputs and state") else y
    h = stop(xp, h) if fault in ("state", "outputs and state") else h
    x = stop(xp, x) if fault == "input" else x
    return m.head(y.mean(1) + h[-1] + x.mean(1))


def detached(m, xp, run, fault, x):
    """Only torch stops a gradient."""
    y, h, c = run("rnn", x)
    h = h if fault == "hidden state" else stop(xp, h)
    c = c if fault == "cell state" else stop(xp, c)
    return m.head(y.mean(1) + h[-1] + c[-1])


def only_use(m, xp, run, fault, x):
    """The last layer gives no gradient to its input."""
    y, _, _ = run("rnn", x)
    return m.head(stop(xp, y) if fault == "outputs" else y)


def stop(xp, x):
    return x.detach() if xp is torch else jax.lax.stop_gradient(x)


def split_attention(m, xp, run, fault, x):
    y, shares = m.mha(x, x, x)
    y = stop(xp, y) if fault == "output" else y
    shares = stop(xp, shares) if fault == "weights" else shares
    return m.head(y + shares @ x)


MISTAKES = {
    last_state: ("cell state", "first step", "mean", "step before the last", "zeros", "twice"),
    last_states: (
        "directions exchanged",
        "first layer",
        "cell states",
        "forward states",
        "backward states",
        "last step",
    ),
    outputs: ("reversed in time", "last state", "of the step before", "with the input"),
    reversed_input: ("not reversed", "not reversed back"),
    translation: ("directions exchanged", "states exchanged", "first step", "no tanh", "zeros"),
    attended: ("cell state", "last step", "batch", "no softmax", "of inputs", "state instead"),
    self_attention: ("weights", "no residual"),
    attention_weights: ("transposed", "output", "outputs mixed", "one row"),
    stopped: ("outputs", "state", "outputs and state", "input"),
    detached: ("hidden state", "cell state"),
    only_use: ("outputs",),
    split_attention: ("output", "weights"),
}


class Twin(torch.nn.Module):
    def __init__(self, call, **modules):
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.7)

    def run(self, name, x, h=None, c=None):
        module = getattr(self, name)
        start = (h, c) if isinstance(module, torch.nn.LSTM) else h
        y, state = module(x) if h is None else module(x, start)
        return y, *(state if isinstance(state, tuple) else (state, state))

    def forward(self, *inputs):
        return self.call(self, torch, self.run, "", *inputs)


def twin_of(wiring, kind):
    make = partial(getattr(torch.nn, kind), WIDTH, WIDTH, batch_first=True)
    linear = torch.nn.Linear
    modules = {"rnn": make(), "head": linear(WIDTH, 2)}
    if wiring is last_states:
        modules = {"rnn": make(num_layers=2, bidirectional=True), "head": linear(2 * WIDTH, 2)}
    if wiring is translation:
        modules = {"enc": make(bidirectional=True), "bridge": linear(2 * WIDTH, WIDTH)}
        modules |= {"dec": make(), "head": linear(WIDTH, 2)}
    if wiring is attended:
        modules |= {"query": linear(WIDTH, WIDTH)}
    if wiring in (self_attention, attention_weights, split_attention):
        modules["mha"] = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        del modules["rnn"]
    return Twin(wiring, **modules)


def port_of(twin, kind, framework, fault, *, cells=False, inner_fault=""):
    """A port of the twin, whose modules are whole layers or single cells."""
    shapes = {key: tuple(value.shape) for key, value in twin.state_dict().items()}
    parts, suffixes, is_carry_first = {}, {}, framework == "Linen"
    for name, module in twin.named_children():
        keys = {key: f"{name}.{key}" for key, _ in module.named_parameters()}
        if not isinstance(module, torch.nn.RNNBase):
            parts[name] = (linear if isinstance(module, torch.nn.Linear) else attention), keys
            continue
        suffixes[name] = [key.removeprefix("bias_hh") for key in keys if key.startswith("bias_hh")]
        if not cells:
            parts[name] = partial(layer, kind, inner_fault, is_carry_first), keys
        for suffix in suffixes[name] if cells else ():
            part = name if len(suffixes[name]) == 1 else name + suffix
            parts[part] = partial(cell, kind, inner_fault), weights_of(keys, suffix)

    def call(m, *inputs):
        def run(name, x, h=None, c=None):
            start = jnp.zeros((len(suffixes[name]), len(x), WIDTH))
            h, c = (start if each is None else each for each in (h, c))
            if cells:
                names = [name if len(suffixes[name]) == 1 else name + s for s in suffixes[name]]
                each = [getattr(m, part) for part in names]
                return layers(dict(zip(suffixes[name], each, strict=True)), x, h, c)
            result = getattr(m, name)(x, h, c)
            y, state = result[::-1] if is_carry_first else result
            if not isinstance(state, tuple):
                return y, state, state
            return y, *(state[::-1] if is_carry_first else state)

        return twin.call(m, jnp, run, fault, *inputs)

    return FRAMEWORKS[framework](call, parts, shapes)


def report_of(wiring, kind, framework, fault="", **options):
    torch.manual_seed(0)
    twin = twin_of(wiring, kind)
    model, weights = port_of(twin, kind, framework, fault, **options)
    inputs = (X, X[:, ::-1] + 1) if wiring is translation else (X,)
    return compare(twin, model, *inputs, weights=weights, dtypes=["float64"], locate=True)


# Each mistake is made in NNX and in one of the other forms, whose turn it is.
OTHERS = [(each, False) for each in FRAMEWORKS if each != "NNX"]
OTHERS += [(each, True) for each in ("NNX", "Equinox", "function")]
MODULES = [form for form in OTHERS if form[0] != "function"]
ALL = [(wiring, fault) for wiring, faults in MISTAKES.items() for fault in faults]
CASES = [
    pytest.param(
        wiring,
        "LSTM" if form == 0 or "state" in fault else ("GRU", "RNN")[i % 2],
        *(("NNX", False), others[i % len(others)])[form],
        fault,
        marks=[] if form == 0 and i % 4 == 0 else pytest.mark.slow,
    )
    for i, (wiring, fault) in enumerate(ALL)
    for others in [MODULES if wiring is detached else OTHERS]  # a function does not show it
    for form in (0, 1)
]


@pytest.mark.parametrize(("wiring", "kind", "framework", "cells", "fault"), CASES)
def test_the_caller_is_the_culprit_if_it_uses_another_output(wiring, kind, framework, cells, fault):
    report = report_of(wiring, kind, framework, fault, cells=cells)
    assert not report.passed
    assert report.location.culprit == "", f"\n{report}"


@pytest.mark.parametrize(
    ("kind", "framework", "cells", "fault"),
    [
        pytest.param(kind, *form, fault, marks=[] if form in quick else pytest.mark.slow)
        for kind, fault, quick in (
            ("RNN", "bias", [("NNX", True)]),
            ("GRU", "bias", [("Equinox", True)]),
            ("LSTM", "gates", []),
            ("LSTM", "stopped input", [("Linen", False)]),
        )
        for form in [("NNX", False), *(MODULES if fault == "stopped input" else OTHERS)]
    ],
)
def test_the_layer_is_the_culprit_if_its_own_code_departs(kind, framework, cells, fault):
    """Backward, if a bias or the input has no gradient: a cell's output is also its carry."""
    report = report_of(outputs, kind, framework, cells=cells, inner_fault=fault)
    assert not report.passed
    assert report.location.culprit == "rnn", f"\n{report}"
