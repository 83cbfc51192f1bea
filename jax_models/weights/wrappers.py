"""Recognizes the keys of wrappers that store a weight as something else, such as weight norm."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax_models.weights.keys import joined


class Wrapper(NamedTuple):
    """What replaces a weight by other keys, and how to get the weight back."""

    name: str
    marks: tuple[str, ...]
    """Patterns of whole words of a key. All of them must occur for one tensor, whose name they
    capture if it is a part of the word."""
    remedy: str
    """What to do, where MODULE stands for the module that has the tensor, and NAME for its name."""
    is_prefix: bool = False
    """Whether the weights are unchanged, and only their keys are longer."""


CALL = 'call torch.nn.utils.FUNCTION(MODULE, "NAME") before module.state_dict()'
PARAMETRIZED = CALL.replace("FUNCTION", "parametrize.remove_parametrizations")
OF = r"parametrizations\.(\w+)\."
QUANTIZED = "load the weights from before they were quantized"
WRAPPERS = (
    Wrapper("weight norm", (OF + "original0", OF + "original1"), PARAMETRIZED),
    Wrapper("spectral norm", (OF + "original", OF + "0._u", OF + "0._v"), PARAMETRIZED),
    Wrapper("an orthogonal parametrization", (OF + "original", OF + "0.base"), PARAMETRIZED),
    Wrapper("a parametrization", (OF + r"original\d*",), PARAMETRIZED),
    Wrapper(
        "weight norm",
        (r"(weight\w*)_g", r"(weight\w*)_v"),
        CALL.replace("FUNCTION", "remove_weight_norm"),
    ),
    Wrapper(
        "spectral norm",
        (r"(weight\w*)_orig", r"(weight\w*)_[uv]"),
        CALL.replace("FUNCTION", "remove_spectral_norm"),
    ),
    Wrapper("pruning", (r"(\w+)_orig", r"(\w+)_mask"), CALL.replace("FUNCTION", "prune.remove")),
    Wrapper(
        "an adapter of peft",
        (r"lora_(?:embedding_)?[AB]|lora_magnitude_vector|ia3_l|base_layer",),
        "call model.merge_and_unload() and load the state_dict of the model that it returns",
    ),
    Wrapper("quantized weights of torch", ("_packed_params|_all_weight_values",), QUANTIZED),
    Wrapper("quantized weights of torch", ("scale", "zero_point"), QUANTIZED),
    Wrapper("quantized weights of bitsandbytes", ("SCB|absmax|quant_map|quant_state",), QUANTIZED),
    Wrapper("quantized weights", ("qweight", "qzeros|scales"), QUANTIZED),
    *(
        Wrapper(
            name,
            (prefix,),
            f'give {{k.replace("{prefix}.", ""): v for k, v in state_dict.items()}}',
            True,
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
        True,
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


def find_wrapped(keys: Iterable[Any]) -> list[Wrapped]:
    """Finds the keys of weights that are stored as something else.

    >>> find_wrapped(["bias", "weight_g", "weight_v"])[0].keys
    ['weight_g', 'weight_v']
    """
    left = [*map(str, keys)]
    found = []
    for wrapper in WRAPPERS:
        patterns = [re.compile(rf"(?<![^.])(?:{mark})(?![^.])") for mark in wrapper.marks]
        # Keys by the path of the module and the name of the tensor.
        places: dict[tuple[str, str], dict[str, list[str]]] = {}
        for key in left:
            for pattern in patterns:
                if match := pattern.search(key):
                    place = key[: match.start()], "".join(match.groups())
                    places.setdefault(place, {}).setdefault(pattern.pattern, []).append(key)
        whole = {place: marks for place, marks in places.items() if len(marks) == len(patterns)}
        inside = [key for marks in whole.values() for each in marks.values() for key in each]
        if inside:
            left = [key for key in left if key not in {*inside}]
            path, name = next(iter(whole))
            listed = joined(dict.fromkeys(inside))
            some = ", ".join([*listed[:3], *(["…"] if len(listed) > 3 else [])])
            module = f'module.get_submodule("{path[:-1]}")' if path else "module"
            remedy = wrapper.remedy.replace("MODULE", module).replace("NAME", name)
            description = f"{wrapper.name} ({some}): {remedy}"
            found.append(Wrapped(inside, description, wrapper.is_prefix))
    return found
