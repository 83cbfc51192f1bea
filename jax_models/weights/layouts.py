"""Chooses the weight table of a layer, checks that it is complete, and runs its transforms."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx

from jax_models.weights.constant import Constant
from jax_models.weights.keys import joined, lines
from jax_models.weights.places import describe_prefix, locate_keys
from jax_models.weights.rows import Weight, join, last_word, repeated
from jax_models.weights.tables import Layouts, Table, checked_table, nested
from jax_models.weights.wrappers import find_wrapped

WEIGHTS = (nnx.Param, nnx.BatchStat, Constant)
"""The kinds of variables that a weight table names: parameters, statistics and constants."""


def weight_table(
    layer: Any,
    layout: str | Table | None,
    state_dict: Mapping[str, Any] | None = None,
    place: str = "",
    argument: Callable[[str], str] = describe_prefix,
) -> tuple[str, Table]:
    """The name and table of a layout. None: the state_dict's layout, or else the layer's first.

    If the caller passes a table, its name is "". If the state_dict is that of a larger torch
    module, `place` is the path of the module in it. If its keys have another prefix, the error
    proposes `argument(prefix)`. Tied rows have only those of their keys that the state_dict has.

    Raises:
        TypeError: the layout is neither a name nor a table.
        ValueError: the layer has no such layout, a table does not name each parameter once, or the
            state_dict fits no layout.

    """
    if layout is None or isinstance(layout, str):
        layouts = _layouts(layer)
        _refuse_foreign_format(layer, _keys_inside(place, state_dict or {}))
    else:
        layouts = {"": checked_table("layout", layout, "a name or a list of `Weight` rows")}
    if isinstance(layout, str):
        if layout not in layouts:
            missing_layout = getattr(layer, "missing_layout", lambda layout: None)
            without = f"{type(layer).__name__} with these options has {sorted(layouts)}"
            raise ValueError(f"layout: {missing_layout(layout) or f'{without}, not {layout!r}'}")
        layouts = {layout: layouts[layout]}
    for name, table in layouts.items():
        what = f"layout {name!r}" if name else "table"
        check_rows(table, params_of(layer), type(layer).__name__, what, other_arrays(layer))
    if state_dict is None:
        name = next(iter(layouts))
        return name, nested(layouts[name], "", place)
    name = _detect(layouts, state_dict, layer, place, argument)
    return name, [row.for_keys(state_dict) for row in nested(layouts[name], "", place)]


def check_rows(
    table: Table,
    params: Collection[str],
    kind: str,
    what: str,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raises an error unless a table names every parameter once and no key twice.

    `others` has the arrays that no table can name, by path.
    """
    named = Counter(path for row in table for path in row.params)
    # If only Linen's name of the collection differs, say so instead of listing all paths twice.
    for change, shorter, longer in (
        ("leave out `params.` in", params, named),
        ("write `params.` before", named, params),
    ):
        if shorter and {f"params.{path}" for path in shorter} == {*longer}:
            raise ValueError(
                f"{what}: {change} the paths of its rows: {kind} has, for example, {min(params)}, "
                f"not {min(named)}"
            )
    keys = Counter(key for row in table for key in row.keys)
    faults = [
        *(("no row for the parameter ", path, "") for path in params if path not in named),
        *(
            (f"{kind} has no parameter ", path, as_constant(others[path]) if path in others else "")
            for path in named
            if path not in params
        ),
        *(("two rows for the parameter ", path, "") for path, count in named.items() if count > 1),
        *(("two rows for the key ", key, "") for key, count in keys.items() if count > 1),
    ]
    if faults:
        raise ValueError(f"{what}: {'; '.join(lines(faults))}")


def transformed(row: Weight, transform: str, arrays: list[Any]) -> tuple[Any, ...]:
    """Applies a row's transform, and refuses a result that is not one array for each name."""
    names = row.params if transform == "to_jax" else row.keys
    try:
        values = getattr(row, transform)(*arrays)
        if not isinstance(values, tuple):
            raise ValueError(f"{transform} gives a {type(values).__name__}, expected a tuple")
        if len(values) != len(names):
            raise ValueError(f"{transform} gives {len(values)} arrays for {len(names)}")
        for value in values:
            if not hasattr(value, "shape"):
                raise ValueError(f"{transform} gives a {type(value).__name__}, expected an array")
    except Exception as error:  # a caller's own table may raise anything
        raise ValueError(f"{', '.join(row.keys or row.params)}: {error}") from error
    return values


def params_of(layer) -> dict[str, nnx.Variable]:
    """The parameters, statistics and constants that a weight table names, by path."""
    if not isinstance(layer, nnx.Module):
        name = f"the class {layer.__name__}" if isinstance(layer, type) else type(layer).__name__
        raise TypeError(f"layer: expected an nnx.Module, got {name}")
    flat = nnx.to_flat_state(nnx.state(layer, WEIGHTS))
    return {".".join(map(str, path)): param for path, param in flat}


def with_shared_rows(layer: nnx.Module, table: Table, *, repeats: bool) -> Table:
    """Joins the rows of a parameter that several submodules share.

    Each of them names the parameter by a path and a key of its own, but the layer has it once, at
    the path of the first. Import then reads any of these keys. Export writes only that of the
    first, or with `repeats` all of them.
    """
    params = params_of(layer)
    paths, rows, others = {id(param): path for path, param in params.items()}, [], {}
    for row in table:
        again = len(row.keys) == 1 and not params.keys() & {*row.params}
        first = tuple(paths.get(id(_variable_at(layer, path))) for path in row.params if again)
        if first and None not in first:
            others[first] = (*others.get(first, ()), *row.keys)
        else:
            rows.append(row)
    for i, row in enumerate(rows):
        if row.params in others:
            keys = (*row.keys, *others[row.params])
            rows[i] = repeated(row, keys, len(keys) if repeats else 1)
    return rows


