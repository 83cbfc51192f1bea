"""Stacks of gated recurrences: layers one after the other, each in one direction or in two."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.rows import Rows

Results = tuple[Float[Array, "batch time out"], Any]
"""The outputs of the last layer, and the last states."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "state", "cells", "rows"),
    meta_fields=("recurrence", "options", "num_directions"),
)
@dataclasses.dataclass(frozen=True)
class Stack:
    """A call of `ops.recurrent_stack`, whose arguments it contains."""

    recurrence: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    """Further keyword arguments of the recurrence, such as `nonlinearity`."""
    x: Float[Array, "batch time in"]
    state: Any
    cells: list[dict[str, Array]]
    rows: Rows
    num_directions: int

    def by_layer(self, run_layer: Callable[["Stack"], Results]) -> Results:
        """Runs one layer after the other, each of which is a stack of its own."""
        x, last_states = self.x, []
        for first in range(0, len(self.cells), self.num_directions):
            directions = slice(first, first + self.num_directions)
            start = jax.tree.map(lambda s: s[directions], self.state)  # noqa: B023
            cells = self.cells[directions]
            x, last_state = run_layer(dataclasses.replace(self, x=x, state=start, cells=cells))
            last_states.append(last_state)
        return x, jax.tree.map(lambda *s: jnp.concatenate(s), *last_states)


def run_xla(call: Stack) -> Results:
    """Runs all layers by the form of `recurrence` that is the best for XLA."""
    return call.by_layer(run_layer)


def run_definition(call: Stack) -> Results:
    """Runs all layers by the definition of `recurrence`."""
    return call.by_layer(partial(run_layer, method="definition"))


def run_layer(layer: Stack, **options: Any) -> Results:
    """Runs the directions of a layer, whose outputs are side by side."""
    options = {**dict(layer.options), **options, "rows": layer.rows}
    outputs, last_states = [], []
    for index, cell in enumerate(layer.cells):
        start = jax.tree.map(lambda s: s[index], layer.state)  # noqa: B023
        y, last_state = layer.recurrence(layer.x, start, **cell, **options, reverse=index == 1)
        outputs.append(y.astype(layer.x.dtype))
        last_states.append(last_state)
    return jnp.concatenate(outputs, axis=-1), jax.tree.map(lambda *s: jnp.stack(s), *last_states)
