"""The keys of a `state_dict` in error messages, shortened, and the search for a prefix."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

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


class KeysFound(NamedTuple):
    """A part of a `state_dict` that has many keys of a layout, all under one prefix."""

    name: str
    code: str
    """Python code for the entry."""
    entry: Mapping[Any, Any]
    prefix: str
    num_keys: int


def locate_keys(
    state_dict: Mapping[Any, Any],
    layouts: Collection[Collection[str]],
    misfit: Callable[[Mapping[Any, Any], str], str | None] | None = None,
) -> str | None:
    """Says where at least half of a layout's keys are: in an entry, or under a prefix.

    The text ends with Python code that returns these entries or, with `misfit`, with the `prefix`
    argument to pass instead. `misfit(entry, prefix)` describes a shape that does not fit there, or
    returns None. Only places where all shapes fit are proposed.
    """
    places = [*_find_keys(state_dict, layouts)]
    faults = [misfit and misfit(place.entry, place.prefix) for place in places]
    fitting = [place for place, fault in zip(places, faults, strict=True) if not fault]
    if not places:
        return None
    # If several prefixes fit in one entry, propose those with the most keys.
    place = (fitting or places)[0]
    same = [p for p in fitting or places if p.prefix and p.code == place.code]
    most_keys = max((p.num_keys for p in same), default=0)
    prefixes = [*dict.fromkeys(p.prefix for p in same if p.num_keys == most_keys)]
    names = ", ".join(f'"{prefix}"' for prefix in joined(prefixes))
    where = f"under {names}" if place.prefix else f'in the entry "{place.name}"'
    if not fitting:
        return f"its keys are {where}, but their shapes do not fit: {next(filter(None, faults))}"
    if not place.prefix:
        code = place.code
    elif misfit:
        code = _prefix_argument(prefixes, place.code)
    else:
        code = _code_without_prefix(prefixes, [*filter(_is_key, place.entry)], place.code)
    return f"its weights are {where}: give {code}"


def _find_keys(
    state_dict: Mapping[Any, Any], layouts: Collection[Collection[str]], code: str = "state_dict"
) -> Iterator[KeysFound]:
    for name, entry in state_dict.items():
        if not isinstance(entry, Mapping):
            continue
        inside = f'{code}["{name}"]'
        counts = [sum(key in entry for key in known) for known in layouts]
        if any(2 * count >= len(known) for count, known in zip(counts, layouts, strict=True)):
            yield KeysFound(name, inside, entry, "", max(counts))
        yield from _find_keys(entry, layouts, inside)
    for known in layouts:
        counts = Counter(
            key[: dot.end()]
            for key in filter(_is_key, state_dict)
            for dot in re.finditer(r"\.", key)
            if key[dot.end() :] in known
        )
        for prefix, count in counts.items():
            if 2 * count >= len(known):
                yield KeysFound("", code, state_dict, prefix, count)


def _is_key(key: Any) -> bool:
    return isinstance(key, str)


def _prefix_argument(prefixes: list[str], code: str) -> str:
    few = " or ".join(f'prefix="{prefix}"' for prefix in prefixes[:4])
    entry = "" if code == "state_dict" else f"{code} and "
    return f"{entry}{few}{' or …' if len(prefixes) > 4 else ''}"


def _code_without_prefix(prefixes: list[str], keys: list[str], code: str) -> str:
    first = prefixes[0]
    only = "" if all(key.startswith(first) for key in keys) else f' if k.startswith("{first}")'
    return f'{{k.removeprefix("{first}"): v for k, v in {code}.items(){only}}}'
