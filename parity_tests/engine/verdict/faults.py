"""Faults other than numerical errors, and notes on the limits of a comparison."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.candidates.jax_program import ProgramFacts, first_of, is_library
from parity_tests.engine.problem import COMPLEX
from parity_tests.engine.results import GROUPS, Results, only_floating
from parity_tests.engine.verdict.channel_order import ORDERS, advice, channels_last


def mismatches(oracle: Results, ours: Results, sides: tuple[str, str]) -> list[str]:
    """Faults for results of JAX whose names, shapes, kinds or integers differ from the oracle's.

    `sides` names the reference and the JAX side.
    """
    reference, model = sides
    faults = []
    if not any(like.size for like in oracle.get("outputs", {}).values()):
        faults.append("outputs: all of them are empty, there is nothing to compare")
    if structure(oracle) != structure(ours):
        faults.append(
            f"results: {reference} returns {structure(oracle)} and {model} returns "
            f"{structure(ours)}: return the same structure from both, with `call` and `call_twin`"
        )
    for group in GROUPS[:2]:
        expected, actual = oracle.get(group, {}), ours.get(group, {})
        for name, like in expected.items() if expected.keys() == actual.keys() else ():
            array = actual[name]
            if array.shape != like.shape:
                fault = f"shape {like.shape} in {reference}, {array.shape} in {model}"
                if channels_last(like) == array.shape:
                    first, last = ORDERS[like.ndim]
                    fault += f", as {first} and {last}. {advice(inputs=False, outputs=True)}"
            elif kind_of_numbers(array) != kind_of_numbers(like):
                fault = f"{like.dtype} in {reference}, {array.dtype} in {model}"
            elif not only_floating({"": like}) and (count := np.count_nonzero(array != like)):
                fault = f"{count} of {array.size} {like.dtype} differ"
            else:
                continue
            faults.append(f"{group}, {name}: {fault}")
    return faults


def structure(results: Results) -> str:
    """The names of what a side returns, such as `(y, state)`."""
    names = [name for group in GROUPS[:2] for name in results.get(group, {})]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def kind_of_numbers(array: np.ndarray) -> str:
    """The kind of the array's numbers: complex, real or integer. Booleans count as integers."""
    kinds = {"complex": jnp.complexfloating, "real": jnp.floating}
    return next((k for k, t in kinds.items() if jnp.issubdtype(array.dtype, t)), "integer")


def dtype_faults(
    reference_dtypes: Mapping[Any, Any], facts: ProgramFacts, dtype: str, sides: tuple[str, str]
) -> list[str]:
    """Faults for results in another dtype than requested, unless the reference has the same dtype.

    Three cases are no fault. In float64, a layer of a framework, such as `nnx.Embed`, may compute
    in another dtype, and so may everything after it. A program that had to be traced without x64
    may do the same. A final state may have more digits than requested.
    """
    requested = {dtype, COMPLEX[dtype]}
    if dtype == "float64" and (facts.x64_error or any(map(is_library, facts.casts))):
        return []
    return [
        f"{group}, {name}: {sides[1]} computes in {actual} where {dtype} was asked for"
        for (group, name), actual in facts.dtypes.items()
        if jnp.issubdtype(actual, jnp.inexact)
        and str(actual) not in requested
        and actual != reference_dtypes.get((group, name))
        and not (group == "final state" and jnp.finfo(actual).bits > jnp.finfo(dtype).bits)
    ]


def notes_on(facts_by_dtype: Mapping[str, ProgramFacts], sides: tuple[str, str]) -> Iterator[str]:
    """Notes on casts that float64 ignores, on operations without float64, and on omitted parts."""
    reference, model = sides
    facts = facts_by_dtype.get("float64")
    if facts is not None and facts.casts:
        yield (
            f"{model} casts to less than float64: float64 is compared without these casts: "
            f"{first_of(facts.casts)}"
        )
    if facts is not None and facts.x64_error:
        yield (
            f"{model} is traced without x64, and its program runs in float64: with x64 it raises "
            f"{facts.x64_error:.120}"
        )
    if facts is not None and facts.coarse_operations:
        yield (
            f"{model} computes in less than float64 whatever its inputs are, so a fault below that "
            f"rounding cannot be seen: {first_of(facts.coarse_operations)}"
        )
    draws = dict.fromkeys(place for each in facts_by_dtype.values() for place in each.draws)
    if draws and reference == "torch":
        yield f"JAX draws random numbers, which differ from torch's: {first_of(draws)}"
    if any(each.has_padding_gradient for each in facts_by_dtype.values()):
        yield (
            "torch drops the gradient of an embedding's padding_idx and JAX does not: these rows "
            "are not compared"
        )
