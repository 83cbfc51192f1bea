"""Load a torch `state_dict` into a layer, and export one, by the layer's weight tables."""

__all__ = ["from_torch", "to_torch"]

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jax_models.ops.keywords import suggests_arguments
from jax_models.weights.bounds import bounds
from jax_models.weights.constant import Constant
from jax_models.weights.keys import Fault, elsewhere, joined, lines
from jax_models.weights.rows import Weight, at
from jax_models.weights.stored import StoredArray, as_numpy, dtype_of, is_floating
from jax_models.weights.tables import HasLayouts, Layouts, Table, nested

Layer = TypeVar("Layer", bound=nnx.Module)


@suggests_arguments
def from_torch(
    layer: Layer,
    state_dict: Mapping[str, Any],
    layout: str | Table | None = None,
    *,
    prefix: str = "",
) -> Layer:
    """Load a torch `state_dict` into a layer, in place, and return the layer.

        >>> import torch
        >>> layer = LSTM(5, 6, rngs=nnx.Rngs(0))
        >>> layer = from_torch(layer, torch.nn.LSTM(5, 6).state_dict())

    Args:
        layer: a layer of this package, or any `nnx.Module` with a table of its own as `layout`,
            built with the sizes and options of the torch module. Its parameters may be abstract
            (`nnx.eval_shape`), if it has no dropout.
        state_dict: torch tensors (or arrays) by key, as `module.state_dict()` gives them.
        layout: the layout's name, or a table. None: the layout that has the state_dict's keys.
        prefix: where the torch module is in the model that the `state_dict` is of, as
            "encoder.lstm.". Only the keys that start so are read.

    Every key is used once and every parameter is set once. Values are never changed: a dtype that
    the parameter cannot hold exactly is refused, and so are integers and bools. A parameter keeps
    its dtype, its sharding and its metadata. Under `jax.set_mesh`, a parameter that is not yet on a
    mesh gets the sharding that its metadata names (`nnx.with_partitioning`). Without such metadata,
    it is replicated on all devices of the mesh.

    Raises:
        TypeError: `layer` is not an `nnx.Module`, `state_dict` not a mapping, `layout` neither a
            name nor a table, or `prefix` no string; or the layer has no layouts of its own and
            `layout` is None.
        ValueError: the layout is unknown, no key is under the prefix, a table's row does not fit,
            or keys are missing, unexpected, of another shape or of a wider dtype, or hold values
            outside a parameter's bounds: all of them are listed, and the layer is left as it was.
            If the weights are under another prefix or in an entry, the message has the argument
            that gives them. Also if a parameter's sharding does not fit the mesh, or a parameter
            is traced.

    Warns:
        UserWarning: weights are NaN or infinite.

    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a mapping of keys to tensors, as module.state_dict() gives it, "
            f"got {type(state_dict).__name__}"
        )
    place, whole = _place(prefix), state_dict
    if place:
        state_dict = {k: v for k, v in whole.items() if str(k).startswith(f"{place}.")}
    foreign_format = getattr(layer, "foreign_format", None)
    if foreign_format is not None and (foreign := foreign_format(state_dict)):
        raise ValueError(f"state_dict: {foreign}")
    params = params_of(layer)
    name, table = weight_table(layer, layout, whole, place)
    shardings = {path: _sharding(path, param) for path, param in params.items()}

    placeholders = {path: _placeholder(param.get_value()) for path, param in params.items()}
    what = f"{type(layer).__name__} {f'in layout {name!r}' if name else 'with this table'}"
    check_entries(table, placeholders, state_dict, _check, what)

    placed, faults, not_finite = {}, [], []
    for row in table:
        try:
            placed |= _placed(row, state_dict, params, shardings, not_finite)
        except ValueError as error:
            faults.append(("", str(error), ""))
    _refuse(faults, what)

    if not_finite:
        warnings.warn(
            f"state_dict: numbers that are not finite in {', '.join(joined(not_finite))}",
            stacklevel=3,
        )
    for path, value in placed.items():
        params[path].set_value(value)
    return layer


@suggests_arguments
def to_torch(
    layer: Any, layout: str | Table | None = None, *, prefix: str = ""
) -> dict[str, np.ndarray]:
    """The layer's weights as a `state_dict` of numpy arrays, bit for bit.

        >>> state_dict = to_torch(LSTM(5, 6, rngs=nnx.Rngs(0)))
        >>> state_dict["weight_ih_l0"].shape
        (24, 5)

    Args:
        layer: a layer of this package, or any `nnx.Module` with a table as `layout`.
        layout: the layout's name, or a table. None: the layer's first layout.
        prefix: where the torch module is in a larger model, as "encoder.lstm.": what each key
            starts with.

    Each array is a contiguous copy, ready for `torch.from_numpy`. numpy has no bfloat16 of its
    own: such arrays have the dtype of `ml_dtypes`, and `torch.from_numpy(a.view(np.uint16))
    .view(torch.bfloat16)` reads them.

    Raises:
        TypeError: `layer` is not an `nnx.Module`, `layout` neither a name nor a table, or `prefix`
            no string.
        ValueError: this layer has no such layout, or its parameters have no values.

    """
    place, weights = _place(prefix), stored_weights(layer, layout)
    return {at(place, key): np.array(value, order="C") for key, value in weights.items()}


def stored_weights(layer: Any, layout: str | Table | None = None) -> dict[str, StoredArray]:
    """What `to_torch` gives, each array made when somebody asks for its numbers.

    Raises:
        TypeError: as `to_torch`.
        ValueError: as `to_torch`.

    """
    params = {path: param.get_value() for path, param in params_of(layer).items()}
    if any(isinstance(value, jax.ShapeDtypeStruct | Tracer) for value in params.values()):
        raise ValueError(
            "layer: its parameters have no values, as under nnx.eval_shape or jax.jit: "
            "load weights first, or call to_torch outside"
        )
    _, table = weight_table(layer, layout)
    weights = {}
    for row in table:
        arrays = [params[path] for path in row.params]
        likes = transformed(row, "to_torch", [_placeholder(array) for array in arrays])
        for i, (key, like) in enumerate(zip(row.keys, likes, strict=True)):
            read = partial(_exported, row, arrays, i)
            weights[key] = StoredArray(like.shape, like.dtype, read)
    return weights


def _place(prefix: str) -> str:
    """The path of a torch module from the prefix of its keys."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: expected a string, got {type(prefix).__name__}")
    return prefix.removesuffix(".")


