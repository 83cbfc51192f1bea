"""Tells which gates of torch's LSTM or GRU depart. torch computes all of them in one operation."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.tolerance import rms, ulp
from parity_tests.engine.locate.evidence import DEPARTS, Evidence
from parity_tests.engine.locate.search import Search, WantedArray, watch_jax
from parity_tests.engine.problem import Arrays, Problem, all_in_dtype
from parity_tests.engine.traces.trace import BACKWARD, Call

GATES = {
    f"torch.nn.modules.rnn.{name}.forward": gates
    for name, gates in {"LSTM": "ifgo", "LSTMCell": "ifgo", "GRU": "rzn", "GRUCell": "rzn"}.items()
}
"""The gates of torch's own layers, in their order in the weights, by the function that runs."""
KEYS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
"""The names of the weights of one layer in one direction."""
MOST_STEPS = 64
"""The number of steps whose gates are compared."""
ROUNDING_ULPS = 100.0
"""How far a gate may be off, in ulp, where no bound is known for it."""
ROUNDING_SHARE = 1e-3
"""The part of the largest error of a gate that weights rounded to float32 may explain."""
COMPUTED = "JAX computes all of them as torch does, and departs in what follows"
"""What the line says if no gate departs. JAX may still change a gate before it uses it."""


@dataclasses.dataclass(frozen=True)
class LayerGates:
    """The gates of one layer in one direction."""

    where: str
    """The layer and the direction, if there are several."""
    steps: Sequence[Arrays]
    """The gates of each step by name, in the order in which the layer runs."""


def gates_that_depart(problem: Problem, evidence: Evidence, call: Call) -> Iterator[str]:
    """Remarks on the gates that depart, if the culprit is torch's LSTM or GRU and JAX has gates.

    Forward, the gates are searched for among all arrays that JAX computes. Backward, the gradients
    of the weights are compared gate by gate.
    """
    prefix = f"{call.name}." if call.name else ""
    weights = all_in_dtype(problem.state_dict, "float64")
    weights = {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)}
    is_packed = any(label.endswith("batch_sizes") for label in call.slots["inputs"])
    if call.function not in GATES or not {"weight_ih", "weight_ih_l0"} & {*weights} or is_packed:
        return
    if evidence.direction is BACKWARD:
        yield from _gradients_that_depart(evidence, call, prefix)
    else:
        yield from _gates_that_depart(problem, evidence, call, weights)


def _gates_that_depart(
    problem: Problem, evidence: Evidence, call: Call, weights: Arrays
) -> Iterator[str]:
    """The first step in which gates depart, and which ones; or their order in JAX."""
    # Look for the gates of all steps among JAX's arrays, and for those of the first two steps if
    # the gates have any other order.
    names = GATES[call.function]
    layers = [*layers_of(call, weights)]
    steps = [(layer, step) for layer in layers for step in range(len(layer.steps))]
    orders = [order for order in map("".join, itertools.permutations(names)) if order != names]
    if len(layers[0].steps) < 2:  # the second step tells how the first one combined its gates
        orders = []
    places = [(layer.where, step, layer.steps[step]) for layer, step in steps]
    for order in orders:
        first = next(layers_of(call, _in_order(weights, names, order), num_steps=2))
        places += [(order, step, gates) for step, gates in enumerate(first.steps)]
    wanted = {
        (where, step, name): WantedArray(gate)
        for where, step, gates in places
        for name, gate in gates.items()
    }
    search = Search([*wanted.values()])
    watch_jax(problem, evidence.reference, search.see, is_forward=True)
    search.finish()

    # JAX may hold the weights in float32 even if it computes in float64. Their rounding must not
    # count as a departure beside errors that are much larger.
    bound = max(evidence.min_bound, ROUNDING_ULPS * ulp(jnp.dtype(evidence.reference.dtype)))
    largest = max(each.error for each in search.wanted)
    bound = max(bound, min(ROUNDING_ULPS * ulp(jnp.dtype("float32")), ROUNDING_SHARE * largest))
    agree = {place: each.error <= bound for place, each in wanted.items()}
    if not any(agree.values()):
        return
    for order in orders:
        if all(agree[order, step, name] for step in range(2) for name in names):
            yield f"gates: JAX uses the weights of {_and(order)} for {_and(names)}"
            return

    # The first step in which a gate departs tells which one, because all later ones depart, too.
    for layer, step in steps:
        right = [name for name in names if agree[layer.where, step, name]]
        wrong = [name for name in names if name not in right]
        if wrong and (right or step == 0):
            clauses = [(right, "agree"), (wrong, "depart")]
            parts = [
                f"{_and(gates)} {verb}{'s' * (len(gates) == 1)}" for gates, verb in clauses if gates
            ]
            yield f"gates{layer.where} in step {step + 1}: {', '.join(parts)}"
            return
        if wrong:
            yield f"gates{layer.where} in step {step}: {COMPUTED}"
            return
    yield f"gates: {COMPUTED}"


