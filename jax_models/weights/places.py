"""The search for a layer's weights in a `state_dict`: the entry and the prefix of their keys."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from jax_models.weights.keys import joined
from jax_models.weights.wrappers import wrapper_entered


class KeysFound(NamedTuple):
    """A part of a `state_dict` that has many keys of a layout, all under one prefix."""

    name: str
    code: str
    """Python code for the entry."""
    entry: Mapping[Any, Any]
    prefix: str
    num_keys: int


def describe_prefix(prefix: str) -> str:
    """The argument with which `from_torch` reads the keys under a prefix."""
    return f'prefix="{prefix}"'


def locate_keys(
    state_dict: Mapping[Any, Any],
    layouts: Collection[Collection[str]],
    misfit: Callable[[Mapping[Any, Any], str], str | None] | None = None,
    argument: Callable[[str], str] | None = None,
) -> str | None:
    """Says where at least half of a layout's keys are: in an entry, or under a prefix.

    The text ends with Python code that returns these entries or, with `argument`, with what
    `argument(prefix)` says to pass instead. `misfit(entry, prefix)` describes a shape that does not
    fit there, or returns None. Only places where all shapes fit are proposed. If each of them is
    inside a wrapper such as an adapter, the text describes the wrapper instead.
    """
    places = [*_find_keys(state_dict, layouts)]
    faults = [misfit and misfit(place.entry, place.prefix) for place in places]
    fitting = [place for place, fault in zip(places, faults, strict=True) if not fault]
    if not places:
        return None
    # The rest of a wrapper's keys would be lost under a prefix that takes only some of them.
    wrappers = [wrapper_entered(place.entry, place.prefix) for place in fitting]
    if fitting and all(wrappers):
        return f"it has keys of {wrappers[0]}"
    fitting = [place for place, wrapper in zip(fitting, wrappers, strict=True) if not wrapper]
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
    elif argument is not None:
        code = _arguments([*map(argument, prefixes)], place.code)
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


def _arguments(arguments: list[str], code: str) -> str:
    few = " or ".join(arguments[:4])
    entry = "" if code == "state_dict" else f"{code} and "
    return f"{entry}{few}{' or …' if len(arguments) > 4 else ''}"


def _code_without_prefix(prefixes: list[str], keys: list[str], code: str) -> str:
    first = prefixes[0]
    only = "" if all(key.startswith(first) for key in keys) else f' if k.startswith("{first}")'
    return f'{{k.removeprefix("{first}"): v for k, v in {code}.items(){only}}}'
