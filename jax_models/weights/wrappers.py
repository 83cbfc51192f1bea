"""Recognizes the keys of wrappers that store a weight as something else, such as weight norm."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from jax_models.weights.keys import joined


class Wrapper(NamedTuple):
    """What replaces a weight by other keys, and how to get the weight back."""

    name: str
    marks: tuple[str, ...]
    """Patterns of whole words of a key. All of them must occur for one tensor, whose name they
    capture if it is a part of the word."""
    remedy: str = ""
    """What to do. It is empty if there is a `function`."""
    function: str = ""
    """The function of torch.nn.utils that restores a weight, called with its module and its name.
    It is empty if there is a `remedy`."""
    is_prefix: bool = False
    """Whether the weights are unchanged, and only their keys are longer."""


PARAMETRIZED = "parametrize.remove_parametrizations"
OF = r"parametrizations\.(\w+)\."
PEFT = "call model.merge_and_unload() and load the state_dict of the model that it returns"
QUANTIZED = "load the weights from before they were quantized"
WRAPPERS = (
    Wrapper("weight norm", (OF + "original0", OF + "original1"), function=PARAMETRIZED),
    Wrapper("spectral norm", (OF + "original", OF + "0._u", OF + "0._v"), function=PARAMETRIZED),
    Wrapper(
        "an orthogonal parametrization", (OF + "original", OF + "0.base"), function=PARAMETRIZED
    ),
    Wrapper("a parametrization", (OF + r"original\d*",), function=PARAMETRIZED),
    Wrapper(
        "weight norm",
        (r"(weight\w*)_g", r"(weight\w*)_v"),
        function="remove_weight_norm",
    ),
    Wrapper(
        "spectral norm",
        (r"(weight\w*)_orig", r"(weight\w*)_[uv]"),
        function="remove_spectral_norm",
    ),
    Wrapper("pruning", (r"(\w+)_orig", r"(\w+)_mask"), function="prune.remove"),
    Wrapper(
        "an adapter of peft",
        (r"(?:lora|vera|oft|boft|hada|lokr|hra|fourierft|vblora|randlora)_\w+|ia3_l|base_layer",),
        PEFT,
    ),
    Wrapper("modules that peft saves", ("original_module", "modules_to_save"), PEFT),
    Wrapper("quantized weights of torch", ("_packed_params|_all_weight_values",), QUANTIZED),
    Wrapper("quantized weights of torch", ("scale", "zero_point"), QUANTIZED),
    Wrapper("quantized weights of bitsandbytes", ("SCB|absmax|quant_map|quant_state",), QUANTIZED),
    Wrapper("quantized weights", ("qweight", "qzeros|scales"), QUANTIZED),
    *(
        Wrapper(
            name,
            (prefix,),
            f'give {{k.replace("{prefix}.", ""): v for k, v in state_dict.items()}}',
            is_prefix=True,
        )
        for name, prefix in (
            ("torch.compile", "_orig_mod"),
            ("FullyShardedDataParallel", "_fsdp_wrapped_module"),
            ("checkpoint_wrapper", "_checkpoint_wrapped_module"),
        )
    ),
    Wrapper(
        "DataParallel",
        (r"\Amodule",),
        'give {k.removeprefix("module."): v for k, v in state_dict.items()}',
        is_prefix=True,
    ),
)
"""The wrappers, the most specific first: each key belongs to the first that has it."""


class Wrapped(NamedTuple):
    """The keys of a wrapper in a `state_dict`."""

    keys: list[str]
    description: str
    """One line that names the wrapper, some of the keys, and what to do."""
    is_prefix: bool
    """As in `Wrapper`."""


class Place(NamedTuple):
    """A module in which a wrapper stores a tensor as something else."""

    path: str
    """The start of the module's keys, such as "encoder.lstm."; "" for the whole model."""
    name: str
    """The name of the tensor. It is empty if the wrapper's keys do not contain it."""


def find_wrapped(keys: Iterable[Any]) -> list[Wrapped]:
    """Finds the keys of weights that are stored as something else.

    >>> find_wrapped(["bias", "weight_g", "weight_v"])[0].keys
    ['weight_g', 'weight_v']
    """
    return [
        Wrapped(
            inside := [key for matches in places.values() for key in matches],
            _described(wrapper, places, inside),
            wrapper.is_prefix,
        )
        for wrapper, places in _wrappers_in(keys)
    ]


def wrapper_entered(keys: Iterable[Any], prefix: str) -> str | None:
    """Describes the wrapper that a prefix would tear apart, or returns None.

    Under such a prefix are only some of the wrapper's keys, or only the ends of their names.

    >>> wrapper_entered(["fc.base_layer.weight", "fc.lora_A.weight"], "fc.base_layer.")[:39]
    'an adapter of peft (fc.base_layer.weigh'

    Prefixes of wrappers that leave the weights unchanged, such as DataParallel, take all keys.
    """
    for wrapper, places in _wrappers_in(keys):
        for place, matches in places.items():
            starts_inside = prefix.startswith(place.path) and prefix != place.path
            taken = [key for key in matches if key.startswith(prefix)] if starts_inside else []
            ends_in_mark = any(matches[key].end() > len(prefix) for key in taken)
            if taken and (len(taken) < len(matches) or ends_in_mark) and not wrapper.is_prefix:
                return _described(wrapper, {place: matches}, [*matches])
    return None


def _wrappers_in(
    keys: Iterable[Any],
) -> Iterator[tuple[Wrapper, dict[Place, dict[str, re.Match[str]]]]]:
    """The wrappers, each with the places where it has all of its keys, and their matches."""
    left = [*map(str, keys)]
    for wrapper in WRAPPERS:
        patterns = [re.compile(rf"(?<![^.])(?:{mark})(?![^.])") for mark in wrapper.marks]
        places: dict[Place, dict[str, dict[str, re.Match[str]]]] = {}
        for key in left:
            for pattern in patterns:
                if match := pattern.search(key):
                    place = Place(key[: match.start()], "".join(match.groups()))
                    places.setdefault(place, {}).setdefault(pattern.pattern, {})[key] = match
        whole = {
            place: {key: match for matches in by_mark.values() for key, match in matches.items()}
            for place, by_mark in places.items()
            if len(by_mark) == len(patterns)
        }
        if whole:
            left = [key for key in left if not any(key in matches for matches in whole.values())]
            yield wrapper, whole


def _described(wrapper: Wrapper, places: Collection[Place], keys: Iterable[str]) -> str:
    """One line with the wrapper's name, some of its keys, and what to do."""
    listed, remedy = joined(dict.fromkeys(keys)), wrapper.remedy
    if wrapper.function:
        calls = [
            f'torch.nn.utils.{wrapper.function}({_submodule(place.path)}, "{place.name}")'
            for place in places
        ]
        rest = f" and so on, for each of these {len(calls)} weights," if len(calls) > 3 else ""
        remedy = f"call {' and '.join(calls[:3])}{rest} before module.state_dict()"
    some = ", ".join([*listed[:3], *(["…"] if len(listed) > 3 else [])])
    return f"{wrapper.name} ({some}): {remedy}"


def _submodule(path: str) -> str:
    """Python code for the submodule whose keys start with a path."""
    return f'module.get_submodule("{path[:-1]}")' if path else "module"
