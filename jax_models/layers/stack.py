"""Sequence layers that run one after the other."""

__all__ = ["Stack"]

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from jax_models.auto_axes import assigned_variables
from jax_models.checks.values import described
from jax_models.ops import Rows
from jax_models.sequence import SequenceLayer, refuse_time_major
from jax_models.weights import Layouts, nested

Remat = Literal["none", "dots", "full"]
"""The part of a layer that the backward pass recomputes: nothing, everything except the results of
matrix products, or everything except the layer's input."""

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class PureLayer(NamedTuple):
    """A layer as a function of its arrays. Equal layers share a trace and a compiled program."""

    graphdef: nnx.GraphDef
    remat: Remat

    def __call__(
        self,
        x: Float[Array, "batch time in"],
        arrays: nnx.State,
        state: Any,
        rows: Rows,
    ) -> tuple[Float[Array, "batch time out"], Any, nnx.State]:
        """Returns y, the last state, and the variables that the layer assigned to."""

        # Build the layer inside `run`, so that all its arrays are arguments, as `jax.checkpoint`
        # requires.
        def run(x, arrays, state):
            layer = nnx.merge(self.graphdef, arrays, copy=True)
            check_in_features(x, layer)
            y, last_state = layer.sequence(x, state, rows)
            return y, last_state, assigned_variables(arrays, nnx.state(layer))

        if self.remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[self.remat])
        return run(x, arrays, state)


class Stack(SequenceLayer[tuple[Any, ...]]):
    """A stack of layers, each of which reads the outputs of the one below.

        >>> rngs = nnx.Rngs(0)
        >>> layer = Stack([LSTM(64, 256, rngs=rngs), Hawk(256, rngs=rngs)])
        >>> y, state = layer(jnp.ones((8, 100, 64)))

    The state is the tuple of the layers' states, the lowest first. JAX traces neighboring layers of
    equal structure only once. The `dtype` and `param_dtype` of the stack are those of the lowest
    layer.

    Args:
        layers: at least one; each returns as many features as the next one reads.
        remat: what the backward pass recomputes to save memory. "none": nothing. "dots": everything
            except the results of matrix products. "full": everything except each layer's input.
            With "dots" or "full", the layers are also scanned, because XLA's CPU backend would
            merge an unrolled layer with its recomputation.
        scan_layers: whether to compile only one layer, as the body of a `lax.scan` over the stacked
            arrays of all layers. A single step runs the layers in turn and stacks nothing.

    Raises:
        TypeError: `layers` is not iterable, or an item is not a `SequenceLayer`.
        ValueError: `layers` is empty, there is no such `remat`, a layer has `time_major`, or the
            number of features that a layer reads is not the number that the layer below returns.

    Layouts: those that all layers have. The keys of layer i begin with `{i}.`.

    """

    divides_time = True

    def __init__(
        self,
        layers: Iterable[SequenceLayer],
        *,
        remat: Remat = "none",
        scan_layers: bool = False,
    ):
        if not isinstance(layers, Iterable):
            raise TypeError(f"layers: expected a list of layers, got {described(layers)}")
        listed = nnx.List(layers)
        if not listed:
            raise ValueError("layers: expected at least one, got none")
        for i, layer in enumerate(listed):
            if not isinstance(layer, SequenceLayer):
                raise TypeError(f"layers[{i}]: expected a SequenceLayer, got {described(layer)}")
            refuse_time_major(f"layers[{i}]", layer)
        for below, layer in itertools.pairwise(listed):
            check_in_features(_output_shape(below), layer)
        self._set_layers(listed, remat, scan_layers)

    def _set_layers(self, layers: nnx.List[SequenceLayer], remat: Remat, scan_layers: bool) -> None:
        """Sets the layers, whose sizes must fit, and the attributes that follow from them."""
        self.layers = layers
        self.remat: Remat = remat
        self.scan_layers = scan_layers
        self.in_features = self.layers[0].in_features
        self.dtype, self.param_dtype = self.layers[0].dtype, self.layers[0].param_dtype
        self.causal = all(layer.causal for layer in self.layers)
        self.resettable = all(layer.resettable for layer in self.layers)

    def init_state(self, batch_size: int) -> tuple[Any, ...]:
        return tuple(layer.init_state(batch_size) for layer in self.layers)

    def start(self, batch_size: int) -> tuple[Any, ...]:
        return tuple(layer.start(batch_size) for layer in self.layers)

    def split(self, x):
        return self.layers[0].split(x)

    def sequence(self, x, state, rows):
        """Runs all layers, the lowest first.

        An eager call runs them one by one. A traced call groups neighboring layers of equal
        structure. It traces each group once and unrolls it, or with `scan_layers` or `remat`, runs
        it as a scan.
        """
        # Eager: run the layers one by one, because there is no trace to share.
        leaves = jax.tree.leaves((x, state, nnx.state(self)))
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            last_states = []
            for layer, layer_state in zip(self.layers, state, strict=True):
                check_in_features(x, layer)  # the caller may have replaced a layer
                x, last_state = layer.sequence(x, layer_state, rows)
                last_states.append(last_state)
            return x, tuple(last_states)
        # Traced: group neighbors of equal structure, and trace each group once.
        pairs = zip(self.layers, state, strict=True)
        last_states = []
        for _, alike in itertools.groupby(pairs, lambda pair: _structure(*pair)):
            layers, states = map(list, zip(*alike, strict=True))
            # Cast x as the layers do, so that the first layer reads the same dtype as the others
            # and shares their trace.
            first, *_ = jax.tree.leaves(x)
            dtype = layers[0].computation_dtype(first)
            x = jax.tree.map(lambda stream: stream.astype(dtype), x)  # noqa: B023
            run = _scanned if self._scans(layers, first.shape[1]) else _unrolled
            pure = PureLayer(nnx.graphdef(layers[0]), self.remat)
            x, results = run(pure, x, layers, states, rows)
            last_states += results
        return x, tuple(last_states)

    def _scans(self, layers: Sequence[SequenceLayer], time: int) -> bool:
        """Whether to scan: on request, over several steps of layers without shared variables."""
        asked_for = self.scan_layers or self.remat != "none"
        if not asked_for or len(layers) == 1 or time == 1:
            return False
        apart = sum(len(jax.tree.leaves(nnx.state(layer))) for layer in layers)
        return len(jax.tree.leaves(nnx.state(layers))) == apart

    def torch_layouts(self) -> Layouts:
        """The layouts that all layers have, with numbered keys."""
        layouts = [layer.torch_layouts() for layer in self.layers]
        return {
            name: [
                row
                for i, layer in enumerate(layouts)
                for row in nested(layer[name], f"layers.{i}", str(i))
            ]
            for name in layouts[0]
            if all(name in layer for layer in layouts)
        }


