"""States that are not carried as they should be, and masks that are not minded."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_models import LSTMState
from parity_tests.mutations.mutation import Mutation, replaced

STEPS = "steps equal sequence"
PAST_AND_FUTURE = "future has no influence and far past has"
PADDING = "padding has no influence"
DOCUMENTS = "documents in a row stay apart"


def mask_mutations() -> list[Mutation]:
    """What a layer may get wrong where sequences are cut, padded, packed or reversed."""
    masks = partial(Mutation, kind="states and masks")
    return [
        masks(
            "h and c swapped",
            "LSTMScratch",
            plant=replaced("jax_models.LSTM.sequence", from_swapped_state),
        ),
        *(
            masks(
                name,
                "torch.nn.LSTM, 1 layer",
                plant=replaced("jax_models.ops.lstm.recurrence", wrong),
                check=check,
            )
            for name, wrong, check in (
                ("state forgotten", from_zero, STEPS),
                ("state forgotten", from_zero, "cut equals uncut"),
                ("a little of another row", mixing_rows, "batch rows are independent"),
                ("a little of the next step", leaking_future, PAST_AND_FUTURE),
                ("state forgotten at each step", forgetting, PAST_AND_FUTURE),
                ("padding's first step taken", one_step_longer, PADDING),
                ("lengths forgotten", deaf_to("lengths"), PADDING),
                ("resets forgotten", deaf_to("reset"), DOCUMENTS),
            )
        ),
        *(
            masks(name, case, plant=replaced(target, deaf_to(mask)), check=check)
            for case, target in (
                ("CausalConv1D, kernel 4", "jax_models.ops.causal_conv.delayed"),
                ("RGLRU", "jax_models.ops.rg_lru.linear_recurrence"),
                ("RWKVTimeMix", "jax_models.ops.wkv"),
            )
            for name, mask, check in (
                ("resets forgotten", "reset", DOCUMENTS),
                ("lengths forgotten", "lengths", PADDING),
            )
        ),
        *(
            masks(
                f"online convolution without its {name}",
                "HyenaBlock, order 1, kernel 4",
                plant=replaced(f"jax_models.ops.online_conv.{function}", silenced),
                check=STEPS,
            )
            for name, function in (("tiles", "_tile"), ("steps ahead", "_ahead"))
        ),
        *(
            masks(
                name,
                "RNNBidirectional 1 layer",
                plant=replaced(f"jax_models.layers.bidirectional.{function}", wrong),
                check=check,
            )
            for name, function, wrong, check in (
                ("padding reversed, too", "reverse_time", reversing_padding, PADDING),
                ("resets not reversed", "document_ends", as_it_is, DOCUMENTS),
                ("nothing reversed", "reverse_time", as_it_is, PAST_AND_FUTURE),
            )
        ),
        *(
            masks(
                name,
                "RNNLanguageModel",
                plant=replaced("jax_models.models.language_model.positions_after", wrong),
                check=check,
            )
            for name, wrong, check in (
                ("positions count from 0", positions_from_0, STEPS),
                ("positions count through documents", positions_without_reset, DOCUMENTS),
            )
        ),
        masks(
            "padding not masked",
            "LSTMScratch",
            plant=replaced("jax_models.sequence.mask_padding", as_it_is),
            check="nan stays where it is",
        ),
    ]


def from_swapped_state(sequence):
    """The hidden state for the cell, and the cell for the hidden state."""
    return lambda self, x, state, *masks: sequence(self, x, LSTMState(*reversed(state)), *masks)


def from_zero(recurrence):
    """No step sees the state that is given."""
    return lambda step, state, products, x, **masks: recurrence(
        step, jax.tree.map(jnp.zeros_like, state), products, x, **masks
    )


def mixing_rows(recurrence):
    """Each row reads a little of the row above."""
    return lambda *args, **masks: recurrence(
        *args[:-1], args[-1] + 1e-6 * jnp.roll(args[-1], 1, axis=0), **masks
    )


def leaking_future(recurrence):
    """Each step reads a little of the next."""
    return lambda *args, **masks: recurrence(
        *args[:-1], args[-1] + 1e-6 * jnp.roll(args[-1], -1, axis=1), **masks
    )


def forgetting(recurrence):
    """No step sees another."""

    def short_recurrence(step, *args, **masks):
        return recurrence(
            lambda state, now: step(jax.tree.map(jnp.zeros_like, state), now), *args, **masks
        )

    return short_recurrence


def one_step_longer(recurrence):
    """Each row that has padding takes one step of it."""

    def long_recurrence(step, state, products, x, *, lengths=None, **masks):
        longer = None if lengths is None else jnp.minimum(lengths + 1, x.shape[1])
        return recurrence(step, state, products, x, lengths=longer, **masks)

    return long_recurrence


def deaf_to(mask: str):
    """A function that does not mind one of its masks."""
    return lambda function: lambda *args, **kwargs: function(*args, **{**kwargs, mask: None})


def silenced(function):
    """It returns zeros."""
    return lambda *args: 0 * function(*args)


def reversing_padding(_):
    """Each row from its last column, whatever its length."""
    return lambda x, lengths: jnp.flip(x, axis=1)


def as_it_is(_):
    """The first argument comes back."""
    return lambda x, *args: x


def positions_from_0(positions_after):
    """Each call begins at position 0."""
    return lambda start, *args: positions_after(jnp.zeros_like(start), *args)


def positions_without_reset(positions_after):
    """As if all documents were one."""
    return lambda start, time, reset: positions_after(start, time, None)
