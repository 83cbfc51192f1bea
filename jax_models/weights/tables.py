"""Weight tables: which parameter of a layer is which key of a torch `state_dict`.

A table is a list of `Weight` rows. Each row names parameters of the layer, keys of the
`state_dict`, the transform from keys to parameters, and its inverse. A layout is the name of a
table: a layer that can read several kinds of `state_dict` has a table for each, and its
`torch_layouts` returns them by name. `from_torch` and `to_torch` read the same table in the two
directions. None of this needs torch.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np


class Weight(NamedTuple):
    """A row of a table.

    `to_jax` gets the arrays of the keys and returns the tuple of the parameters' arrays; `to_torch`
    gets the parameters' and returns the keys'.
    """

    params: tuple[str, ...]
    keys: tuple[str, ...]
    to_jax: Callable[..., tuple[np.ndarray, ...]]
    to_torch: Callable[..., tuple[np.ndarray, ...]]


Table = list[Weight]
Layouts = dict[str, Table]
"""Tables by the names of their layouts."""


class HasLayouts(Protocol):
    """A layer that knows its torch layouts.

    It may also have `foreign_format(keys)`, which returns a message if the keys are those of
    another model whose weights are easily confused with its own, or else None.
    """

    def torch_layouts(self) -> Layouts:
        """The weight tables of this layer, by layout name; the first is the one to export to."""
        ...


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

    The second becomes −0.0, because adding −0.0 changes no number, not even −0.0. This is the one
    transform that is not invertible: of the two parameters only the sum survives a round trip.
    """
    return Weight(
        params, (key,), lambda a: (a, np.full_like(a, -0.0)), lambda a, b: (np.add(a, b),)
    )


def squeezed(param: str, key: str, axes: tuple[int, ...]) -> Weight:
    """The parameter is the key's array without some axes of size 1."""
    return Weight(
        (param,), (key,), lambda a: (np.squeeze(a, axes),), lambda a: (np.expand_dims(a, axes),)
    )


def stacked(params: tuple[str, ...], key: str, axes: tuple[int, ...]) -> Weight:
    """The parameters are the key's rows, without its axes of size 1."""
    return Weight(
        params,
        (key,),
        lambda a: tuple(np.squeeze(a, axes)),
        lambda *arrays: (np.expand_dims(np.stack(arrays), axes),),
    )


def tied(param: str, keys: tuple[str, str]) -> Weight:
    """Both keys' arrays are the parameter; import refuses two that differ."""

    def one(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
        if a.tobytes() != b.tobytes():
            raise ValueError("two different arrays, where the model has one for both")
        return (a,)

    return Weight((param,), keys, one, lambda a: (a, a))


def linear(param: str, key: str, *, bias: bool = True) -> Table:
    """`nnx.Linear` and `torch.nn.Linear`."""
    weight = transposed(f"{param}.kernel", f"{key}.weight")
    return [weight, same(f"{param}.bias", f"{key}.bias")] if bias else [weight]


def dense(param: str, key: str, *, bias: bool = True) -> Table:
    """`nnx.Linear` and Linen's `Dense`."""
    weight = same(f"{param}.kernel", f"{key}.kernel")
    return [weight, same(f"{param}.bias", f"{key}.bias")] if bias else [weight]


def layer_norm(param: str, key: str) -> Table:
    """`nnx.LayerNorm` and `torch.nn.LayerNorm`."""
    return [same(f"{param}.scale", f"{key}.weight"), same(f"{param}.bias", f"{key}.bias")]


def rms_norm(param: str, key: str, name: str = "weight") -> Table:
    """`nnx.RMSNorm` and `torch.nn.RMSNorm`, or one whose scale has another name."""
    return [same(f"{param}.scale", f"{key}.{name}")]


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
