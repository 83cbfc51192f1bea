"""The substitution test: does JAX apply a layer to another input than torch does?

If a layer and the code around it are both suspects, the torch layer is run on the arrays that JAX
computes. If JAX also computes the result, then JAX's layer is right, and the code around the layer
gave it another input.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from parity_tests.engine.locate.evidence import Evidence, telling_arrays
from parity_tests.engine.locate.search import Search, WantedArray, watch_jax
from parity_tests.engine.locate.values import identity, layouts
from parity_tests.engine.problem import Problem
from parity_tests.engine.traces.trace import BACKWARD, FORWARD, Call


def takes_other_input(
    problem: Problem, evidence: Evidence, suspect: Call, others: Sequence[Call]
) -> dict[Call, bool]:
    """For the suspect and other calls, whether JAX computes them from other arrays than torch does.

    Calls for which the test would prove nothing are left out. In the forward pass, these are calls
    without weights and, except the suspect, calls of a module that is called several times, because
    JAX may compute them elsewhere.
    """
    direction, reference = evidence.direction, evidence.reference
    is_forward, all_calls = direction is FORWARD, evidence.trace.calls
    names = [call.name for call in all_calls]
    tested = {
        call: _incoming(evidence, call)
        for call in (suspect, *others)
        if telling_arrays(call, direction.outgoing)
        and (not is_forward or call.weights)
        and (not is_forward or call is suspect or names.count(call.name) == 1)
    }
    if not tested or (run_again := reference.run_again) is None:
        return {}

    # Keep all of JAX's arrays that a call could take.
    sizes = {array.size for incoming in tested.values() for _, array in incoming}
    jax_arrays: dict[int, dict[int, np.ndarray]] = {size: {} for size in sizes}

    def keep(value: np.ndarray, *, is_summand: bool = False) -> None:
        if value.size in jax_arrays and np.isfinite(value).all():
            jax_arrays[value.size][hash(value.tobytes())] = np.array(value, float)

    watch_jax(problem, reference, keep, is_forward=is_forward)

    # Run each call on each of these arrays, with two of its own arrays exchanged, and with zeros.
    # If JAX has a result that no call of torch's has, it applies the call to other arrays.
    results: list[tuple[Call, str, WantedArray]] = []
    for call, incoming in tested.items():
        replacements = [
            dict.fromkeys(labels, layout)
            for labels, array in incoming
            for other in jax_arrays[array.size].values()
            for _, layout in layouts(other, array.shape)
        ]
        replacements += [
            dict.fromkeys(labels, other) | dict.fromkeys(other_labels, array)
            for (labels, array), (other_labels, other) in itertools.combinations(incoming, 2)
            if array.shape == other.shape
        ]
        replacements += [  # a state that JAX forgets is zero
            {label: np.zeros_like(array) for labels, array in incoming[i:j] for label in labels}
            for i, j in itertools.combinations(range(len(incoming) + 1), 2)
            if j - i < len(incoming)
        ]
        if not is_forward:  # a call runs backward only from the gradients that it is given
            given = call.slots[direction.incoming]
            replacements = [given | replaced for replaced in replacements]
        outgoing = run_again(call.index, direction, replacements)
        results += [
            (call, label, WantedArray(result))
            for replaced, arrays in zip(replacements, outgoing, strict=True)
            for label, result in arrays.items()
            if label in telling_arrays(call, direction.outgoing)
            and not any(
                result.size == each.size and (result.ravel() == each.ravel()).all()
                for each in replaced.values()
            )
        ]

    def is_same(call: Call, label: str, found: WantedArray) -> bool:
        return evidence.is_within(call, direction.outgoing, label, found.error)

    # Leave out results that a call of torch's has, and look for the others among JAX's arrays.
    in_torch = _among_torch(evidence, [each.array for *_, each in results])
    new = [
        result
        for result, found in zip(results, in_torch, strict=True)
        if not is_same(*result[:2], found)
    ]
    watch_jax(problem, reference, Search([each for *_, each in new]).see, is_forward=is_forward)
    found = {result[0] for result in new if is_same(*result)}
    return {call: call in found for call in tested}


def departs_alone(problem: Problem, evidence: Evidence, layer: Call) -> bool | None:
    """Whether all that follows a layer is right, but for what JAX's layer gives it.

    JAX's layer computes the output of torch's, and gives something else. Either this is wrong, or
    the layer does a part of what torch's caller does. It is wrong if torch's caller, given the same
    arrays, computes what JAX's does. None if the reference cannot tell.
    """
    outputs, reference = evidence.returned_by_counterpart(layer), evidence.reference
    in_torch = _among_torch(evidence, [*outputs.values()])
    if all(each.error <= evidence.min_bound for each in in_torch):
        return False
    if reference.trace_with is None:
        return None
    calls = reference.trace_with(layer.index, outputs).calls
    users = [(call, FORWARD.incoming) for call in evidence.trace.calls if layer in call.sources]
    users = users or [(outer, FORWARD.outgoing) for outer in itertools.islice(layer.ancestors, 1)]
    wanted = [
        (call, slot, label, WantedArray(array))
        for call, slot in users
        for label, array in telling_arrays(calls[call.index], slot).items()
        if not np.array_equal(array, call.slots[slot].get(label, ()))
    ]
    watch_jax(problem, reference, Search([each for *_, each in wanted]).see, is_forward=True)
    return bool(wanted) and all(
        evidence.is_within(call, slot, label, found.error) for call, slot, label, found in wanted
    )


def _among_torch(evidence: Evidence, arrays: Sequence[np.ndarray]) -> Sequence[WantedArray]:
    """The arrays, with their errors to the closest arrays of torch's calls in this direction."""
    search = Search([WantedArray(array) for array in arrays])
    for call in evidence.trace.calls:
        for slot in (evidence.direction.incoming, evidence.direction.outgoing):
            for array in telling_arrays(call, slot).values():
                search.see(array)
    return search.wanted


def _incoming(evidence: Evidence, call: Call) -> list[tuple[list[str], np.ndarray]]:
    """The arrays that a call takes, each once, with its labels.

    Backward, an output of which torch uses no gradient has a gradient of zero.
    """
    slot = evidence.direction.incoming
    incoming, labels = telling_arrays(call, slot), {}
    for label in incoming:
        labels.setdefault(identity(call, slot, label), []).append(label)
    found = [(each, incoming[each[0]]) for each in labels.values()]
    if evidence.direction is BACKWARD:
        outputs = telling_arrays(call, FORWARD.outgoing)
        unused = outputs.keys() - call.slots[slot].keys()
        found += [([label], np.zeros_like(outputs[label])) for label in outputs if label in unused]
    return found
