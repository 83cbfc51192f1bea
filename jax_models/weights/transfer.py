"""Loads a torch `state_dict` into a layer and exports one, using the layer's weight tables."""

__all__ = ["from_torch", "to_torch"]

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import EllipsisType, MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jax_models.checks.keywords import suggests_arguments
from jax_models.weights.bounds import bounds
from jax_models.weights.keys import Fault, checked_mapping, joined, lines
from jax_models.weights.layouts import (
    counterpart,
    other_arrays,
    params_of,
    placeholder,
    transformed,
    weight_table,
)
from jax_models.weights.other_params import adopt, other_params
from jax_models.weights.rows import Weight, join
from jax_models.weights.stored import StoredArray, as_numpy, dtype_of, is_floating
from jax_models.weights.tables import Table
from jax_models.weights.wrappers import find_wrapped, wrapper_entered

Layer = TypeVar("Layer", bound=nnx.Module)


@suggests_arguments
def from_torch(
    layer: Layer,
    state_dict: Mapping[str, Any],
    layout: str | Table | None = None,
    *,
    prefix: str = "",
) -> Layer:
    """Loads a torch `state_dict` into a layer in place, and returns the layer.

        >>> import torch
        >>> layer = LSTM(5, 6, rngs=nnx.Rngs(0))
        >>> layer = from_torch(layer, torch.nn.LSTM(5, 6).state_dict())

    Args:
        layer: a layer of this package, or any `nnx.Module` if `layout` is a table for it, built
            with the sizes and options of the torch module. Its parameters may be abstract
            (`nnx.eval_shape`), if it has no dropout.
        state_dict: torch tensors (or arrays) by key, as returned by `module.state_dict()`.
        layout: the name of a layout, or a table. None: the layout whose keys are in the state_dict.
        prefix: the path of the torch module if the `state_dict` is that of a larger model, such as
            "encoder.lstm.". Only keys that start with the prefix are read.

    Every key is used once and every parameter is set once. Values are never changed, so a dtype
    that the parameter cannot represent exactly is refused, and so are integers and bools for
    floating parameters. A parameter keeps its dtype, its sharding and its metadata. Under
    `jax.set_mesh`, a parameter that is not yet on a mesh gets the sharding in its metadata
    (`nnx.with_partitioning`). Without such metadata, it is replicated on all devices of the mesh.

    A layer that can train one of two parameters, such as the decay of an `RGLRU`, then trains the
    one that the weights have, unless an option of its constructor chose the other. The parameter is
    replaced, so load weights before you make views (`nnx.view`) or an optimizer for the layer.

    Raises:
        TypeError: `layer` is not an `nnx.Module`, `state_dict` is not a mapping, `layout` is
            neither a name nor a table, `prefix` is not a string, or the layer has no layouts of its
            own and `layout` is None.
        ValueError: the layout is unknown, no key has the prefix, a row of the table does not fit,
            or keys are missing, unexpected, of another shape or of a wider dtype, or have values
            outside the bounds of a parameter. The message lists all such keys, and the layer is
            left unchanged. If the weights are under another prefix or in an entry, the message says
            which argument to pass, and if a prefix takes only some keys of a wrapper such as an
            adapter, it says how to get the weights back. Also if the sharding of a parameter does
            not fit the mesh, or a parameter is traced.

    Warns:
        UserWarning: weights are NaN or infinite.

    """
    params = params_of(layer)
    place, whole = _place(prefix), checked_mapping("state_dict", state_dict)
    if place:
        if wrapper := wrapper_entered(whole, f"{place}."):
            raise ValueError(f'prefix: "{place}." leads into {wrapper}')
        state_dict = {k: v for k, v in whole.items() if str(k).startswith(f"{place}.")}
    # Find the table, and the sharding of each parameter. If the layer's options leave open which
    # parameter it trains, the keys decide.
    name, table = weight_table(layer, layout, whole, place)
    params |= (others := other_params(layer, table))
    shardings = {path: _sharding(path, param) for path, param in params.items()}

    # Check all shapes and dtypes before any values are read, because reading can take long.
    placeholders = {path: placeholder(param.get_value()) for path, param in params.items()}
    what = f"{type(layer).__name__} {f'in layout {name!r}' if name else 'with this table'}"
    check_entries(table, placeholders, state_dict, _check, what, other_arrays(layer))

    # Read all arrays before any parameter is set, so that an error leaves the layer unchanged.
    placed, faults, not_finite = {}, [], []
    for row in table:
        try:
            placed |= _put_row(row, state_dict, params, shardings, not_finite)
        except ValueError as error:
            faults.append(("", str(error), ""))
    _raise_faults(faults, what)

    if not_finite:
        warnings.warn(
            "state_dict: numbers that are not finite in "
            f"{', '.join(joined(dict.fromkeys(not_finite)))}",
            stacklevel=3,
        )
    for path, value in placed.items():
        params[path].set_value(value)
    adopt(layer, others)
    return layer