def _exported(row: Weight, params: list[Any], i: int) -> np.ndarray:
    """The array of a row's i-th key."""
    return transformed(row, "to_torch", [np.asarray(param) for param in params])[i]


def weight_table(
    layer: Any,
    layout: str | Table | None,
    state_dict: Mapping[str, Any] | None = None,
    place: str = "",
) -> tuple[str, Table]:
    """The layout's name and its table. None: the state_dict's layout, or else the layer's first.

    A table of the caller has the name "". `place` is the path of the torch module, where the keys
    are those of a larger one.

    Raises:
        TypeError: the layout is neither a name nor a table.
        ValueError: the layer has no such layout, a table does not name each parameter once, or the
            state_dict is of no layout.

    """
    if isinstance(layout, list) and all(isinstance(row, Weight) for row in layout):
        layouts = {"": layout}
    elif layout is None or isinstance(layout, str):
        layouts = _layouts(layer)
    else:
        raise TypeError(f"layout: expected a name or a list of `Weight` rows, got {layout!r:.100}")
    if isinstance(layout, str):
        if layout not in layouts:
            raise ValueError(
                f"layout: {type(layer).__name__} with these options has {sorted(layouts)}, "
                f"not {layout!r}"
            )
        layouts = {layout: layouts[layout]}
    for name, table in layouts.items():
        what = f"layout {name!r}" if name else "table"
        check_rows(table, params_of(layer), type(layer).__name__, what)
    name = next(iter(layouts)) if state_dict is None else _detect(layouts, state_dict, layer, place)
    return name, nested(layouts[name], "", place)


def check_rows(table: Table, params: Collection[str], kind: str, what: str) -> None:
    """Refuse a table that does not name every parameter once, and no key twice."""
    named = Counter(path for row in table for path in row.params)
    keys = Counter(key for row in table for key in row.keys)
    faults = [
        *(("no row for the parameter ", path, "") for path in params if path not in named),
        *((f"{kind} has no parameter ", path, "") for path in named if path not in params),
        *(("two rows for the parameter ", path, "") for path, count in named.items() if count > 1),
        *(("two rows for the key ", key, "") for key, count in keys.items() if count > 1),
    ]
    if faults:
        raise ValueError(f"{what}: {'; '.join(lines(faults))}")


