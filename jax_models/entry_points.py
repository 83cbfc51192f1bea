"""Finds the modules of a package, and those that other packages register as entry points."""

import contextlib
import importlib
import pkgutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from types import ModuleType
from typing import TypeVar

Value = TypeVar("Value")
_failures: defaultdict[str, list[str]] = defaultdict(list)
"""For each entry point group, the packages that could not be used, each with its error."""


def modules_of(package: ModuleType, group: str) -> Iterator[ModuleType]:
    """Finds the modules of a package, and those that other packages register as entry points."""
    for found in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{found.name}")
    others = []
    for entry in entry_points(group=group):
        with failures_as_warnings(group, entry.dist.name if entry.dist else entry.value):
            others.append(importlib.import_module(entry.module))
    yield from dict.fromkeys(others)  # two packages may name one module


class DuplicateNameError(ValueError):
    """Two packages define the same name."""


@contextlib.contextmanager
def failures_as_warnings(group: str, package: str) -> Iterator[None]:
    """Turns an error of another package into a warning, so that everything else keeps working."""
    try:
        yield
    except Exception as error:
        failure = f"{package}: {type(error).__name__}: {error}"
        if failure not in _failures[group]:  # a search may run several times
            _failures[group].append(failure)
        warnings.warn(f"{group}: broken package {failure}", stacklevel=3)


def broken_packages(group: str) -> str:
    """Lists the failed packages for an error about a missing name. Returns "" if none failed."""
    return f" (broken packages: {'; '.join(_failures[group])})" if _failures[group] else ""


def by_name(kind: str, found: Iterable[tuple[str, Value, str]]) -> dict[str, Value]:
    """The values by name. Each item of `found` is a name, a value and the place that defines it.

    Raises:
        DuplicateNameError: two values have the same name.

    """
    values, places = {}, {}
    for name, value, place in found:
        if name in values:
            raise DuplicateNameError(
                f"{kind} {name}: expected one definition, got those of {places[name]} and {place}"
            )
        values[name], places[name] = value, place
    return values