@suggests_arguments
def to_torch(
    layer: Any, layout: str | Table | None = None, *, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Exports the layer's weights as a `state_dict` of numpy arrays, bit for bit.

        >>> state_dict = to_torch(LSTM(5, 6, rngs=nnx.Rngs(0)))
        >>> state_dict["weight_ih_l0"].shape
        (24, 5)

    Args:
        layer: a layer of this package, or any `nnx.Module` if `layout` is a table for it.
        layout: the name of a layout, or a table. None: the layer's first layout.
        prefix: the path of the torch module in a larger model, such as "encoder.lstm.", with which
            each key starts.

    Each array is a contiguous copy, ready for `torch.from_numpy`. numpy has no bfloat16, so such
    arrays have the dtype of `ml_dtypes`. To read them in torch, use
    `torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)`.

    Raises:
        TypeError: `layer` is not an `nnx.Module`, `layout` is neither a name nor a table, or
            `prefix` is not a string.
        ValueError: this layer has no such layout, or its parameters have no values.

    """
    place, weights = _place(prefix), stored_weights(layer, layout)
    return {join(place, key): np.array(value, order="C") for key, value in weights.items()}


def stored_weights(layer: Any, layout: str | Table | None = None) -> dict[str, StoredArray]:
    """Like `to_torch`, but each array is computed only when its values are read.

    Raises:
        TypeError: as for `to_torch`.
        ValueError: as for `to_torch`.

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
        likes = transformed(row, "to_torch", [placeholder(array) for array in arrays])
        for i, (key, like) in enumerate(zip(row.keys, likes, strict=True)):
            read = partial(_exported, row, arrays, i)
            weights[key] = StoredArray(like.shape, like.dtype, read)
    return weights


def _place(prefix: str) -> str:
    """Returns the path of a torch module, given the prefix of its keys."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: expected a string, got {type(prefix).__name__}")
    return prefix.removesuffix(".")


def _exported(row: Weight, params: list[Any], i: int, part: slice | EllipsisType) -> np.ndarray:
    """Computes the array of a row's i-th key."""
    return transformed(row, "to_torch", [_on_host(param) for param in params])[i][part]


def _on_host(value: Any) -> np.ndarray:
    """Copies a parameter, which may be sharded, to the host.

    JAX keeps the copy of an array that was read. So another array of the same shards is read, which
    is then freed.
    """
    if isinstance(value, jax.Array):
        shards = [shard.data for shard in value.addressable_shards]
        value = jax.make_array_from_single_device_arrays(value.shape, value.sharding, shards)
    return np.asarray(value)


def check_entries(
    table: Table,
    placeholders: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    check: Callable[[Any, np.ndarray], None],
    what: str,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Checks a state_dict's entries against arrays of the expected shapes and dtypes.

    An entry that corresponds to no parameter may have any dtype. `others` has the layer's arrays
    that no table can name, by path.

    Raises:
        ValueError: keys are missing, unexpected, or refused by `check`. The message lists all of
            them.

    """
    faults, missing = [], {}
    for row in table:
        likes = transformed(row, "to_torch", [placeholders[path] for path in row.params])
        for key, like in zip(row.keys, likes, strict=True):
            if key not in state_dict:
                missing |= {key: like.shape} if row.params else {}
                continue
            value = state_dict[key]
            if row.any_division and (size := np.shape(value)[:1]):
                like = np.broadcast_to(np.zeros((), like.dtype), (*size, *like.shape[1:]))
            try:
                (check if row.params else check_shape)(value, like)
            except ValueError as error:
                faults.append(("", key, f": {error}"))
    known = {key for row in table for key in (*row.keys, *row.tied)}
    unexpected = [str(key) for key in state_dict if key not in known]
    wrapped = find_wrapped(unexpected)
    of_wrappers = {key for each in wrapped for key in each.keys}
    shapes = {
        key: tuple(getattr(state_dict.get(key), "shape", ()))
        for key in unexpected
        if key not in of_wrappers
    }
    faults += [("unexpected key ", key, counterpart(key, shapes[key], others)) for key in shapes]
    faults += [("unexpected keys of ", each.description, "") for each in wrapped]
    _raise_faults([*_missing(missing, shapes), *faults], what)


def _missing(missing: Mapping[str, Any], unexpected: Mapping[str, Any]) -> list[Fault]:
    """Describes the missing keys, and suggests an unexpected key if only one has the same shape.

    A key whose name says that it is something else, such as a bias for a weight, is not suggested.
    """
    faults = []
    for key, shape in missing.items():
        same_shape = [other for other, its in unexpected.items() if its == shape]
        others = [other for other in same_shape if len({_kind(key), _kind(other)} - {None}) < 2]
        alone = len(others) == 1 and [*missing.values()].count(shape) == 1
        hint = f": the unexpected {others[0]} has it" if alone else ""
        faults.append(("missing key ", key, f", shape {shape}{hint}"))
    return faults


def _kind(key: str) -> str | None:
    """What a key is called in torch: its last word without numbers, if it is a usual one."""
    usual = re.search(r"(weight|bias|running_mean|running_var)[^.]*$", key)
    return usual and usual[1]


def _check(value: Any, like: np.ndarray) -> None:
    """Refuses a value of the state_dict that does not fit the shape and dtype of `like`."""
    dtype = dtype_of(value)
    if np.ma.isMaskedArray(value):
        raise ValueError("expected a whole array, got a masked one: fill it by .filled()")
    check_shape(value, like)
    if jnp.issubdtype(like.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"expected floating numbers, got {dtype}")
    if jnp.issubdtype(dtype, jnp.floating) and not is_floating(value):
        raise ValueError(
            f"8-bit floats are not supported, got {dtype}: cast the weights to float16 or wider "
            "first"
        )
    if not np.can_cast(dtype, like.dtype, "safe"):
        raise ValueError(
            f"{dtype} does not fit into {like.dtype} exactly: build the layer with "
            f"param_dtype={dtype} (float64 needs jax_enable_x64), or cast the state_dict first"
        )


def check_shape(value: Any, like: np.ndarray) -> None:
    """Refuses an entry of a state_dict that does not have the shape of `like`."""
    if np.shape(value) != like.shape:
        raise ValueError(f"expected shape {like.shape}, got {tuple(np.shape(value))}")


def _put_row(
    row: Weight,
    state_dict: Mapping[str, Any],
    params: Mapping[str, nnx.Variable],
    shardings: Mapping[str, Any],
    not_finite: list[str],
) -> dict[str, jax.Array]:
    """Returns a row's parameters in their shardings, and adds keys with NaN or ∞ to `not_finite`.

    Besides the result, at most one copy of the arrays is in memory. If the file can be read in
    parts, the copy of a stack has only the part of one device.

    Raises:
        ValueError: an array cannot be read, or does not fit its parameter.

    """
    if not row.params:
        return {}
    entries = {key: state_dict[key] for key in row.keys}
    # JAX may use the memory of an array that it is given, so copy arrays that belong to the caller.
    stored = all(isinstance(entry, StoredArray) for entry in entries.values())
    own = np.asarray if stored else np.array
    likes = {path: params[path].get_value() for path in row.params}

    def put(path: str, value: np.ndarray) -> jax.Array:
        sharding, value = shardings[path], value.astype(likes[path].dtype, copy=False)
        if sharding is None:
            return jax.device_put(own(value))
        # Unlike `device_put`, this does not send the array to other processes, to compare it.
        return jax.make_array_from_callback(value.shape, sharding, lambda part: own(value[part]))

    if not row.stacks or any(shardings[path] is None for path in row.params):
        return {
            path: put(path, value).block_until_ready()
            for path, value in _read_params(row, entries, params, not_finite)
        }
    # Read each part of the stacks once, and give it to the devices that hold it.
    entries = {
        key: entry if getattr(entry, "reads_parts", True) else _read(key, entry)
        for key, entry in entries.items()
    }
    held = {
        path: [
            (range(*index[0].indices(like.shape[0])), index[1:], device)
            for device, index in shardings[path].addressable_devices_indices_map(like.shape).items()
        ]
        for path, like in likes.items()
    }
    shards: dict[str, list[jax.Array]] = {path: [] for path in row.params}
    for part in dict.fromkeys(part for each in held.values() for part, _, _ in each):
        is_whole = all(len(part) == like.shape[0] for like in likes.values())
        given = entries if is_whole else _part_of(entries, part)
        for path, value in _read_params(row, given, params, not_finite, part):
            shards[path] += [
                jax.device_put(own(value[:, *rest], likes[path].dtype), device).block_until_ready()
                for its_part, rest, device in held[path]
                if its_part == part
            ]
    return {
        path: jax.make_array_from_single_device_arrays(like.shape, shardings[path], shards[path])
        for path, like in likes.items()
    }


def _part_of(entries: Mapping[str, Any], part: range) -> dict[str, Any]:
    """The entries for a part of a stack: some of the keys, or a part of the only key's array."""
    chosen = slice(part.start, part.stop)
    if len(entries) > 1:
        return dict([*entries.items()][chosen])
    return {key: entry[chosen] for key, entry in entries.items()}


def _read_params(
    row: Weight,
    entries: Mapping[str, Any],
    params: Mapping[str, nnx.Variable],
    not_finite: list[str],
    part: range | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads a row's entries, and yields the values of its parameters, or of a part of them.

    Raises:
        ValueError: an array cannot be read, or does not fit its parameter.

    """
    arrays = {key: _read(key, entry) for key, entry in entries.items()}
    not_finite += [key for key, array in arrays.items() if not np.isfinite(array).all()]
    values = [*transformed(row, "to_jax", [*arrays.values()])]
    del arrays
    for path in row.params:
        value = values.pop(0)
        if fault := _misfit(params[path], value, part):
            raise ValueError(f"{', '.join(entries)}: {fault}")
        yield path, value


def _sharding(path: str, param: nnx.Variable) -> Sharding | None:
    """Returns the sharding for a parameter's array, or None for an uncommitted array.

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
    """Returns a mesh like the one that was set when the layer was built, on the present devices."""
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


def _raise_faults(faults: list[Fault], what: str) -> None:
    if faults:
        raise ValueError(f"state_dict does not fit {what}:\n  " + "\n  ".join(lines(faults)))


def _misfit(param: nnx.Variable, value: np.ndarray, part: range | None) -> str | None:
    """Describes why a value does not fit the parameter or a part of it, or returns None."""
    shape = param.get_value().shape
    if part is not None:
        shape = len(part), *shape[1:]
    if value.shape != shape:
        return f"to_jax gives shape {value.shape}, the parameter has {shape}"
    interval = bounds(param)
    if interval is None:
        return None
    low, high = interval
    count = np.count_nonzero(~((value >= low) & (value <= high)))  # NaN is outside
    return f"{count} of {value.size} values outside [{low:g}, {high:g}]" if count else None
