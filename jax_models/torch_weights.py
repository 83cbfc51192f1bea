"""Weight tables: how a layer's parameters and a torch `state_dict` become each other.

A table is a list of `Weight` rows, each naming parameters of the layer, keys of the `state_dict`,
and the transform between them with its inverse. A layer's `torch_layouts` gives its tables by
layout name; `from_torch` and `to_torch` read the same table in the two directions. Neither needs
torch to be installed.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jax_models.bounds import bounds
from jax_models.constant import Constant

Arrays = tuple[np.ndarray, ...]


class Weight(NamedTuple):
    """One row: `to_jax` takes the keys' arrays to the parameters', `to_torch` takes them back."""

    params: tuple[str, ...]
    keys: tuple[str, ...]
    to_jax: Callable[..., Arrays]
    to_torch: Callable[..., Arrays]


Table = list[Weight]
Layouts = dict[str, Table]


class HasLayouts(Protocol):
    """A layer that knows its torch layouts.

    One that is easily given another model's weights may also have `foreign_format(keys)`, which
    says whose they are.
    """

    def torch_layouts(self) -> Layouts:
        """The weight tables of this layer, by layout name; the first is the one to export to."""
        ...


Layer = TypeVar("Layer", bound=nnx.Module)


def same(param: str, key: str) -> Weight:
    """The parameter is the key's array."""
    return Weight((param,), (key,), lambda a: (a,), lambda a: (a,))


def transposed(param: str, key: str) -> Weight:
    """The (in, out) parameter is the key's (out, in) matrix."""
    return Weight((param,), (key,), lambda a: (a.T,), lambda a: (a.T,))


def gates(param: str, keys: list[str]) -> Weight:
    """The gates' (out, in) matrices, or (out,) biases, are side by side along the last axis."""
    return Weight(
        (param,),
        tuple(keys),
        lambda *gates: (np.concatenate([gate.T for gate in gates], axis=-1),),
        lambda a: tuple(gate.T for gate in np.split(a, len(keys), axis=-1)),
    )


def summed(params: tuple[str, str], key: str) -> Weight:
    """The key's array is the sum of two parameters. Import puts all of it into the first.

    The second becomes −0.0, which leaves every bit of the sum alone, even a −0.0. This is the one
    transform that does not return every layer's parameters: what it keeps of two is their sum.
    """
    return Weight(
        params, (key,), lambda a: (a, np.full_like(a, -0.0)), lambda a, b: (np.add(a, b),)
    )


def squeezed(param: str, key: str, axes: tuple[int, ...]) -> Weight:
    """The parameter is the key's array without some axes of size 1."""
    return Weight(
        (param,), (key,), lambda a: (np.squeeze(a, axes),), lambda a: (np.expand_dims(a, axes),)
    )


def tied(param: str, keys: tuple[str, str]) -> Weight:
    """Both keys' arrays are the parameter; import refuses two that differ."""

    def one(a: np.ndarray, b: np.ndarray) -> Arrays:
        if a.tobytes() != b.tobytes():
            raise ValueError("two different arrays, where the model has one for both")
        return (a,)

    return Weight((param,), keys, one, lambda a: (a, a))


def linear(param: str, key: str, *, bias: bool = True) -> Table:
    """`nnx.Linear` and `torch.nn.Linear`."""
    weight = transposed(f"{param}.kernel", f"{key}.weight")
    return [weight, same(f"{param}.bias", f"{key}.bias")] if bias else [weight]


def layer_norm(param: str, key: str) -> Table:
    """`nnx.LayerNorm` and `torch.nn.LayerNorm`."""
    return [same(f"{param}.scale", f"{key}.weight"), same(f"{param}.bias", f"{key}.bias")]


def rms_norm(param: str, key: str) -> Table:
    """`nnx.RMSNorm` and `torch.nn.RMSNorm`."""
    return [same(f"{param}.scale", f"{key}.weight")]


