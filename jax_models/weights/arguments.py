"""Checks of the arguments of the functions that make rows and tables, by their annotations."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np

from jax_models.checks.values import as_array, checked_integer, checked_size, described

Shape = Annotated[tuple[int, ...], "of positive sizes"]


def checked_names(argument: str, names: Any) -> tuple[str, ...]:
    """Returns a tuple or a list of different names as a tuple, or raises an error."""
    if not isinstance(names, tuple | list):
        raise TypeError(f"{argument}: expected a tuple of names, got {names!r:.100}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected names, got {name!r:.100}")
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{argument}: expected different names, got {name!r} {count} times")
    return tuple(names)


def _checked_some_names(argument: str, names: Any) -> tuple[str, ...]:
    names = checked_names(argument, names)
    if not names:
        raise ValueError(f"{argument}: expected at least one name, got none")
    return names


def _checked_pair(argument: str, names: Any) -> tuple[str, ...]:
    names = checked_names(argument, names)
    if len(names) != 2:
        raise ValueError(f"{argument}: expected 2 names, got {len(names)}")
    return names


def _checked_path(argument: str, path: Any) -> str:
    """Returns the path of a module, a parameter or a key, or raises an error."""
    if not isinstance(path, str):
        got = repr(path) if isinstance(path, int | list | tuple) else described(path)
        raise TypeError(f"{argument}: expected a path such as 'layers.0', got {got:.100}")
    if path and not all(path.split(".")):
        raise ValueError(
            f"{argument}: expected a path with names around each dot, such as 'layers.0', "
            f"got {path!r}"
        )
    return path


def _checked_tuple(check: Any, numbers: str, argument: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise TypeError(f"{argument}: expected a tuple of {numbers}, got {values!r:.100}")
    return tuple(check(argument, value) for value in values)


_checked_sizes = partial(_checked_tuple, checked_size, "positive integers")

ROW_ARGUMENTS: dict[Any, Any] = {
    str: _checked_path,
    int: checked_size,
    np.ndarray: partial(as_array, convert=np.asarray),
    Sequence[str]: _checked_some_names,
    tuple[str, ...]: checked_names,
    tuple[str, str]: _checked_pair,
    Sequence[int]: _checked_sizes,
    Shape: _checked_sizes,
    tuple[int, ...]: partial(_checked_tuple, checked_integer, "integers"),
}
"""The checks of annotations, in addition to those of `checked`. An `int` is a size."""
