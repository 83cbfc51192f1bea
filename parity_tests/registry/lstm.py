"""The LSTM, with the keys of torch_ref and of torch.nn."""

from functools import partial

import jax
import jax.numpy as jnp
from torch import nn

import torch_ref
from jax_models import LSTM, LSTMState
from jax_models.ops import Rows
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    CUT,
    DOCUMENTS,
    PADDING,
    PAST_AND_FUTURE,
    ROWS,
    STEPS,
    Mutation,
    gates_swapped,
    ignoring,
    replaced,
    transposed,
    zeroed,
)
from parity_tests.registry.torch_nn import STACKS, torch_nn_cases

lstm = partial(paired, architecture="lstm", layout="scratch")
plain = torch_nn_cases("LSTM", nn.LSTM, LSTM, method="xla")
projected = torch_nn_cases("LSTM proj", partial(nn.LSTM, proj_size=4), LSTM, proj_features=4)

CASES = [
    lstm(
        "LSTMScratch",
        partial(LSTM, 5, 6, method="xla"),
        partial(torch_ref.LSTMScratch, 5, 6),
    ),
    lstm(
        "LSTMScratch no bias",
        partial(LSTM, 5, 6, use_bias=False),
        partial(torch_ref.LSTMScratch, 5, 6, use_bias=False),
    ),
    lstm(
        "LSTMProj",
        partial(LSTM, 5, 6, proj_features=4, proj_bias=True),
        partial(torch_ref.LSTMProj, 5, 6, 4),
    ),
    lstm(
        "LSTMProj no bias",
        partial(LSTM, 5, 6, proj_features=4, use_bias=False),
        partial(torch_ref.LSTMProj, 5, 6, 4, proj_bias=False, use_bias=False),
    ),
    lstm(
        "LSTMScratch peepholes",
        partial(LSTM, 5, 6, use_peepholes=True),
        partial(torch_ref.LSTMScratch, 5, 6, use_peepholes=True),
    ),
    lstm(
        "LSTMProj peepholes",
        partial(LSTM, 5, 6, proj_features=4, proj_bias=True, use_peepholes=True),
        partial(torch_ref.LSTMProj, 5, 6, 4, use_peepholes=True),
    ),
    lstm(
        "LSTMDeep",
        partial(LSTM, 5, 6, num_layers=3, recurrent_bias=False),
        partial(torch_ref.LSTMDeep, 5, 6, 3),
        layout="labml",
    ),
    *plain,
    *projected,
    *(
        lstm(
            f"torch.nn.LSTM, {name} by cuDNN",
            partial(LSTM, 5, 6, **stack, method="cudnn"),
            partial(nn.LSTM, 5, 6, batch_first=True, **stack),
            layout="torch.nn",
            dtypes=("float32",),
            platforms=("gpu",),
        )
        for name, stack in STACKS.items()
    ),
]


def from_swapped_state(sequence):
    """Swaps the hidden state and the cell state."""
    return lambda self, x, state, *masks: sequence(self, x, LSTMState(*reversed(state)), *masks)


def from_zero(recurrence):
    """Starts from a state of zeros instead of the given state."""
    return lambda step, state, products, x, **masks: recurrence(
        step, jax.tree.map(jnp.zeros_like, state), products, x, **masks
    )


def mixing_rows(recurrence):
    """Adds a little of the row above to each row."""
    return lambda *args, **masks: recurrence(
        *args[:-1], args[-1] + 1e-6 * jnp.roll(args[-1], 1, axis=0), **masks
    )


def leaking_future(recurrence):
    """Adds a little of the next step to each step."""
    return lambda *args, **masks: recurrence(
        *args[:-1], args[-1] + 1e-6 * jnp.roll(args[-1], -1, axis=1), **masks
    )


def forgetting(recurrence):
    """Starts each step from a state of zeros."""

    def short_recurrence(step, *args, **masks):
        return recurrence(
            lambda state, now: step(jax.tree.map(jnp.zeros_like, state), now), *args, **masks
        )

    return short_recurrence


def one_step_longer(recurrence):
    """Takes one step of the padding in each row that has any."""

    def long_recurrence(step, state, products, x, *, rows, **options):
        if rows.lengths is not None:
            longer = jnp.minimum(rows.lengths + 1, x.shape[1])
            rows = Rows.of(x.shape[1], longer, rows.reset)
        return recurrence(step, state, products, x, rows=rows, **options)

    return long_recurrence


in_two_dtypes = partial(Mutation, kind="weights", dtypes=("float64", "float32"))
masks = partial(Mutation, kind="states and masks")

MUTATIONS = [
    *(
        mutation
        for case in ("LSTMScratch", projected[0].name)
        for mutation in (
            in_two_dtypes("gates i and f swapped", case, plant=gates_swapped("cells.0", 4)),
            in_two_dtypes("recurrent bias forgotten", case, plant=zeroed("cells.0.bias_hh")),
            in_two_dtypes(
                "recurrent matrix transposed", case, plant=transposed("cells.0.kernel_hh")
            ),
        )
    ),
    in_two_dtypes("bias forgotten", "LSTMDeep", plant=zeroed("cells.2.bias_ih")),
    in_two_dtypes("peepholes forgotten", "LSTMScratch peepholes", plant=zeroed("cells.0.peephole")),
    masks(
        "h and c swapped",
        "LSTMScratch",
        plant=replaced("jax_models.LSTM.sequence", from_swapped_state),
    ),
    masks(
        "padding not masked",
        "LSTMScratch",
        plant=replaced("jax_models.ops.Rows.masked", lambda _: lambda rows, x: x),
        check="nan stays where it is",
    ),
    *(
        masks(
            name,
            "LSTMScratch",
            plant=replaced("jax_models.ops.gated.definition.recurrence", wrong),
            check=check,
        )
        for name, wrong, check in (
            ("state forgotten", from_zero, STEPS),
            ("state forgotten", from_zero, CUT),
            ("a little of another row", mixing_rows, ROWS),
            ("a little of the next step", leaking_future, PAST_AND_FUTURE),
            ("state forgotten at each step", forgetting, PAST_AND_FUTURE),
            ("padding's first step taken", one_step_longer, PADDING),
            ("lengths forgotten", ignoring("lengths"), PADDING),
            ("resets forgotten", ignoring("reset"), DOCUMENTS),
        )
    ),
]

# Without compiled kernels, so that the times do not depend on what is installed.
COMPARED = {"LSTM": lambda width, **options: LSTM(width, width, method="xla", **options)}