def embedding(param: str, key: str) -> Table:
    """`nnx.Embed` and `torch.nn.Embedding`."""
    return [same(f"{param}.embedding", f"{key}.weight")]


def nested(table: Table, param: str, key: str) -> Table:
    """The table of a layer that is the attribute `param` here and the submodule `key` in torch."""
    return [
        row._replace(
            params=tuple(f"{param}.{p}" for p in row.params),
            keys=tuple(f"{key}.{k}" for k in row.keys),
        )
        for row in table
    ]


def from_torch(
    layer: Layer, state_dict: Mapping[str, Any], layout: str | Table | None = None
) -> Layer:
    """Load a torch `state_dict` into a layer, in place, and return the layer.

    Args:
        layer: a layer of this package, or any `nnx.Module` with a table of its own as `layout`,
            built with the sizes and options of the torch module. Its parameters may be abstract
            (`nnx.eval_shape`), if it has no dropout.
        state_dict: torch tensors (or arrays) by key, as `module.state_dict()` gives them.
        layout: the layout's name, or a table; by default the one whose keys these are.

    Every key is used once and every parameter is set once. Values are never changed: a dtype that
    the parameter cannot hold exactly is refused. A parameter keeps its dtype and its sharding.

    Raises:
        TypeError: the state_dict is no mapping, or a foreign module has no table.
        ValueError: the layout is unknown, or keys are missing, unexpected, of another shape or of
            a wider dtype, or hold values outside a parameter's bounds: all of them are listed, and
            the layer is left as it was.

    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a mapping of keys to tensors, as module.state_dict() gives it, "
            f"got {type(state_dict).__name__}"
        )
    foreign_format = getattr(layer, "foreign_format", None)
    if foreign_format is not None and (foreign := foreign_format(state_dict)):
        raise ValueError(f"state_dict: {foreign}")
    params = _params(layer)
    name, table = weight_table(layer, layout, set(state_dict))

    arrays, faults = {}, []
    for row in table:
        expected = row.to_torch(*(_placeholder(params[p].get_value()) for p in row.params))
        for key, like in zip(row.keys, expected, strict=True):
            if key not in state_dict:
                faults.append(f"missing key {key}, shape {like.shape}")
                continue
            arrays[key] = value = as_numpy(state_dict[key])
            if value.shape != like.shape:
                faults.append(f"{key}: expected shape {like.shape}, got {value.shape}")
            elif not np.can_cast(value.dtype, like.dtype, "safe"):
                faults.append(
                    f"{key}: {value.dtype} does not fit into {like.dtype} exactly: build the layer "
                    f"with param_dtype={value.dtype} (float64 needs jax_enable_x64), or cast the "
                    "state_dict first"
                )
    known = {key for row in table for key in row.keys}
    faults += [f"unexpected key {key}" for key in state_dict if key not in known]
    _refuse(faults, layer, name)

    loaded = {}
    for row in table:
        try:
            values = row.to_jax(*(arrays[key] for key in row.keys))
        except ValueError as error:
            faults.append(f"{', '.join(row.keys)}: {error}")
            continue
        loaded |= zip(row.params, values, strict=True)
        faults += [
            f"{', '.join(row.keys)}: {fault}"
            for path, value in zip(row.params, values, strict=True)
            if (fault := _out_of_bounds(params[path], value))
        ]
    _refuse(faults, layer, name)

    for path, value in loaded.items():
        old = params[path].get_value()
        own = np.array(value, dtype=old.dtype)  # jax may keep the memory that it is given
        params[path].set_value(jax.device_put(own, getattr(old, "sharding", None)))
    return layer


def to_torch(layer: Any, layout: str | Table | None = None) -> dict[str, np.ndarray]:
    """The layer's weights as a `state_dict` of numpy arrays, bit for bit.

    Args:
        layer: a layer of this package, or any `nnx.Module` with a table as `layout`.
        layout: the layout's name, or a table; by default the layer's first.

    Each array is a contiguous copy, ready for `torch.from_numpy`. numpy has no bfloat16 of its
    own: such arrays have the dtype of `ml_dtypes`, and `torch.from_numpy(a.view(np.uint16))
    .view(torch.bfloat16)` reads them.

    Raises:
        ValueError: this layer has no such layout.

    """
    params = _params(layer)
    _, table = weight_table(layer, layout)
    state_dict = {}
    for row in table:
        values = row.to_torch(*(np.asarray(params[path].get_value()) for path in row.params))
        state_dict |= {
            key: np.array(value, order="C") for key, value in zip(row.keys, values, strict=True)
        }
    return state_dict


def weight_table(
    layer: Any, layout: str | Table | None, keys: set[str] | None = None
) -> tuple[str, Table]:
    """A layout's name and table; by default that which has these keys, or the layer's first.

    Raises:
        ValueError: the layer has no such layout, or a table does not name each parameter once.

    """
    if isinstance(layout, list):
        name, table = "of its own", layout
    else:
        layouts = _layouts(layer)
        name = layout
        if name is None:
            name = next(iter(layouts)) if keys is None else _detect(layouts, keys, layer)
        if name not in layouts:
            raise ValueError(
                f"layout: {type(layer).__name__} with these options has {sorted(layouts)}, "
                f"not {name!r}"
            )
        table = layouts[name]
    params = _params(layer)
    named = [path for row in table for path in row.params]
    if sorted(named) != sorted(params):
        raise ValueError(
            f"layout {name!r} names the parameters {sorted(named)}, but "
            f"{type(layer).__name__} has {sorted(params)}"
        )
    return name, table


def _refuse(faults: list[str], layer, layout: str) -> None:
    if faults:
        raise ValueError(
            f"state_dict does not fit {type(layer).__name__} in layout {layout!r}:\n  "
            + "\n  ".join(faults)
        )


def _out_of_bounds(param: nnx.Variable, value: np.ndarray) -> str | None:
    interval = bounds(param)
    if interval is None:
        return None
    low, high = interval
    count = np.count_nonzero(~((value >= low) & (value <= high)))  # NaN is outside
    return f"{count} of {value.size} values outside [{low:g}, {high:g}]" if count else None


def _params(layer) -> dict[str, nnx.Variable]:
    flat = nnx.to_flat_state(nnx.state(layer, (nnx.Param, nnx.BatchStat, Constant)))
    return {".".join(map(str, path)): param for path, param in flat}


def _layouts(layer: HasLayouts) -> Layouts:
    if not hasattr(layer, "torch_layouts"):
        raise TypeError(
            f"layer: {type(layer).__name__} knows no layout of its own: give a table as `layout`"
        )
    layouts = layer.torch_layouts()
    if not layouts:
        raise ValueError(
            f"layer: no torch module has the options of this {type(layer).__name__} "
            "(its layers, directions and biases together)"
        )
    return layouts


def _detect(layouts: Layouts, keys: set[str], layer) -> str:
    """The layout that shares the most keys with a state_dict, least missing first among equals."""
    known = {name: {key for row in table for key in row.keys} for name, table in layouts.items()}
    best = max(known, key=lambda name: (len(known[name] & keys), -len(known[name] - keys)))
    if not known[best] & keys:
        layouts_seen = "\n  ".join(f"{name}: {sorted(known[name])}" for name in known)
        raise ValueError(
            f"state_dict: its keys {sorted(keys)} are of no layout that {type(layer).__name__} "
            f"with these options (layers, directions, biases, projection) has:\n  {layouts_seen}"
        )
    return best


def _placeholder(value) -> np.ndarray:
    """An array of the value's shape and dtype that holds nothing, to run a transform on."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


def as_numpy(value) -> np.ndarray:
    """A torch tensor, of whatever dtype, or an array as a numpy array."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        uint16 = sys.modules["torch"].uint16
        return tensor.contiguous().view(uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
