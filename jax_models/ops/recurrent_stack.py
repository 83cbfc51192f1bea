"""Stacks of gated recurrences: layers and directions over one sequence, on any platform."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked
from jax_models.ops.kernels.cudnn_lstm import cudnn_lstm, cudnn_pays, cudnn_refusal
from jax_models.ops.kernels.native import native_layer, native_pays, native_refusal
from jax_models.ops.lstm import LSTMState, lstm
from jax_models.ops.recurrence import State
from jax_models.ops.rows import Masks, Rows, given_rows

RecurrentMethod = Literal["auto", "xla", "native"]
LSTMMethod = Literal["auto", "xla", "native", "cudnn"]


@checked(batch_axes=(0, 1))
def recurrent_stack(
    recurrence: Callable[..., tuple[Float[Array, "batch time out"], State]],
    x: Float[Array, "batch time in"],
    state: State,
    cells: list[dict[str, Array]],
    *,
    num_directions: Literal[1, 2],
    method: RecurrentMethod = "auto",
    **masks: Unpack[Masks],
) -> tuple[Float[Array, "batch time out"], State]:
    """Runs layers of a recurrence one after the other, with the directions of a layer side by side.

    "native" runs the compiled CPU kernels of the package `twinscan-native`, which has the LSTM, the
    GRU with `reset_after`, and the RNN. "auto" uses them if the package is installed and supports
    the call, they are likely to be faster, and JAX's default device is a CPU.

    Args:
        recurrence: `ops.rnn`, `ops.lstm`, `ops.gru`, or a function of your own with the arguments
            `(x, state, *, reverse, **masks)` and weights. It passes `**masks` to `ops.recurrence`.
        x: the inputs of the first layer.
        state: its arrays are (layers · directions, batch, features), in torch's order: layer 0
            forward, layer 0 backward, layer 1 forward, …
        cells: the weights of each layer and direction, in the same order: the keyword arguments
            of `recurrence`.
        num_directions: 2 if each layer runs in both directions, and the next layer reads both
            outputs.
        method: what runs the layers: "native", "xla" or "auto".
        **masks: `lengths` and `reset`, as in `Masks`.

    Returns:
        The outputs of the last layer, and the last states.

    Raises:
        NotImplementedError: `method` is "native", which does not support the call; the message says
            why.
        ValueError: the number of cells is not the size of the first axis of the state's arrays.

    """
    return _stack(recurrence, x, state, cells, num_directions, method, given_rows(masks))


@checked(batch_axes=(0, 1))
def lstm_stack(
    x: Float[Array, "batch time in"],
    state: LSTMState,
    cells: list[dict[str, Array]],
    *,
    num_directions: Literal[1, 2],
    method: LSTMMethod = "auto",
    **masks: Unpack[Masks],
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """Runs the `recurrent_stack` of `lstm`, which has one more method, "cudnn".

    "auto" uses cuDNN if it supports the call, is likely to be faster, and the program runs on an
    NVIDIA GPU, even if it is traced on another device. On a CPU, it uses the native kernels as in
    `recurrent_stack`.

    Raises:
        NotImplementedError: `method` is "cudnn" or "native", which does not support the call; the
            message says why.

    """
    return _stack(lstm, x, state, cells, num_directions, method, given_rows(masks))


class _Kernel(NamedTuple):
    """A form of a stack that one platform has."""

    platform: str
    form: Callable
    refusal: str | None
    """Why it does not support the call, or None if it does."""
    pays: bool
    """Whether it supports the call and is likely to be faster than XLA."""


def _stack(
    recurrence: Callable,
    x: Float[Array, "batch time in"],
    state: Any,
    cells: list[dict[str, Array]],
    num_directions: Literal[1, 2],
    method: LSTMMethod,
    rows: Rows,
):
    sizes = [len(array) for array in jax.tree.leaves(state)]
    if not cells or len(cells) % num_directions or sizes != [len(cells)] * len(sizes):
        raise ValueError(
            f"cells: expected one for each of the {sizes} rows of the state's arrays, in "
            f"{num_directions} directions, got {len(cells)}"
        )
    layers = _Layers.of(recurrence, num_directions)
    refusal = native_refusal(recurrence, x, cells)
    form, pays = layers._replace(layer=native_layer), not refusal and native_pays(x)
    kernels = {"native": _Kernel("cpu", form, refusal, pays)}
    if recurrence is lstm:
        refusal = cudnn_refusal(x, cells, rows.reset)
        form, pays = _CuDNN(num_directions), not refusal and cudnn_pays(x)
        kernels["cudnn"] = _Kernel("cuda", form, refusal, pays)
    if method in kernels:
        kernel = kernels[method]
        if kernel.refusal:
            raise NotImplementedError(f"method={method!r}: {kernel.refusal}; use method='xla'")
        return kernel.form(x, state, cells, rows)
    faster = {kernel.platform: kernel.form for kernel in kernels.values() if kernel.pays}
    if method == "auto" and faster:
        return _by_platform((*faster.items(), ("default", layers)), x, state, cells, rows)
    return layers(x, state, cells, rows)


class _Layers(NamedTuple):
    """Layers of a recurrence. JAX reuses compiled programs for equal ones, unlike for closures."""

    layer: Callable
    """`layer(recurrence, x, state, cells, rows)` runs all directions of a layer."""
    recurrence: Callable
    options: tuple[tuple[str, Any], ...]
    num_directions: int

    @classmethod
    def of(cls, recurrence: Callable, num_directions: int) -> "_Layers":
        """Splits a `partial` into its function and its options."""
        if isinstance(recurrence, partial) and not recurrence.args:
            options = tuple(recurrence.keywords.items())
            return cls(_xla_layer, recurrence.func, options, num_directions)
        return cls(_xla_layer, recurrence, (), num_directions)

    def __call__(self, x, state, cells, rows: Rows):
        recurrence = partial(self.recurrence, **dict(self.options))
        last_states = []
        for first in range(0, len(cells), self.num_directions):
            directions = slice(first, first + self.num_directions)
            start = jax.tree.map(lambda s: s[directions], state)  # noqa: B023
            x, last_state = self.layer(recurrence, x, start, cells[directions], rows)
            last_states.append(last_state)
        return x, jax.tree.map(lambda *s: jnp.concatenate(s), *last_states)


def _xla_layer(recurrence: Callable, x, state, cells, rows: Rows):
    outputs, last_states = [], []
    for index, cell in enumerate(cells):
        start = jax.tree.map(lambda s: s[index], state)  # noqa: B023
        y, last_state = recurrence(x, start, **cell, rows=rows, reverse=index == 1)
        outputs.append(y.astype(x.dtype))
        last_states.append(last_state)
    return jnp.concatenate(outputs, axis=-1), jax.tree.map(lambda *s: jnp.stack(s), *last_states)


class _CuDNN(NamedTuple):
    """LSTMs by cuDNN."""

    num_directions: int

    def __call__(self, x, state, cells, rows: Rows):
        return cudnn_lstm(x, state, cells, rows.lengths, bidirectional=self.num_directions == 2)


@partial(jax.jit, static_argnums=0)  # otherwise the default device would decide
def _by_platform(forms: tuple[tuple[str, Callable], ...], *args):
    functions = {platform: partial(form) for platform, form in forms}  # JAX needs weak references
    return jax.lax.platform_dependent(*args, **functions)
