"""Stacks of gated recurrences: layers and directions over one sequence, on any platform."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked
from jax_models.ops.kernels.cudnn_lstm import cudnn_lstm, cudnn_pays, cudnn_refusal
from jax_models.ops.lstm import LSTMState, lstm
from jax_models.ops.recurrence import State
from jax_models.ops.rows import Masks, Rows, given_rows

LSTMMethod = Literal["auto", "xla", "cudnn"]


@checked(batch_axes=(0, 1))
def recurrent_stack(
    recurrence: Callable[..., tuple[Float[Array, "batch time out"], State]],
    x: Float[Array, "batch time in"],
    state: State,
    cells: list[dict[str, Array]],
    *,
    num_directions: Literal[1, 2],
    **masks: Unpack[Masks],
) -> tuple[Float[Array, "batch time out"], State]:
    """Runs layers of a recurrence one after the other, with the directions of a layer side by side.

    Args:
        recurrence: `ops.rnn`, `ops.lstm` or `ops.gru`.
        x: the inputs of the first layer.
        state: its arrays are (layers · directions, batch, features), in torch's order: layer 0
            forward, layer 0 backward, layer 1 forward, …
        cells: the weights of `recurrence` for each layer and direction, in the same order.
        num_directions: 2 if each layer runs in both directions, and the next layer reads both
            outputs.
        **masks: `lengths` and `reset`, as in `Masks`.

    Returns:
        The outputs of the last layer, and the last states.

    Raises:
        ValueError: the number of cells is not the size of the first axis of the state's arrays.

    """
    rows = [len(array) for array in jax.tree.leaves(state)]
    if not cells or len(cells) % num_directions or rows != [len(cells)] * len(rows):
        raise ValueError(
            f"cells: expected one for each of the {rows} rows of the state's arrays, in "
            f"{num_directions} directions, got {len(cells)}"
        )
    last_states = []
    for first in range(0, len(cells), num_directions):
        outputs = []
        for direction in range(num_directions):
            index = first + direction
            y, last_state = recurrence(
                x,
                jax.tree.map(lambda s: s[index], state),  # noqa: B023
                **cells[index],
                **masks,
                reverse=direction == 1,
            )
            outputs.append(y.astype(x.dtype))
            last_states.append(last_state)
        x = jnp.concatenate(outputs, axis=-1)
    return x, jax.tree.map(lambda *s: jnp.stack(s), *last_states)


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
    """Runs the `recurrent_stack` of `lstm`, by XLA or by cuDNN.

    "auto" uses cuDNN if it supports the call, is likely to be faster, and the program runs on an
    NVIDIA GPU, even if it is traced on another device.

    Raises:
        NotImplementedError: `method` is "cudnn", which does not support the call; the message says
            why.

    """
    if not cells:
        raise ValueError("cells: expected at least one, got none")
    rows = given_rows(masks)
    refusal = cudnn_refusal(x, cells, rows.reset)
    if method == "cudnn":
        if refusal:
            raise NotImplementedError(f"LSTM: method='cudnn': {refusal}; use method='xla'")
        return cudnn_lstm(x, state, cells, rows.lengths, bidirectional=num_directions == 2)
    if method == "auto" and not refusal and cudnn_pays(x):
        return _by_cudnn_on_gpus(num_directions, x, state, cells, rows)
    return recurrent_stack(lstm, x, state, cells, num_directions=num_directions, **masks)


@partial(jax.jit, static_argnums=0)  # otherwise the default device would decide
def _by_cudnn_on_gpus(num_directions: Literal[1, 2], x, state, cells, rows: Rows):
    def by_cudnn(x, state, cells, rows: Rows):
        return cudnn_lstm(x, state, cells, rows.lengths, bidirectional=num_directions == 2)

    def by_xla(x, state, cells, rows: Rows):
        return recurrent_stack(lstm, x, state, cells, num_directions=num_directions, rows=rows)

    return jax.lax.platform_dependent(x, state, cells, rows, cuda=by_cudnn, default=by_xla)
