"""A model in each framework with deliberate faults, models of parts, and functions."""

import os
import re
from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models.weights import loader, same, transposed
from parity_tests import compare, tap

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

NUM_TOKENS, FEATURES, NUM_BLOCKS = 7, 4, 2
PARTS = ("norm", "up", "down")
TOKENS = np.random.default_rng(0).integers(0, NUM_TOKENS, (3, 5))


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.up = torch.nn.Linear(FEATURES, 6)
        self.act = torch.nn.GELU()
        self.down = torch.nn.Linear(6, FEATURES)

    def forward(self, x):
        return {"hidden": x + self.down(self.act(self.up(self.norm(x))))}


class TorchModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(NUM_TOKENS, FEATURES)
        self.blocks = torch.nn.ModuleList(TorchBlock() for _ in range(NUM_BLOCKS))
        self.head = torch.nn.Linear(FEATURES, 3)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x=x)["hidden"]
        return self.head(x.mean(1))


@jax.custom_vjp
def gelu_with_a_wrong_gradient(x):
    return jax.nn.gelu(x, approximate=False)


gelu_with_a_wrong_gradient.defvjp(
    lambda x: (gelu_with_a_wrong_gradient(x), x), lambda x, gradient: (gradient * (x > 0),)
)


FAULTS = {
    "another epsilon": ("blocks.1.norm", "forward"),
    "gelu by tanh": ("blocks.1.act", "forward"),
    "another residual": ("blocks.1", "forward"),
    "first instead of mean": ("", "forward"),
    "gelu's gradient": ("blocks.1.act", "backward"),
    "stopped gradient": ("blocks.1", "backward"),
}
"""The submodule that has a fault, and the pass in which it first shows."""


def epsilon(fault):
    return 2e-5 if fault == "another epsilon" else 1e-5


def run_block(fault, norm, up, down, x):
    act = partial(jax.nn.gelu, approximate=fault == "gelu by tanh")
    if fault == "gelu's gradient":
        act = gelu_with_a_wrong_gradient
    h = norm(x)
    y = down(act(up(h)))
    if fault == "stopped gradient":
        x = 0.5 * x + 0.5 * jax.lax.stop_gradient(x)
    return (h if fault == "another residual" else x) + y


def run_model(fault, embed, blocks, head, tokens):
    x = embed(tokens)
    for block in blocks:
        x = block(x)
    return head(x[..., 0, :] if fault == "first instead of mean" else x.mean(-2))


def faults_of_blocks(fault):
    """The fault of each block: only the last block has one."""
    return (None,) * (NUM_BLOCKS - 1) + (fault,)


class Block(nnx.Module):
    def __init__(self, fault, rngs):
        self.norm = nnx.LayerNorm(FEATURES, epsilon=epsilon(fault), rngs=rngs)
        self.up, self.down = (nnx.Linear(*n, rngs=rngs) for n in ((FEATURES, 6), (6, FEATURES)))
        self.fault = fault

    def __call__(self, x):
        return run_block(self.fault, self.norm, self.up, self.down, x)


def called(block, x):
    return block(x)


def mapped(function):
    """Applies a function of a block and its input to each block."""
    return lambda blocks: [partial(function, block) for block in blocks]


def scanned(blocks):
    """Scans over the stacked blocks, all of which have the fault of the last one."""
    graphdefs, states = zip(*map(nnx.split, blocks), strict=True)
    stacked = nnx.merge(graphdefs[-1], jax.tree.map(lambda *each: jnp.stack(each), *states))
    return [partial(nnx.scan(called, in_axes=(0, nnx.Carry), out_axes=nnx.Carry), stacked)]


TRANSFORMS = {
    "as it is": mapped(called),
    "nnx.jit": mapped(nnx.jit(called)),
    "nnx.remat": mapped(nnx.remat(called)),
    "nnx.vmap": mapped(nnx.vmap(called, in_axes=(None, 0))),
    "nnx.scan": scanned,
}


class Model(nnx.Module):
    def __init__(self, fault, transform="as it is"):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(NUM_TOKENS, FEATURES, rngs=rngs)
        self.embed.dtype = None
        self.blocks = nnx.List([Block(each, rngs) for each in faults_of_blocks(fault)])
        self.head = nnx.Linear(FEATURES, 3, rngs=rngs)
        self.fault, self.transform = fault, transform

    def __call__(self, tokens):
        blocks = TRANSFORMS[self.transform](self.blocks)
        return run_model(self.fault, self.embed, blocks, self.head, tokens)