def _variable_at(layer: Any, path: str) -> Any:
    """The variable at a path, or None if there is none."""
    try:
        for name in path.split("."):
            layer = layer[int(name)] if name.isdigit() else getattr(layer, name)
    except (AttributeError, IndexError, TypeError):
        return None
    return layer


def other_arrays(layer: nnx.Module) -> dict[str, Any]:
    """The arrays of a module that are not weights, by path, such as a buffer in an `nnx.Variable`.

    Random keys are left out.
    """
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Not((*WEIGHTS, nnx.RngState))))
    return {".".join(map(str, path)): value for path, value in flat}


def as_constant(value: Any) -> str:
    """The end of an error message that says how a table can name one of the `other_arrays`."""
    kind = type(value).__name__ if isinstance(value, nnx.Variable) else "array"
    return (
        f": the {kind} of this name is not transferred; make it a jax_models.Constant, or an "
        "nnx.Param if it is trained"
    )


def counterpart(key: str, shape: tuple[int, ...], others: Mapping[str, Any]) -> str:
    """The same text for the one of the `other_arrays` with a key's name and shape; "" if none."""
    named = (value for path, value in others.items() if last_word(path) == last_word(key))
    found = (value for value in named if getattr(value, "shape", None) == shape)
    return next(map(as_constant, found), "")


def _layouts(layer: Any) -> Layouts:
    if not hasattr(layer, "torch_layouts"):
        raise TypeError(f"layer: {type(layer).__name__} has no layouts: give a table as `layout`")
    layouts = layer.torch_layouts()
    if not layouts:
        raise ValueError(
            f"layer: no torch module combines the options of this {type(layer).__name__} (its "
            "number of layers, directions and biases): give a table as `layout`"
        )
    return layouts


def _refuse_foreign_format(layer: Any, keys: Collection[str]) -> None:
    """Refuses the keys of another model, if the layer recognizes them as easily confused ones."""
    foreign_format = getattr(layer, "foreign_format", None)
    if foreign_format is not None and (foreign := foreign_format(keys)):
        raise ValueError(f"state_dict: {foreign}")


def _keys_inside(place: str, state_dict: Mapping[str, Any]) -> set[str]:
    """The keys of a torch module, without the path of the module in a larger one."""
    start = join(place, "")
    return {str(key).removeprefix(start) for key in state_dict if str(key).startswith(start)}


def _detect(
    layouts: Layouts,
    state_dict: Mapping[str, Any],
    layer: Any,
    place: str,
    argument: Callable[[str], str],
) -> str:
    """The layout that shares most keys with a state_dict, and of equal ones lacks the fewest."""
    start, keys = join(place, ""), _keys_inside(place, state_dict)
    known = {name: {key for row in table for key in row.keys} for name, table in layouts.items()}
    best = max(known, key=lambda name: (len(known[name] & keys), -len(known[name] - keys)))
    if known[best] & keys or not known[best]:
        return best
    if not state_dict:
        raise ValueError("state_dict: it has no keys")
    misfit = partial(_misfit_at, layouts, layer)
    if found := locate_keys(state_dict, known.values(), misfit, argument):
        got = f'prefix: got "{start}", but ' if place else "state_dict: "
        raise ValueError(f"{got}{found}")
    if wrapped := find_wrapped(keys):
        raise ValueError(f"state_dict: it has keys of {wrapped[0].description}")
    has = ", ".join(joined(sorted(map(str, state_dict))))
    if not keys:
        raise ValueError(f"prefix: no key starts with {start}, state_dict has {has}")
    if len(layouts) == 1:
        return best  # the caller then lists the differences key by key
    expected = "; ".join(
        f"layout {name!r} takes {', '.join(joined(sorted(known[name])))}" for name in known
    )
    raise ValueError(
        f"state_dict: none of its keys fits {type(layer).__name__} with these options: it has "
        f"{has}; {expected}"
    )


def _misfit_at(layouts: Layouts, layer: Any, weights: Mapping[str, Any], prefix: str) -> str | None:
    """Describes the first shape under a prefix that does not fit, or returns None."""
    placeholders = {path: placeholder(p.get_value()) for path, p in params_of(layer).items()}
    misfits = []
    for table in layouts.values():
        likes = [
            transformed(row, "to_torch", [placeholders[path] for path in row.params])
            for row in table
        ]
        keys = [f"{prefix}{key}" for row in table for key in row.keys]
        expected = dict(zip(keys, (like.shape for some in likes for like in some), strict=True))
        got = {key: tuple(getattr(weights[key], "shape", ())) for key in keys if key in weights}
        if 2 * len(got) >= len(keys):
            wrong = [key for key, shape in got.items() if shape != expected[key]]
            misfits.append([f"{k}: expected shape {expected[k]}, got {got[k]}" for k in wrong])
    return next(iter(min(misfits, key=len)), None)


def placeholder(value) -> np.ndarray:
    """An array with the shape and dtype of a value that uses no memory, to run transforms on."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)
