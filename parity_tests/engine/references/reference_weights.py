"""What is known of the weights that a port is to have."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jax_models.weights import Table, same
from jax_models.weights.transfer import params_of
from parity_tests.engine.candidates.adapters import Held, adapted
from parity_tests.engine.problem import Arrays, Problem


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of the weights that a port is to have."""

    arrays: Arrays
    """By key, in their own dtypes."""
    owners: Mapping[str, str]
    """The key of each floating one, or the first of the keys that share it."""
    parameters: Collection[str]
    """The keys that torch would train."""
    matters: Callable[[Problem, str], bool]
    """Does the result depend on a key?"""
    is_jax: bool = False
    """Are they a JAX model's, under its own names?"""


def own_weights(model: Any) -> tuple[Arrays, list[str]]:
    """The weights that a JAX model has, by path, and which of them are trained.

    Raises:
        TypeError: it is given without.

    """
    foreign = adapted(model)
    if foreign is not None and foreign.weights is None:
        raise TypeError("twin: it has no weights: give it with them, as (model, weights)")
    model = model if foreign is None else Held(foreign)
    if not isinstance(model, nnx.Module):
        return {}, []
    params = params_of(model)
    arrays = {path: np.asarray(param.get_value()) for path, param in params.items()}
    return arrays, [path for path, param in params.items() if isinstance(param, nnx.Param)]


def named_table(names: Iterable[str]) -> Table:
    """Each weight is that of the same name."""
    return [same(name, name) for name in names]


def is_trivial(value: np.ndarray) -> bool:
    """Is it all zeros, or all ones?"""
    return bool((value == 0).all() or (value == 1).all())
