"""The code that uses the wrong output of a module is the culprit, and not the module.

A recurrent layer returns its outputs and its last states, and attention returns its outputs and its
weights. A port that takes the cell state for the hidden state, or exchanges two directions, has a
right layer.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models.weights import same
from parity_tests import compare

pytestmark = pytest.mark.usefixtures("standard_promotion")

WIDTH, HEADS = 4, 2
X = np.random.default_rng(0).standard_normal((2, 3, WIDTH))


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
def nnx_pair(call, parts, shapes):
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


def linen_pair(call, parts, shapes):
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


def function_pair(call, parts, shapes):
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


FRAMEWORKS = {"NNX": nnx_pair, "Linen": linen_pair, "function": function_pair}


# What the head of a model gets from a layer, by the mistake that only JAX's side makes. `r` has the
# input x, the outputs y, the last states h and c, and torch or jax.numpy as xp.
LAST_STATE = {
    "": lambda r: r.h[0],
    "cell state": lambda r: r.c[0],
    "first step": lambda r: r.y[:, 0],
    "mean": lambda r: r.y.mean(1),
    "step before the last": lambda r: r.y[:, -2],
    "zeros": lambda r: 0 * r.h[0],
    "twice": lambda r: 2 * r.h[0],
}
LAST_STATES = {  # of two layers of two directions
    "": lambda r: r.xp.concatenate((r.h[2], r.h[3]), -1),
    "directions exchanged": lambda r: r.xp.concatenate((r.h[3], r.h[2]), -1),
    "first layer": lambda r: r.xp.concatenate((r.h[0], r.h[1]), -1),
    "cell states": lambda r: r.xp.concatenate((r.c[2], r.c[3]), -1),
    "forward states": lambda r: r.xp.concatenate((r.h[0], r.h[2]), -1),
    "backward states": lambda r: r.xp.concatenate((r.h[1], r.h[3]), -1),
    "last step": lambda r: r.y[:, -1],
}
OUTPUTS = {
    "": lambda r: r.y,
    "reversed in time": lambda r: r.xp.flip(r.y, (1,)),
    "last state": lambda r: r.y * 0 + r.h[-1][:, None],
    "of the step before": lambda r: r.xp.concatenate([0 * r.y[:, :1], r.y[:, :-1]], 1),
    "with the input": lambda r: r.x + r.y,
}
STOPPED = {  # all values are right, and a gradient is not
    "": lambda r: r.y.mean(1) + r.h[-1] + r.x.mean(1),
    "outputs": lambda r: stop(r.y).mean(1) + r.h[-1] + r.x.mean(1),
    "state": lambda r: r.y.mean(1) + stop(r.h[-1]) + r.x.mean(1),
    "outputs and state": lambda r: stop(r.y).mean(1) + stop(r.h[-1]) + r.x.mean(1),
    "input": lambda r: r.y.mean(1) + r.h[-1] + stop(r.x).mean(1),
}
DETACHED = {  # only torch stops a gradient
    "": lambda r: r.y.mean(1) + stop(r.h[-1]) + stop(r.c[-1]),
    "hidden state": lambda r: r.y.mean(1) + r.h[-1] + stop(r.c[-1]),
    "cell state": lambda r: r.y.mean(1) + stop(r.h[-1]) + r.c[-1],
}
ONLY_USE = {"": lambda r: r.y, "outputs": lambda r: stop(r.y)}  # so that the layer gets no gradient


def stop(x):
    return x.detach() if isinstance(x, torch.Tensor) else jax.lax.stop_gradient(x)


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
    shares = xp.exp(scores)
    shares = shares / (shares.sum(0) if fault == "batch" else shares.sum(1)[:, None])
    if fault == "no softmax":
        shares = scores
    context = (shares[..., None] * (x if fault == "of inputs" else y)).sum(1)
    return m.head(h[0] if fault == "state instead" else context)


# What the head gets from attention, which returns its outputs y and its weights w.
SELF_ATTENTION = {
    "": lambda x, y, w: x + y,
    "weights": lambda x, y, w: w @ x,
    "no residual": lambda x, y, w: y,
}
ATTENTION_WEIGHTS = {
    "": lambda x, y, w: w @ x,
    "transposed": lambda x, y, w: w.swapaxes(1, 2) @ x,
    "output": lambda x, y, w: y,
    "outputs mixed": lambda x, y, w: w @ y,
    "one row": lambda x, y, w: w[:, :1] @ x + 0 * x,
}
SPLIT_ATTENTION = {
    "": lambda x, y, w: y + w @ x,
    "output": lambda x, y, w: stop(y) + w @ x,
    "weights": lambda x, y, w: y + stop(w) @ x,
}


class Wiring(NamedTuple):
    """The modules of a model, and the code that calls them.

    `call(m, xp, run, fault, *inputs)` has the modules m, and `run(name, x, h, c)` returns the
    outputs and the states of a recurrent layer.
    """

    modules: Callable[[Callable], dict[str, torch.nn.Module]]
    call: Callable
    faults: tuple[str, ...]


def of_layer(chosen, **options):
    """The wiring of a recurrent layer and a head, which gets what a table has chosen."""

    def call(m, xp, run, fault, x):
        y, h, c = run("rnn", x)
        return m.head(chosen[fault](SimpleNamespace(xp=xp, x=x, y=y, h=h, c=c)))

    def modules(make):
        rnn = make(**options)
        size = WIDTH * (1 + rnn.bidirectional)
        return {"rnn": rnn, "head": torch.nn.Linear(size, 2)}

    return Wiring(modules, call, tuple(filter(None, chosen)))


def of_attention(chosen):
    """The wiring of attention and a head, which gets what a table has chosen."""
    return Wiring(
        lambda make: {
            "head": torch.nn.Linear(WIDTH, 2),
            "mha": torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        },
        lambda m, xp, run, fault, x: m.head(chosen[fault](x, *m.mha(x, x, x))),
        tuple(filter(None, chosen)),
    )


ONE_LAYER = of_layer(OUTPUTS)
TRANSLATION = Wiring(
    lambda make: {
        "enc": make(bidirectional=True),
        "bridge": torch.nn.Linear(2 * WIDTH, WIDTH),
        "dec": make(),
        "head": torch.nn.Linear(WIDTH, 2),
    },
    translation,
    ("directions exchanged", "states exchanged", "first step", "no tanh", "zeros"),
)
WIRINGS = {
    "the last state": of_layer(LAST_STATE),
    "the last states": of_layer(LAST_STATES, num_layers=2, bidirectional=True),
    "the outputs": ONE_LAYER,
    "a reversed input": Wiring(
        ONE_LAYER.modules, reversed_input, ("not reversed", "not reversed back")
    ),
    "translation": TRANSLATION,
    "attention over outputs": Wiring(
        lambda make: {**ONE_LAYER.modules(make), "query": torch.nn.Linear(WIDTH, WIDTH)},
        attended,
        ("cell state", "last step", "batch", "no softmax", "of inputs", "state instead"),
    ),
    "self-attention": of_attention(SELF_ATTENTION),
    "weights of attention": of_attention(ATTENTION_WEIGHTS),
    "a gradient that JAX stops": of_layer(STOPPED),
    "a gradient that torch stops": of_layer(DETACHED),
    "the only gradient": of_layer(ONLY_USE),
    "a gradient of attention": of_attention(SPLIT_ATTENTION),
}


class Twin(torch.nn.Module):
    def __init__(self, call, modules):
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


def port_of(twin, kind, framework, fault, *, cells=False, is_carry_first=False, inner_fault=""):
    """A port of the twin, whose modules are whole layers or single cells."""
    shapes = {key: tuple(value.shape) for key, value in twin.state_dict().items()}
    parts, suffixes = {}, {}
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
    make = partial(getattr(torch.nn, kind), WIDTH, WIDTH, batch_first=True)
    twin = Twin(wiring.call, wiring.modules(make))
    model, weights = port_of(twin, kind, framework, fault, **options)
    inputs = (X, X[:, ::-1] + 1) if wiring is TRANSLATION else (X,)
    return compare(twin, model, *inputs, weights=weights, dtypes=["float64"], locate=True)


# Each mistake is made in the form whose turn it is: a framework, and whether a layer is divided
# into its cells or returns its carry first.
WHOLE = ("NNX", {})
FORMS = {
    0: ("Linen", {"is_carry_first": True}),
    2: ("NNX", {"is_carry_first": True}),
    4: ("function", {}),
    5: ("NNX", {"cells": True}),
    7: ("function", {"cells": True}),
}
MISTAKES = [(name, fault) for name, wiring in WIRINGS.items() for fault in wiring.faults]
CASES = [
    pytest.param(
        name,
        "LSTM" if "state" in fault or i % 8 not in FORMS else ("GRU", "RNN")[i % 2],
        FORMS.get(i % 8, WHOLE),
        fault,
        marks=[] if i % 12 == 1 else pytest.mark.slow,
    )
    for i, (name, fault) in enumerate(MISTAKES)
]


@pytest.mark.parametrize(
    ("name", "kind", "form", "fault"),
    [
        *CASES,
        pytest.param(
            *("translation", "GRU", ("NNX", {"is_carry_first": True}), "first step"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("a gradient that torch stops", "GRU", ("function", {}), "hidden state"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_caller_is_the_culprit_if_it_uses_another_output(name, kind, form, fault):
    framework, options = form
    report = report_of(WIRINGS[name], kind, framework, fault, **options)
    assert not report.passed
    assert report.location.culprit == "", f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "layer"),
    [
        ("a gradient that JAX stops", "outputs and state", "rnn"),
        ("the only gradient", "outputs", "head"),
    ],
)
def test_nothing_tells_where_a_function_stops_the_only_gradient(name, fault, layer):
    report = report_of(WIRINGS[name], "GRU", "function", fault)
    assert report.location.remarks == (f"(it may be in {layer} or the module itself)",)
    assert report.location.culprit is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "framework", "options", "fault"),
    [
        ("RNN", "NNX", {"cells": True}, "bias"),
        ("GRU", "function", {"cells": True}, "bias"),
        ("GRU", "Linen", {"is_carry_first": True}, "bias"),
        ("LSTM", "function", {}, "gates"),
        ("LSTM", "NNX", {"cells": True}, "gates"),
        ("LSTM", "Linen", {"is_carry_first": True}, "stopped input"),
        ("LSTM", "NNX", {"cells": True}, "stopped input"),
    ],
)
def test_the_layer_is_the_culprit_if_its_own_code_departs(kind, framework, options, fault):
    """Backward, if a bias or the input has no gradient: a cell's output is also its carry."""
    report = report_of(ONE_LAYER, kind, framework, inner_fault=fault, **options)
    assert not report.passed
    assert report.location.culprit == "rnn", f"\n{report}"