def check_entries(
    table: Table,
    placeholders: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    check: Callable[[Any, np.ndarray], None],
    what: str,
) -> None:
    """Compare a state_dict's entries with arrays of the shapes and dtypes that they should have.

    An entry that no parameter holds may have any dtype.

    Raises:
        ValueError: keys are missing, unexpected, or refused by `check`: all of them are listed.

    """
    faults, missing = [], {}
    for row in table:
        likes = transformed(row, "to_torch", [placeholders[path] for path in row.params])
        for key, like in zip(row.keys, likes, strict=True):
            if key not in state_dict:
                missing |= {key: like.shape} if row.params else {}
                continue
            try:
                (check if row.params else _check_shape)(state_dict[key], like)
            except ValueError as error:
                faults.append(("", key, f": {error}"))
    known = {key for row in table for key in row.keys}
    unexpected = [str(key) for key in state_dict if key not in known]
    shapes = {key: tuple(getattr(state_dict.get(key), "shape", ())) for key in unexpected}
    _refuse(
        [*_missing(missing, shapes), *faults, *(("unexpected key ", k, "") for k in shapes)], what
    )


def _missing(missing: Mapping[str, Any], unexpected: Mapping[str, Any]) -> list[Fault]:
    """The missing keys, each with the unexpected one of its shape if there is a single one."""
    faults = []
    for key, shape in missing.items():
        others = [other for other, its in unexpected.items() if its == shape]
        alone = len(others) == 1 and [*missing.values()].count(shape) == 1
        hint = f": the unexpected {others[0]} has it" if alone else ""
        faults.append(("missing key ", key, f", shape {shape}{hint}"))
    return faults


def transformed(row: Weight, transform: str, arrays: list[Any]) -> tuple[Any, ...]:
    """Apply a row's transform, and refuse a result that has not one array for each name."""
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
    except Exception as error:  # a table may be anybody's
        raise ValueError(f"{', '.join(row.keys or row.params)}: {error}") from error
    return values


def _check(value: Any, like: np.ndarray) -> None:
    """Refuse a value of the state_dict that has not the shape and the dtype of `like`."""
    dtype = dtype_of(value)
    if np.ma.isMaskedArray(value):
        raise ValueError("expected a whole array, got a masked one: fill it by .filled()")
    _check_shape(value, like)
    if jnp.issubdtype(like.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"expected floating numbers, got {dtype}")
    if jnp.issubdtype(dtype, jnp.floating) and not is_floating(value):
        raise ValueError(f"expected at least 16 bits a number, got {dtype}: make it float first")
    if not np.can_cast(dtype, like.dtype, "safe"):
        raise ValueError(
            f"{dtype} does not fit into {like.dtype} exactly: build the layer with "
            f"param_dtype={dtype} (float64 needs jax_enable_x64), or cast the state_dict first"
        )


def _check_shape(value: Any, like: np.ndarray) -> None:
    if np.shape(value) != like.shape:
        raise ValueError(f"expected shape {like.shape}, got {tuple(np.shape(value))}")


def _placed(
    row: Weight,
    state_dict: Mapping[str, Any],
    params: Mapping[str, nnx.Variable],
    shardings: Mapping[str, Any],
    not_finite: list[str],
) -> dict[str, jax.Array]:
    """What a row makes of its keys' arrays, where its parameters are; its keys of odd numbers.

    No more than one copy of them is in memory beside the result.

    Raises:
        ValueError: an array cannot be read, or a parameter cannot take what the row makes.

    """
    if not row.params:
        return {}
    entries = [state_dict[key] for key in row.keys]
    arrays = [_read(key, entry) for key, entry in zip(row.keys, entries, strict=True)]
    not_finite += [
        key for key, array in zip(row.keys, arrays, strict=True) if not np.isfinite(array).all()
    ]
    values = [*transformed(row, "to_jax", arrays)]
    del arrays
    # JAX may keep the memory that it is given
    own = np.asarray if all(isinstance(entry, StoredArray) for entry in entries) else np.array
    placed = {}
    for path in row.params:
        value = values.pop(0)
        if fault := _misfit(params[path], value):
            raise ValueError(f"{', '.join(row.keys)}: {fault}")
        value = own(value, dtype=params[path].get_value().dtype)
        placed[path] = jax.device_put(value, shardings[path]).block_until_ready()
    return placed


def _sharding(path: str, param: nnx.Variable) -> Sharding | None:
    """Returns the sharding for a parameter's array. None: on the default device, uncommitted.

    Under `jax.set_mesh`, the sharding of an abstract parameter names the axes of the mesh but not
    its devices, and an array made before the mesh was set is not committed to any device.
    """
    value = param.get_value()
    if isinstance(value, Tracer):
        raise ValueError("layer: its parameters are traced, as under jax.jit: load weights outside")
    sharding = getattr(value, "sharding", None)
    named = sharding if isinstance(sharding, NamedSharding) else None
    abstract = named.mesh if named and isinstance(named.mesh, AbstractMesh) else None
    if sharding is not None and getattr(value, "committed", abstract is None):
        return sharding
    mesh = param.get_metadata().get("mesh") or jax.sharding.get_mesh()
    if mesh.empty and abstract is not None:
        mesh = _on_devices(abstract)
    if mesh.empty:
        return None if sharding is None or sharding == jax.device_put(0).sharding else sharding
    spec = named.spec if named else nnx.get_partition_spec(param).get_value()
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(value.shape)
    except ValueError as error:
        raise ValueError(f"layer: {path} cannot be put on the mesh: {error}") from None
    return sharding