def check_in_features(x: Any, layer: SequenceLayer) -> None:
    """Refuses a layer that does not read as many features as the layer below returns."""
    features = sum(stream.shape[-1] for stream in jax.tree.leaves(x))
    if features != layer.in_features:
        raise ValueError(
            f"layers: expected in_features={features} of the {type(layer).__name__}, as many as "
            f"the layer below it returns, got {layer.in_features}"
        )


def _output_shape(layer: SequenceLayer) -> jax.ShapeDtypeStruct:
    """The shape of a layer's outputs for one step of one row, found without running the layer."""
    x = jax.ShapeDtypeStruct((1, 1, layer.in_features), layer.dtype or layer.param_dtype)
    graphdef, arrays = nnx.split(layer)
    unsharded = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    return _first_step.eval_shape(graphdef, unsharded, x)


@partial(jax.jit, static_argnums=0)  # traced once for all equal layers
def _first_step(graphdef: nnx.GraphDef, arrays: nnx.State, x: Array) -> Array:
    layer = nnx.merge(graphdef, arrays, copy=True)
    return layer.joined_sequence(x, layer.start(1), Rows())[0]


_compiled = jax.jit(PureLayer.__call__, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _compiled_scan(pure: PureLayer, x, arrays_and_states, rows):
    def step(x, arrays_and_state):
        arrays, state = arrays_and_state
        y, *others = pure(x, arrays, state, rows)
        return y, others

    return jax.lax.scan(step, x, arrays_and_states)


def _unrolled(
    pure: PureLayer,
    x: Array,
    layers: Sequence[SequenceLayer],
    states: Sequence[Any],
    rows: Rows,
) -> tuple[Array, list[Any]]:
    """Runs layers of equal structure one by one, with a single trace."""
    last_states = []
    for layer, state in zip(layers, states, strict=True):
        x, last_state, assigned = _compiled(pure, x, nnx.state(layer), state, rows)
        nnx.update(layer, assigned)
        last_states.append(last_state)
    return x, last_states


def _scanned(
    pure: PureLayer,
    x: Array,
    layers: Sequence[SequenceLayer],
    states: Sequence[Any],
    rows: Rows,
) -> tuple[Array, list[Any]]:
    """Runs layers of equal structure as one scan, whose body is compiled once."""
    inputs = [(nnx.state(layer), state) for layer, state in zip(layers, states, strict=True)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)
    x, outputs = _compiled_scan(pure, x, stacked, rows)
    last_states = []
    for i, layer in enumerate(layers):
        last_state, assigned = jax.tree.map(lambda a: a[i], outputs)  # noqa: B023
        nnx.update(layer, assigned)
        last_states.append(last_state)
    return x, last_states


def _structure(layer: SequenceLayer, state: Any) -> Any:
    """Returns a key that is equal for layers that can share one compiled program."""
    graphdef, arrays = nnx.split(layer)
    leaves, treedef = jax.tree.flatten((arrays, state))
    return graphdef, treedef, [jax.typeof(leaf) for leaf in leaves]
