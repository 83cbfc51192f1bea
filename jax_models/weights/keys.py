"""The keys of a `state_dict` in error messages: shortened, and searched for under a prefix."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

Fault = tuple[str, str, str]
"""A line of an error message: the text before the key, the key, the text after it."""


def joined(keys: Iterable[Any]) -> list[str]:
    """The keys, those that differ in one number shortened to one: `blocks.{0-3,5}.weight`."""
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
    """One line for all keys that have the same fault and differ in one number."""
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


def elsewhere(
    state_dict: Mapping[Any, Any],
    layouts: Collection[set[str]],
    code: str = "state_dict",
    *,
    takes_prefix: bool = False,
) -> str | None:
    """Where at least half of a layout's keys are: in an entry, or under a prefix.

    The answer ends with Python code that gives these entries, made from `code`, which gives the
    `state_dict`. With `takes_prefix`, it ends with the `prefix` argument to pass instead.
    """
    for name, entry in state_dict.items():
        if not isinstance(entry, Mapping):
            continue
        inside = f'{code}["{name}"]'
        if any(2 * len(known & entry.keys()) >= len(known) for known in layouts):
            return f'its weights are in the entry "{name}": give {inside}'
        if found := elsewhere(entry, layouts, inside, takes_prefix=takes_prefix):
            return found
    keys = [key for key in state_dict if isinstance(key, str)]
    for known in layouts:
        places = Counter(
            key[: dot.end()]
            for key in keys
            for dot in re.finditer(r"\.", key)
            if key[dot.end() :] in known
        )
        most = max(places.values(), default=0)
        if 2 * most >= len(known):
            prefixes = [prefix for prefix, count in places.items() if count == most]
            names = ", ".join(f'"{prefix}"' for prefix in joined(prefixes))
            give = _as_argument(prefixes, code) if takes_prefix else _without(prefixes, keys, code)
            return f"its weights are under {names}: give {give}"
    return None


def _as_argument(prefixes: list[str], code: str) -> str:
    few = " or ".join(f'prefix="{prefix}"' for prefix in prefixes[:4])
    entry = "" if code == "state_dict" else f"{code} and "
    return f"{entry}{few}{' or …' if len(prefixes) > 4 else ''}"


def _without(prefixes: list[str], keys: list[str], code: str) -> str:
    first = prefixes[0]
    only = "" if all(key.startswith(first) for key in keys) else f' if k.startswith("{first}")'
    return f'{{k.removeprefix("{first}"): v for k, v in {code}.items(){only}}}'