def _on_devices(mesh: AbstractMesh) -> Mesh:
    """Returns a mesh like the one that was set when the layer was built, on the devices here."""
    if mesh.size > jax.device_count():
        raise ValueError(
            f"layer: it was built for a mesh of {mesh.size} devices, got {jax.device_count()}: "
            "load weights under jax.set_mesh, too"
        )
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _read(key: str, value: Any) -> np.ndarray:
    try:
        return as_numpy(value)
    except (TypeError, RuntimeError, OSError) as error:
        raise ValueError(f"{key}: it cannot be read: {str(error).splitlines()[0]}") from None


def _refuse(faults: list[Fault], what: str) -> None:
    if faults:
        raise ValueError(f"state_dict does not fit {what}:\n  " + "\n  ".join(lines(faults)))


def _misfit(param: nnx.Variable, value: np.ndarray) -> str | None:
    """Why the parameter cannot take the value."""
    shape = param.get_value().shape
    if value.shape != shape:
        return f"to_jax gives shape {value.shape}, the parameter has {shape}"
    interval = bounds(param)
    if interval is None:
        return None
    low, high = interval
    count = np.count_nonzero(~((value >= low) & (value <= high)))  # NaN is outside
    return f"{count} of {value.size} values outside [{low:g}, {high:g}]" if count else None


def params_of(layer) -> dict[str, nnx.Variable]:
    """What a weight table names: parameters, statistics and constants, by path."""
    if not isinstance(layer, nnx.Module):
        name = f"the class {layer.__name__}" if isinstance(layer, type) else type(layer).__name__
        raise TypeError(f"layer: expected an nnx.Module, got {name}")
    flat = nnx.to_flat_state(nnx.state(layer, (nnx.Param, nnx.BatchStat, Constant)))
    return {".".join(map(str, path)): param for path, param in flat}


def _layouts(layer: HasLayouts) -> Layouts:
    if not hasattr(layer, "torch_layouts"):
        raise TypeError(f"layer: {type(layer).__name__} has no layouts: give a table as `layout`")
    layouts = layer.torch_layouts()
    if not layouts:
        raise ValueError(
            f"layer: no torch module has the options of this {type(layer).__name__} "
            "(its layers, directions and biases together)"
        )
    return layouts


def _detect(layouts: Layouts, state_dict: Mapping[str, Any], layer: Any, place: str) -> str:
    """The layout that shares the most keys with a state_dict; of equals, the one missing fewest."""
    start = at(place, "")
    keys = {str(key).removeprefix(start) for key in state_dict if str(key).startswith(start)}
    known = {name: {key for row in table for key in row.keys} for name, table in layouts.items()}
    best = max(known, key=lambda name: (len(known[name] & keys), -len(known[name] - keys)))
    if known[best] & keys or not known[best]:
        return best
    if not state_dict:
        raise ValueError("state_dict: it has no keys")
    if found := elsewhere(state_dict, known.values(), partial(_misfit_at, layouts, layer)):
        got = f'prefix: got "{start}", but ' if place else "state_dict: "
        raise ValueError(f"{got}{found}")
    has = ", ".join(joined(sorted(map(str, state_dict))))
    if not keys:
        raise ValueError(f"prefix: no key starts with {start}, state_dict has {has}")
    if len(layouts) == 1:
        return best  # what differs is listed key by key
    expected = "; ".join(
        f"layout {name!r} takes {', '.join(joined(sorted(known[name])))}" for name in known
    )
    raise ValueError(
        f"state_dict: none of its keys fits {type(layer).__name__} with these options: it has "
        f"{has}; {expected}"
    )


def _misfit_at(layouts: Layouts, layer: Any, weights: Mapping[str, Any], prefix: str) -> str | None:
    """The first shape under a prefix that does not fit; None if all of a layout's shapes do."""
    placeholders = {path: _placeholder(p.get_value()) for path, p in params_of(layer).items()}
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


def _placeholder(value) -> np.ndarray:
    """An array of the value's shape and dtype that holds nothing, to run a transform on."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)
