"""Stacks of gated recurrences: of the LSTM, the GRU, the RNN, or a function of your own."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import jax
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.forms import NATIVE, Form, Operator
from jax_models.ops.gated.cudnn import CUDNN
from jax_models.ops.gated.definition import LSTMState, State, lstm
from jax_models.ops.gated.stack import Stack, run_definition, run_xla
from jax_models.ops.rows import Masks, given_rows

RECURRENT_STACK = Operator(
    "recurrent_stack",
    (CUDNN, Form("xla", run_xla), Form("definition", run_definition)),
    (NATIVE,),
)


RecurrentMethod = Annotated[str, "auto or the name of a form"]
"""What runs a stack."""
LSTMMethod = RecurrentMethod
"""What runs a stack of LSTMs."""


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

    Args:
        recurrence: `ops.rnn`, `ops.lstm`, `ops.gru`, or a function of your own with the arguments
            `(x, state, *, reverse, **options)` and weights. It passes `**options` to
            `ops.recurrence`.
        x: the inputs of the first layer.
        state: its arrays are (layers · directions, batch, features), in torch's order: layer 0
            forward, layer 0 backward, layer 1 forward, …
        cells: the weights of each layer and direction, in the same order: the keyword arguments
            of `recurrence`.
        num_directions: 2 if each layer runs in both directions, and the next layer reads both
            outputs.
        method: the form that runs. "cudnn" is NVIDIA's LSTM, for its GPUs. "native" is the package
            `twinscan-native`, which has CPU kernels for the LSTM, the GRU with `reset_after`, and
            the RNN. "xla" runs every recurrence on every platform, and so does "definition", a
            plain `lax.scan`. "auto" chooses the form that is likely to be the fastest for the call,
            on the platform that runs the program. `ops.forms_of` shows the choice.
        **masks: `lengths` and `reset`, or `rows`, as in `Masks`.

    Returns:
        The outputs of the last layer, and the last states.

    Raises:
        NotImplementedError: the form that `method` names does not support the call; the message
            says why.
        ValueError: the number of cells is not the size of the first axis of the state's arrays, or
            there is no such method.

    """
    sizes = [len(array) for array in jax.tree.leaves(state)]
    if not cells or len(cells) % num_directions or sizes != [len(cells)] * len(sizes):
        raise ValueError(
            f"cells: expected one for each of the {sizes} rows of the state's arrays, in "
            f"{num_directions} directions, got {len(cells)}"
        )
    options = ()
    if isinstance(recurrence, partial) and not recurrence.args:
        recurrence, options = recurrence.func, tuple(recurrence.keywords.items())
    rows = given_rows(masks)
    call = Stack(recurrence, options, x, state, cells, rows, num_directions)
    return RECURRENT_STACK(call, method)


def lstm_stack(
    x: Float[Array, "batch time in"],
    state: LSTMState,
    cells: list[dict[str, Array]],
    **options: Any,
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """Runs the `recurrent_stack` of `lstm`, with the same options."""
    return recurrent_stack(lstm, x, state, cells, **options)
