"""The kernels of the distribution `twinscan-native` as functions, and the same functions by XLA."""

import ctypes
import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_models.ops.affine import affine
from jax_models.ops.gru import GRUState, gru, gru_step
from jax_models.ops.lstm import LSTMState, lstm, lstm_step
from jax_models.ops.products import Product
from jax_models.ops.recurrence import State, Step, recurrence
from jax_models.ops.rnn import STEPS, RNNState, rnn
from jax_models.ops.rows import Rows

INTERFACE = 3
"""The version of the arguments and results of the kernels, which `twinscan_native` states, too."""


@cache
def loading_error() -> str | None:
    """Loads the kernels and registers them with XLA. Returns why this failed, or None."""
    try:
        package = importlib.import_module("twinscan_native")
        library = ctypes.CDLL(package.path())
    except ImportError:
        return "the package twinscan-native is not installed (pip install ./native)"
    except OSError as error:
        return f"the library of twinscan-native cannot be loaded: {error}"
    if package.INTERFACE != INTERFACE:
        return "twinscan-native has another version (run pip install ./native again)"
    for kind in (LSTM, GRU, *RNNS.values()):
        for way in ("forward", "backward"):
            name = f"twinscan_{kind.name}_{way}"
            kernel = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, kernel, platform="cpu")
    return None


def from_gates_x(step: Callable[[State, Step], State], state: State, now: Step) -> State:
    """Makes a step whose inputs are the products of x, with the gates side by side."""

    def products(names, h):
        of_x = jnp.split(now.inputs, len(names), axis=-1)
        sums = zip(names, of_x, now.products(names, h), strict=True)
        return [(a, b) if name == "n" else a + b for name, a, b in sums]

    return step(state, now._replace(products=products))


class Kind(NamedTuple):
    """A recurrence for which there are kernels."""

    name: str
    """The recurrence in the names of the kernels."""
    gates: str
    step: Callable[[Any, Step], Any]
    state: Callable[..., Any]
    operator: Callable[..., Any]
    """The operator that runs the recurrence by XLA, and checks its weights."""
    num_kept: int
    """How many arrays the forward kernel keeps for the backward kernel, in each direction."""
    num_overwritten: int
    """How many of these, from the first on, the backward kernel overwrites with its results."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further attributes of the kernels."""


LSTM = Kind(
    "lstm", "ifgo", partial(from_gates_x, lstm_step), LSTMState, lstm, num_kept=2, num_overwritten=1
)
GRU = Kind(
    "gru", "rzn", partial(from_gates_x, gru_step), GRUState, gru, num_kept=2, num_overwritten=2
)
RNNS = {
    name: Kind(
        "rnn", "h", partial(from_gates_x, step), RNNState, rnn, 0, 0, (("relu", name == "relu"),)
    )
    for name, step in STEPS.items()
}


def kind_of(recurrence: Callable) -> Kind | None:
    """Returns the kind of a recurrence such as `ops.lstm` or `partial(ops.rnn, …)`, or None."""
    function = getattr(recurrence, "func", recurrence)
    options = getattr(recurrence, "keywords", {})
    if function is gru and options.get("reset_after", True):
        return GRU
    if function is rnn:
        return RNNS.get(options.get("nonlinearity", "tanh"))
    return LSTM if function is lstm else None


class Call(NamedTuple):
    """The static arguments of a call of a kernel."""

    kind: Kind
    way: Literal["forward", "backward"]
    keep: bool = False
    """Whether the forward kernel keeps what the backward kernel needs."""


def result_shapes(call: Call, operands: dict[str, Any]) -> dict[str, Any]:
    """The shapes of a kernel's results, in its order."""
    kernel, start = operands["kernel"], operands["start"]
    directions, hidden, gates = kernel.shape
    batch, time = operands["x" if call.way == "forward" else "y"].shape[:2]
    of_gates, of_state = (
        (kernel.update(shape=(batch, time, size)),) * directions for size in (gates, hidden)
    )
    if call.way == "forward":
        y = kernel.update(shape=(batch, time, directions * hidden))
        kept = (of_gates, of_state)[: call.kind.num_kept if call.keep else 0]
        return {"y": y, "last": start, "kept": kept}
    n_h = {"n_h": of_state} if call.kind == GRU else {}
    return {"gates_x": of_gates, **n_h, "start": start}


def by_kernel(call: Call, operands: dict[str, Any]) -> dict[str, Any]:
    """Calls the foreign function, which takes its operands in the order of this function."""
    names = ["x", "kernel_x", "bias", "kernel", "bias_hn", "start"]
    if call.way == "backward":
        names = ["d_y", "d_last", "kernel", "y", "start", "kept"]
    arrays = jax.tree.leaves([operands.get(name) for name in names])
    # The kernel reads lengths and, unless the array is empty, the restarts of each direction.
    kernel, rows = operands["kernel"], operands["rows"]
    directions, (batch, time, _) = len(kernel), operands[names[0]].shape
    lengths = jnp.full(batch, time, jnp.int32) if rows.lengths is None else rows.lengths
    reset = jnp.zeros((directions, batch, 0), bool)
    if rows.reset is not None:
        reset = jnp.stack([rows.restarts(reverse=index == 1) for index in range(directions)])
    options = {"reverse": np.int64(2 if directions == 2 else 0), **dict(call.kind.options)}
    results = result_shapes(call, jax.tree.map(jax.typeof, operands))
    shapes, tree = jax.tree.flatten([*results.values()])
    if call.way == "forward":
        aliases, options["keep"] = {}, call.keep
    else:
        first_kept = len(arrays) - call.kind.num_kept * directions
        aliases = {first_kept + i: i for i in range(call.kind.num_overwritten * directions)}
    name = f"twinscan_{call.kind.name}_{call.way}"
    function = jax.ffi.ffi_call(name, shapes, input_output_aliases=aliases)
    arrays = function(*arrays, lengths, reset, **options)
    return dict(zip(results, tree.unflatten(arrays), strict=True))


def by_xla(kind: Kind, rows: Rows, operands: dict[str, Any]):
    """Returns y and the last state without a kernel."""
    kernel, biases = operands["kernel"], operands.get("bias_hn")
    outputs, last_states = [], []
    for index, kernel_x in enumerate(operands["kernel_x"]):
        of_x = affine(operands["x"], kernel_x, operands["bias"][index])
        bias = None if biases is None else jnp.pad(biases[index], (2 * kernel.shape[1], 0))
        y, last = recurrence(
            kind.step,
            kind.state(*(s[index] for s in operands["start"])),
            Product(kernel[index], bias).gates(kind.gates),
            of_x,
            inputs=of_x,
            rows=rows,
            reverse=index == 1,
        )
        outputs.append(rows.masked(y))
        last_states.append(tuple(last))
    return jnp.concatenate(outputs, axis=-1), jax.tree.map(lambda *s: jnp.stack(s), *last_states)