def table(
    root: str = "",
    block: str = "blocks.{}.",
    at: str = ".",
    embed: str = "embedding",
    norm: tuple[str, str] = ("scale", "bias"),
    dense: tuple[str, str] = ("kernel", "bias"),
):
    """The rows of all weights, with the names of a framework."""

    def rows(name):
        row, (weight, bias) = (same, norm) if name.endswith("norm") else (transposed, dense)
        path = root + re.sub(r"blocks\.(\d)\.", lambda found: block.format(found[1]), name) + at
        return row(path + weight, f"{name}.weight"), same(path + bias, f"{name}.bias")

    return [
        same(f"{root}embed{at}{embed}", "embed.weight"),
        *(row for i in range(NUM_BLOCKS) for n in PARTS for row in rows(f"blocks.{i}.{n}")),
        *rows("head"),
    ]


def nnx_pair(fault, transform="as it is"):
    return Model(fault, transform), table()


def function_pair(fault, named=lambda name, x: x):
    def norm(weights, prefix, fault, x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        y = (x - mean) / jnp.sqrt(var + epsilon(fault))
        return named(prefix, y * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"])

    def dense(weights, prefix, x):
        return named(prefix, x @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"])

    def function(weights, tokens):
        def block(i, fault, x):
            parts = (
                partial(norm, weights, f"blocks.{i}.norm", fault),
                *(partial(dense, weights, f"blocks.{i}.{part}") for part in ("up", "down")),
            )
            return named(f"blocks.{i}", jax.checkpoint(partial(run_block, fault, *parts))(x))

        embed = lambda tokens: named("embed", weights["embed.weight"][tokens])  # noqa: E731
        head = partial(dense, weights, "head")
        blocks = [partial(block, i, each) for i, each in enumerate(faults_of_blocks(fault))]
        return run_model(fault, embed, blocks, head, tokens)

    return function, dict


class LinenBlock(flax.linen.Module):
    fault: str | None

    @flax.linen.compact
    def __call__(self, x):
        norm = flax.linen.LayerNorm(epsilon=epsilon(self.fault), name="norm")
        up, down = (flax.linen.Dense(n, name=name) for n, name in ((6, "up"), (FEATURES, "down")))
        return run_block(self.fault, norm, up, down, x)


class LinenModel(flax.linen.Module):
    fault: str | None

    @flax.linen.compact
    def __call__(self, tokens):
        cls = flax.linen.remat(LinenBlock)
        return run_model(
            self.fault,
            flax.linen.Embed(NUM_TOKENS, FEATURES, name="embed"),
            [cls(each, name=f"block_{i}") for i, each in enumerate(faults_of_blocks(self.fault))],
            flax.linen.Dense(3, name="head"),
            tokens,
        )


def linen_pair(fault, form="a pair"):
    module = LinenModel(fault)
    rows, variables = table(block="block_{}."), module.init(jax.random.key(0), TOKENS)
    if form == "a loader":
        return module, loader(variables["params"], rows)
    if form == "ToNNX":
        model = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0))
        nnx.bridge.lazy_init(model, TOKENS)
        return model, rows
    return module.bind(variables) if form == "bound" else (module, variables), rows


def haiku_pair(fault, form="a pair"):
    haiku = pytest.importorskip("haiku")

    class HaikuBlock(haiku.Module):
        def __init__(self, fault, name):
            super().__init__(name=name)
            self.fault = fault

        def __call__(self, x):
            norm = haiku.LayerNorm(-1, True, True, eps=epsilon(self.fault), name="norm")
            up, down = haiku.Linear(6, name="up"), haiku.Linear(FEATURES, name="down")
            return run_block(self.fault, norm, up, down, x)

    def model(tokens):
        blocks = [HaikuBlock(f, name=f"block_{i}") for i, f in enumerate(faults_of_blocks(fault))]
        return run_model(
            fault,
            haiku.Embed(NUM_TOKENS, FEATURES, name="embed"),
            [haiku.remat(block) for block in blocks],
            haiku.Linear(3, name="head"),
            tokens,
        )

    transform = haiku.transform_with_state if "state" in form else haiku.transform
    transformed = transform(model)
    variables = transformed.init(jax.random.key(0), TOKENS)
    rows = table("", "block_{}/", embed="embeddings", norm=("scale", "offset"), dense=("w", "b"))
    if "pair" in form:
        return (transformed, variables), rows
    return haiku.without_apply_rng(transformed), loader(variables, rows)


def equinox_pair(fault, form="a table"):
    equinox = pytest.importorskip("equinox")
    key = jax.random.key(0)

    class EquinoxBlock(equinox.Module):
        norm: equinox.nn.LayerNorm
        up: equinox.nn.Linear
        drop: equinox.nn.Dropout
        down: equinox.nn.Linear
        fault: str | None = equinox.field(static=True)

        def __call__(self, x):
            norm, up, down = map(jax.vmap, (self.norm, self.up, self.down))
            return run_block(self.fault, norm, up, lambda h: down(self.drop(h)), x)

    class EquinoxModel(equinox.Module):
        embed: equinox.nn.Embedding
        blocks: list[EquinoxBlock]
        head: equinox.nn.Linear

        def __call__(self, tokens):
            return jax.vmap(self.logits)(tokens)

        def logits(self, tokens):
            blocks = map(equinox.filter_checkpoint, self.blocks)
            return run_model(fault, jax.vmap(self.embed), blocks, self.head, tokens)

    def block(fault):
        norm = equinox.nn.LayerNorm(FEATURES, eps=epsilon(fault))
        up, down = (equinox.nn.Linear(*n, key=key) for n in ((FEATURES, 6), (6, FEATURES)))
        return EquinoxBlock(norm, up, equinox.nn.Dropout(0.5), down, fault)

    model = EquinoxModel(
        equinox.nn.Embedding(NUM_TOKENS, FEATURES, key=key),
        [*map(block, faults_of_blocks(fault))],
        equinox.nn.Linear(FEATURES, 3, key=key),
    )

    if form == "a table":
        return model, [same(name, name) for name in TorchModel().state_dict()]

    def load(weights):
        def loaded(path, leaf):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return jnp.asarray(weights[name]) if equinox.is_array(leaf) else leaf

        return jax.tree_util.tree_map_with_path(loaded, model)

    if form == "a loader":
        return model, load
    return lambda model, tokens: equinox.nn.inference_mode(model)(tokens), load


def keras_pair(fault, form="a table"):
    keras = pytest.importorskip("keras")

    class KerasNorm(keras.layers.Layer):
        """A norm with epsilon in torch's place."""

        def __init__(self, fault):
            super().__init__(name="norm")
            self.fault = fault

        def build(self, shape):
            names = ("gamma", "beta")
            self.scale, self.bias = (self.add_weight(shape[-1:], name=name) for name in names)

        def call(self, x):
            mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
            return (x - mean) / jnp.sqrt(var + epsilon(self.fault)) * self.scale + self.bias

    class KerasBlock(keras.layers.Layer):
        def __init__(self, fault, name):
            super().__init__(name=name)
            self.norm, self.fault = KerasNorm(fault), fault
            self.up = keras.layers.Dense(6, name="up")
            self.down = keras.layers.Dense(FEATURES, name="down")
            self.drop = keras.layers.Dropout(0.5)

        def call(self, x):
            down = lambda h: self.down(self.drop(h))  # noqa: E731
            return run_block(self.fault, self.norm, self.up, down, x)

    class KerasModel(keras.Model):
        def __init__(self):
            super().__init__(name="model")
            self.embed = keras.layers.Embedding(NUM_TOKENS, FEATURES, name="embed")
            faults = enumerate(faults_of_blocks(fault))
            self.blocks = [KerasBlock(fault, f"block_{i}") for i, fault in faults]
            self.head = keras.layers.Dense(3, name="head")

        def call(self, tokens):
            return run_model(fault, self.embed, self.blocks, self.head, tokens)

    model = KerasModel()
    model(TOKENS)
    if form == "a table":
        return model, table("model/", "block_{}/", "/", "embeddings", ("gamma", "beta"))

    def load(weights):
        is_kernel = lambda key: key.endswith("weight") and "embed" not in key  # noqa: E731
        return [jnp.asarray(w).T if is_kernel(key) else w for key, w in weights.items()]

    return model, load


FRAMEWORKS = {
    **{f"NNX, {name}": partial(nnx_pair, transform=name) for name in TRANSFORMS},
    "Linen": linen_pair,
    "Linen in NNX": partial(linen_pair, form="ToNNX"),
    "Equinox": equinox_pair,
    "haiku": haiku_pair,
    "Keras": keras_pair,
    "function": function_pair,
    "function with taps": partial(function_pair, named=tap),
}


class Part(nnx.Module):
    """A submodule without weights."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Parts(nnx.Module):
    def __init__(self, call, **parts):
        self.call = call
        for name, function in parts.items():
            setattr(self, name, Part(function))

    def __call__(self, *inputs):
        return self.call(self, *inputs)


class TorchPart(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class TorchParts(torch.nn.Module):
    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, function in parts.items():
            self.add_module(name, TorchPart(function))

    def forward(self, *inputs):
        return self.call(self, *inputs)


def located(torch_side, jax_side, *inputs):
    twin, model = TorchParts(**torch_side), Parts(**jax_side)
    return compare(twin, model, *inputs, dtypes=["float64"], locate=True).location


X = np.random.default_rng(0).standard_normal((3, 4))
INDICES = np.arange(3)


class Doubled(nnx.Linear):
    """Returns twice what it should."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def affine(w, x, name=""):
    """A linear layer, whose weights have a prefix."""
    return x @ w[f"{name}weight"].T + w[f"{name}bias"]


def logistic(x, steps=12):
    """The logistic map, which doubles an error at each step."""
    for _ in range(steps):
        x = 3.9 * x * (1 - x)
    return x


def reordered_logistic(x, factor=1.0, steps=12):
    """The same map with its products in another order, and with another rate."""
    for _ in range(steps):
        x = 3.9 * factor * (x * (1 - x))
    return x
