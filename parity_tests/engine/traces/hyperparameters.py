"""Collects the hyperparameters of layers, and compares those of two layers."""

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_overloads

import numpy as np

Hyperparameters = Mapping[str, Any]
"""Numbers, strings, None, and tuples of these, by the name of the attribute."""

ALIASES = (
    ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_epsilon"),
    ("p", "rate", "dropout", "dropout_rate", "drop_prob"),
    ("momentum", "1 - momentum"),
    ("bias", "use_bias", "with_bias"),
    ("elementwise_affine", "affine", "channelwise_affine", "use_scale", "use_weight"),
    ("kernel_size", "kernel_shape"),
    ("stride", "strides"),
    ("dilation", "kernel_dilation", "dilation_rate"),
    ("groups", "num_groups", "feature_group_count"),
    ("num_heads", "n_heads", "n_head", "num_attention_heads"),
    ("head_dim", "head_size"),
    ("padding",),
    ("transposed",),
)
"""The known names of hyperparameters. The names in a row mean the same hyperparameter."""
CANONICAL = {alias: names[0] for names in ALIASES for alias in names}
NOT_HYPERPARAMETERS = ("name", "training")
EVALUATION = {
    "training": False,
    "deterministic": True,
    "use_running_average": True,
    "inference": True,
}
"""By framework, the attribute that says that a module runs as in evaluation."""
JAX_LIBRARIES = ("equinox", "flax", "keras")
SCALARS = (bool, int, float, str, type(None))


def hyperparameters_of(module: Any) -> Hyperparameters:
    """The plain values that set what a module of any framework computes, by their attributes.

    These are the public attributes that have a known name or the name of an argument of the
    module's constructor. Others, such as the `mode` of an `nn.LSTM` or a state that changes, may
    mean something else in the module's counterpart.

    Attributes that have no effect in evaluation are left out of a module that runs in it.
    `bias` is True if there is a bias. A BatchNorm's `momentum` is the weight of the old average in
    JAX's libraries, but the weight of the new batch in torch. So the former is converted, and
    stored as `1 - momentum`.
    """
    attributes = getattr(module, "__dict__", {})
    known = (CANONICAL.keys() | _constructor_arguments(type(module))) - {*NOT_HYPERPARAMETERS}
    found: dict[str, Any] = {}
    for name, value in {**attributes, **attributes.get("_parameters", {})}.items():
        value = value.item() if isinstance(value, np.generic) else value
        if name == "bias" and (value is None or hasattr(value, "shape")):
            found[name] = value is not None
        elif name in known and _is_plain(value):
            found[name] = value
    if isinstance(found.get("momentum"), float) and any(
        cls.__name__.startswith("BatchNorm") and cls.__module__.split(".")[0] in JAX_LIBRARIES
        for cls in type(module).__mro__
    ):
        found["1 - momentum"] = round(1 - found.pop("momentum"), 12)
    if any(attributes.get(name) is value for name, value in EVALUATION.items()):
        kind = type(module).__name__
        found = {n: v for n, v in found.items() if not _is_only_for_training(n, kind)}
    return found


@functools.cache
def _constructor_arguments(kind: type) -> frozenset[str]:
    """The names of the public arguments of a class's constructor.

    A constructor with `**kwargs` passes them to the base class, unless its overloads declare them.
    """
    found: set[str] = set()
    for constructor in filter(inspect.isfunction, (vars(c).get("__init__") for c in kind.__mro__)):
        overloads = get_overloads(constructor)
        signatures = [inspect.signature(each) for each in overloads or [constructor]]
        parameters = [p for signature in signatures for p in signature.parameters.values()]
        found |= {p.name for p in parameters if p.name[:1] != "_"}
        if overloads or not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return frozenset(found)


def _is_only_for_training(name: str, kind: str) -> bool:
    """True for the rate of a dropout and the momentum of a norm, in a module of this class."""
    is_rate = "drop" in name.lower() or ("drop" in kind.lower() and CANONICAL.get(name) == "p")
    return is_rate or ("norm" in kind.lower() and CANONICAL.get(name) == "momentum")


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in SCALARS


def hyperparameter_differences(reference: Hyperparameters, model: Hyperparameters) -> Iterator[str]:
    """A description of each hyperparameter that differs, such as `eps 1e-05 | epsilon 1e-06`."""
    names = {CANONICAL.get(name, name): name for name in model} | {name: name for name in model}
    for name, value in reference.items():
        canonical = CANONICAL.get(name, name)
        other = names.get(name) or names.get(canonical)
        if other is None or model[other] is None:  # None may stand for any default
            continue
        pair = value, model[other]
        if canonical == "padding":
            if reference.get("transposed") or reference.get("padding_mode", "zeros") != "zeros":
                continue  # JAX's libraries express these in other ways
            pads = _pads(reference), _pads(model)
            pair = pair if None in pads else pads
        if not _agree(*pair):
            yield f"{name} {_as_text(value)} | {other} {_as_text(model[other])}"


def _agree(a: Any, b: Any) -> bool:
    """True if two values agree up to float32 rounding. A number equals a tuple of that number."""
    if isinstance(a, tuple | list) or isinstance(b, tuple | list):
        a, b = _sequence(a), _sequence(b)
        a, b = (x * (max(len(a), len(b)) if len(x) == 1 else 1) for x in (a, b))
        return len(a) == len(b) and all(map(_agree, a, b))
    if isinstance(a, str) and isinstance(b, str):
        return a.casefold() == b.casefold()
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _pads(layer: Hyperparameters) -> Any:
    """A convolution's padding before and after each axis; None if it depends on input shapes."""
    by_name = {CANONICAL.get(name, name): value for name, value in layer.items()} | {**layer}
    padding = by_name["padding"]
    given = [by_name.get(name, 1) for name in ("kernel_size", "dilation", "stride")]
    rank = max(len(_sequence(value)) for value in (padding, *given))
    if not isinstance(padding, str):
        pads = [p if isinstance(p, tuple | list) else (p, p) for p in _sequence(padding)]
        return pads * (rank if len(pads) == 1 else 1)
    kernel, dilation, stride = (_sequence(v) * (rank // len(_sequence(v))) for v in given)
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=False)]
    kind = padding.casefold()
    if kind == "same" and {*stride} == {1} and "kernel_size" in by_name:
        return [(total // 2, total - total // 2) for total in totals]
    if kind == "causal":
        return [(total, 0) for total in totals]
    return [(0, 0)] * rank if kind == "valid" else None


def _sequence(value: Any) -> list[Any]:
    return [*value] if isinstance(value, tuple | list) else [value]


def _as_text(value: Any) -> str:
    return str(tuple(value) if isinstance(value, list) else value)
