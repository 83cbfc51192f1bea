"""The programs to compile: the registry's layers, the operators' kernels, the training step."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding

from jax_models.ops import linear_recurrence, wkv
from parity_tests.registry import BATCH, LANGUAGE_MODELS, Case
from tpu_compile.hlo import Collective
from tpu_compile.libtpu import Topology
from train.run.config import PRESETS, TrainConfig
from train.run.folder import build_trainer
from train.trainer.step import Trainer

KERNEL_SHAPES = ((8, 2048, 1024), (3, 1000, 130), (1, 127, 5))
"""Batch, time and features of each shape."""

Lower = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program for a topology of chips, and the collectives that it should have."""

    name: str
    part: str
    topology: str
    lower: Lower
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The expected number of collectives of each kind. None may be in a loop, and every chip must
    have the whole results."""
    exchange_faults: Callable[[Sequence[Collective]], Iterator[str]] | None = None
    """Checks the collectives of a program whose results are sharded and whose products have the
    precision of training. `collectives` is then ignored."""

    @property
    def title(self) -> str:
        """The name, the part and the topology, in one line."""
        return f"{self.name}, {self.part}, {self.topology}"


def different_layers(cases: Iterable[Case]) -> Iterator[Case]:
    """The first case of each class of layers, and of each `method` of a class.

    The other options change few of the operations. Of the language models, only those with
    different blocks are compiled.
    """
    seen = set()
    for case in cases:
        if case.config is not None and case.name not in LANGUAGE_MODELS:
            continue
        layer = case.abstract()
        kind = type(layer), getattr(layer, "method", None)
        if kind not in seen:
            seen.add(kind)
            yield case


def layer_programs(case: Case, topology: Topology) -> Iterator[Program]:
    """The layer of a case on one chip: its forward pass, and the same with the weights' gradients.

    An operator may take another form where no gradient is computed. The forward pass of a language
    model alone would repeat what the forward passes of its layers show.
    """
    sharding = SingleDeviceSharding(*topology.chips)
    if case.config is None:
        forward = partial(lower_forward, case, sharding)
        yield Program(case.name, "forward", topology.name, forward)
    backward = partial(lower_backward, case, sharding)
    yield Program(case.name, "and backward", topology.name, backward)


def kernel_programs(topology: Topology) -> Iterator[Program]:
    """The operators' Pallas kernels, forward and backward.

    Some shapes are multiples of the blocks, and others have to be padded.
    """
    sharding = SingleDeviceSharding(*topology.chips)
    for operator in (linear_recurrence_by_kernel, wkv_by_kernel):
        for shape in KERNEL_SHAPES:
            for dtype in ("float32", "bfloat16"):
                sequence = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                vector = jax.ShapeDtypeStruct(shape[2:], jnp.float32, sharding=sharding)
                part = f"{' × '.join(map(str, shape))}, {dtype}"
                lower = partial(jax.jit(operator).lower, sequence, sequence, vector)
                yield Program(operator.__name__.replace("_", " "), part, topology.name, lower)


def linear_recurrence_by_kernel(a, b, h0):
    """Computes h, and the gradients of its sum."""
    h0 = jnp.broadcast_to(h0, (a.shape[0], a.shape[2]))
    h, pullback = jax.vjp(lambda *x: linear_recurrence(*x, method="pallas")[0], a, b, h0)
    return h, pullback(jnp.ones_like(h))


def wkv_by_kernel(k, v, w):
    """Computes y, and the gradients of its sum."""
    y, pullback = jax.vjp(lambda k, v, w: wkv(k, v, w=w, u=w, method="pallas")[0], k, v, w)
    return y, pullback(jnp.ones_like(y))


def train_step(preset: str, rows: int | None, topology: Topology) -> Program:
    """The training step of a preset in float32, with data parallelism.

    The chips need to exchange only the gradient, in a single all-reduce.
    """
    rows = rows or PRESETS[preset].batch_size
    return Program(
        f"train step of {preset}",
        f"{rows} rows a chip",
        topology.name,
        partial(lower_preset_step, preset, rows, topology.chips),
        {"all-reduce": 1} if len(topology.chips) > 1 else {},
    )


def lower_forward(case: Case, sharding: Sharding) -> jax.stages.Lowered:
    """Lowers a layer that computes outputs and a final state from sequences and a state."""
    forward, arguments = _layer(case)
    return jax.jit(forward).lower(*_placed(arguments, sharding))


def lower_backward(case: Case, sharding: Sharding) -> jax.stages.Lowered:
    """Lowers the same layer with its backward pass.

    The backward pass computes the weights' gradients from gradients of the outputs and the state.
    """
    forward, arguments = _layer(case)

    def forward_and_backward(cotangents, params, *others):
        def floating_and_all(params):
            results = forward(params, *others)
            return _floating(results), results

        _, pullback, results = jax.vjp(floating_and_all, params, has_aux=True)
        return results, pullback(cotangents)

    cotangents = _floating(jax.eval_shape(forward, *arguments))
    return jax.jit(forward_and_backward).lower(*_placed((cotangents, *arguments), sharding))


def lower_preset_step(preset: str, rows: int, chips: Sequence[Any]) -> jax.stages.Lowered:
    """Lowers the training step of a preset in float32, with a number of rows per chip."""
    batch_size = rows * len(chips)
    config = dataclasses.replace(PRESETS[preset], batch_size=batch_size, dtype="float32")
    return lower_train_step(config, chips)


def lower_train_step(config: TrainConfig, chips: Sequence[Any]) -> jax.stages.Lowered:
    """Lowers the training step that `python -m train` would run."""
    trainer = build_trainer(config, devices=chips)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.window + 1), jnp.int32)
    return Trainer.step.lower(
        trainer, trainer.abstract_state, _placed(tokens, trainer.sharding(tokens.ndim))
    )


def _layer(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer as a function, and the shapes of its arguments."""
    layer = case.abstract(jnp.float32)
    graphdef, params, others = nnx.split(layer, nnx.Param, ...)

    def forward(params, others, x, state):
        return nnx.merge(graphdef, params, others)(x, state)

    with jax.enable_x64(True):
        x = case.inputs()
    x = jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    return forward, (params, others, x, jax.eval_shape(lambda: layer.init_state(BATCH)))


def _floating(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _placed(tree: Any, sharding: Sharding) -> Any:
    """The shapes and dtypes of a tree, with a sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )
