"""The recurrences of torch.nn by the kernels of twinscan-native, if that package is installed."""

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from parity_tests.registry import gru, lstm, rnn
from parity_tests.registry.mutation import (
    CUT,
    DOCUMENTS,
    PADDING,
    PAST_AND_FUTURE,
    ROWS,
    STEPS,
    Mutation,
    Plant,
    replaced,
    transposed,
)

Change = Callable[[dict[str, Any]], dict[str, Any]]

CASES = [
    dataclasses.replace(
        case,
        name=f"{case.name}, native",
        layer=partial(case.layer, method="native"),
        dtypes=("float64", "float32"),
        platforms=("cpu",),
    )
    for case in (*lstm.plain, *gru.torch_nn, *rnn.tanh, *rnn.relu)
    if importlib.util.find_spec("twinscan_native")
]


def changed(pass_name: str, change: Change) -> Plant:
    """Changes operands of the forward or the backward kernels."""

    def wrong(by_library):
        def called(kernel, operands):
            is_changed = kernel.pass_name == pass_name
            return by_library(kernel, operands | (change(operands) if is_changed else {}))

        return called

    return replaced("twinscan_native.kernels.Kernel.by_library", wrong)


def from_zero(operands):
    """Starts from a state of zeros."""
    return {"start": jax.tree.map(jnp.zeros_like, operands["start"])}


def mixing(axis: int, shift: int) -> Change:
    """Adds a little of another row or of another step to each step."""

    def mixed(operands):
        return {"x": operands["x"] + 1e-6 * jnp.roll(operands["x"], shift, axis)}

    return mixed


def ignoring(mask: str) -> Change:
    """Ignores the lengths or the resets."""
    return lambda operands: {"rows": dataclasses.replace(operands["rows"], **{mask: None})}


def without_last_gradient(operands):
    """Ignores the gradient of the last state."""
    return {"d_last": jax.tree.map(jnp.zeros_like, operands["d_last"])}


MUTATIONS = [
    *(
        Mutation(name, case.name, "states and masks", changed("forward", change), check)
        for case in CASES[:1]
        for name, change, check in (
            ("state forgotten", from_zero, STEPS),
            ("state forgotten", from_zero, CUT),
            ("a little of another row", mixing(0, 1), ROWS),
            ("a little of the next step", mixing(1, -1), PAST_AND_FUTURE),
            ("lengths forgotten", ignoring("lengths"), PADDING),
            ("resets forgotten", ignoring("reset"), DOCUMENTS),
        )
    ),
    *(
        Mutation(name, case.name, "forward", plant, dtypes=case.dtypes)
        for case in CASES
        if "both ways" in case.name
        for name, plant in (
            ("recurrent matrix transposed", transposed("cells.1.kernel_hh")),
            ("gradient of the last state forgotten", changed("backward", without_last_gradient)),
        )
    ),
]
