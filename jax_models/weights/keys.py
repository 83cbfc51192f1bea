"""The keys of a `state_dict` in error messages, shortened."""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

Fault = tuple[str, str, str]
"""A line of an error message: the text before the key, the key, and the text after it."""


def checked_mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """Returns a mapping of keys to weights, or raises an error."""
    if not isinstance(value, Mapping):
        expected = "a mapping of keys to tensors, as module.state_dict() gives it"
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    return value


def joined(keys: Iterable[Any]) -> list[str]:
    """Joins keys that differ only in their first number into one: `blocks.{0-3,5}.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for key in map(str, keys):
        number = re.search(r"(?<![^.])\d+(?![^.])", key)
        start, end = (len(key), len(key)) if number is None else number.span()
        numbers = groups.setdefault((key[:start], key[end:]), [])
        numbers += [] if number is None else [int(number[0])]
    return [f"{head}{_ranges(numbers)}{tail}" for (head, tail), numbers in groups.items()]


def _ranges(numbers: list[int]) -> str:
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ]
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{{{text}}}" if len(numbers) > 1 else text


def lines(faults: Iterable[Fault]) -> list[str]:
    """Returns one line for all keys that have the same fault and differ only in one number."""
    groups: dict[tuple[str, str], list[str]] = {}
    for before, key, behind in faults:
        groups.setdefault((before, behind), []).append(key)
    return [
        f"{before}{key}{behind}"
        for (before, behind), keys in groups.items()
        for key in joined(keys)
    ]


def flattened(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by their keys joined by dots."""
    leaves = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves |= flattened(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return leaves