def _in_order(weights: Arrays, names: str, order: str) -> Arrays:
    """The weights with the gates in another order."""
    result = dict(weights)
    for key in weights:
        if key.startswith(("weight_ih", "weight_hh", "bias_ih", "bias_hh")):
            parts = dict(zip(names, np.split(weights[key], len(names)), strict=True))
            result[key] = np.concatenate([parts[name] for name in order])
    return result


def _gradients_that_depart(evidence: Evidence, call: Call, prefix: str) -> Iterator[str]:
    """For each weight whose gradient departs, the gates in which it does."""
    actual, names = evidence.jax_trace.results["weight gradients"], GATES[call.function]
    for key, gradient in call.slots["weight gradients"].items():
        is_stacked = len(gradient) % len(names) == 0 and "weight_hr" not in key
        departs = evidence.states[call, BACKWARD.outgoing].get(f"weight {key}") == DEPARTS
        if not departs or not is_stacked:
            continue
        parts = (np.split(each, len(names)) for each in (actual[key], gradient))
        errors = [rms(ours - theirs) / rms(gradient) for ours, theirs in zip(*parts, strict=True)]
        wrong = [n for n, error in zip(names, errors, strict=True) if error > evidence.min_bound]
        if 0 < len(wrong) < len(names):
            yield f"gradient of {key.removeprefix(prefix)} departs in {_and(wrong)} alone"


def layers_of(call: Call, weights: Arrays, num_steps: int | None = None) -> Iterator[LayerGates]:
    """The gates of each layer and direction of a torch LSTM or GRU, from its recorded inputs.

    With `num_steps`, only the first steps of the input are read.
    """
    options = {
        "num_layers": 1,
        "bidirectional": False,
        "batch_first": False,
        **call.hyperparameters,
    }
    x, *states = call.slots["inputs"].values()
    if call.function.endswith("Cell.forward"):
        x, suffixes = x.reshape(1, -1, x.shape[-1]), [[""]]
    else:
        x = x[:, None] if x.ndim == 2 else x.swapaxes(0, 1) if options["batch_first"] else x
        directions = ("", "_reverse")[: 1 + options["bidirectional"]]
        suffixes = [[f"_l{i}{each}" for each in directions] for i in range(options["num_layers"])]
    x, count = x[:num_steps], sum(map(len, suffixes))
    states = [state.reshape(count, x.shape[1], -1) for state in states]
    states = iter(zip(*states, strict=True) if states else [()] * count)
    for layer in suffixes:
        outputs = []
        for suffix in layer:
            own = {key: weights[f"{key}{suffix}"] for key in KEYS if f"{key}{suffix}" in weights}
            order = slice(None, None, -1 if suffix.endswith("_reverse") else 1)
            steps, ys = _run(GATES[call.function], own, x[order], next(states))
            outputs.append(ys[order])
            where = f" of layer {suffix[2:].replace('_', ', ')}" if count > 1 else ""
            yield LayerGates(where, steps[:MOST_STEPS])
        x = np.concatenate(outputs, -1)


def _run(
    names: str, weights: Arrays, xs: np.ndarray, state: Sequence[np.ndarray]
) -> tuple[list[Arrays], np.ndarray]:
    """The gates of each step and the outputs of one layer in one direction; time is axis 0."""
    recurrent = weights["weight_hh"]
    sizes = recurrent.shape[1], len(recurrent) // len(names)
    h, c = (*state, *(np.zeros((xs.shape[1], size)) for size in sizes[len(state) :]))[:2]
    steps, outputs = [], []
    for x in xs:
        given = np.split(x @ weights["weight_ih"].T + weights.get("bias_ih", 0), len(names), -1)
        kept = np.split(h @ recurrent.T + weights.get("bias_hh", 0), len(names), -1)
        if names == "rzn":
            r, z = (_sigmoid(given[i] + kept[i]) for i in range(2))
            n = np.tanh(given[2] + r * kept[2])
            gates, h = (r, z, n), (1 - z) * n + z * h
        else:
            i, f, g, o = map(np.add, given, kept)
            gates = i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
            c = f * c + i * g
            h = o * np.tanh(c)
            h = h @ weights["weight_hr"].T if "weight_hr" in weights else h
        steps.append(dict(zip(names, gates, strict=True)))
        outputs.append(h)
    return steps, np.stack(outputs)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * np.tanh(0.5 * x) + 0.5


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
