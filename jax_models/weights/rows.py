"""Rows of weight tables: which parameter of a layer is which key of a torch `state_dict`.

The transforms work on arrays of NumPy and of JAX, so that a table can be read backwards and can be
differentiated through. None of this needs torch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer


class Weight(NamedTuple):
    """A row of a table.

    `to_jax` gets the arrays of the keys and returns the tuple of the parameters' arrays; `to_torch`
    gets the parameters' and returns the keys'. Both get arrays of NumPy or of JAX. A row without
    parameters names keys that the layer has no use for, and that may be missing.
    """

    params: tuple[str, ...]
    keys: tuple[str, ...]
    to_jax: Callable[..., tuple[Any, ...]]
    to_torch: Callable[..., tuple[Any, ...]]
    separate: bool = True
    """False if a key's array is a sum of parameters, which cannot be compared one by one."""
    exact: bool = True
    """Do the keys' arrays come back from the parameters as they were?"""


def same(param: str, key: str) -> Weight:
    """The parameter is the key's array."""
    return Weight((param,), (key,), lambda a: (a,), lambda a: (a,))


def transposed(param: str, key: str) -> Weight:
    """The (in, out) parameter is the key's (out, in) matrix."""
    return Weight((param,), (key,), lambda a: (a.T,), lambda a: (a.T,))


def flipped(param: str, key: str) -> Weight:
    """The (…, in, out) parameter is the key's (out, in, …) array, as in `nnx.Conv`."""
    return Weight((param,), (key,), lambda a: (last_first(a),), lambda a: (first_last(a),))


def gates(param: str, keys: list[str]) -> Weight:
    """The gates' (out, in) matrices, or (out,) biases, are side by side along the last axis."""
    return Weight(
        (param,),
        tuple(keys),
        lambda *gates: (namespace(gates[0]).concat([gate.T for gate in gates], axis=-1),),
        lambda a: tuple(gate.T for gate in namespace(a).split(a, len(keys), axis=-1)),
    )


def parts(params: list[str], key: str, *, transpose: bool = True) -> Weight:
    """The key's (n · out, in) matrix, or (n · out,) bias, holds n parameters, each transposed."""

    def turned(a):
        return a.T if transpose else a

    return Weight(
        tuple(params),
        (key,),
        lambda a: tuple(turned(part) for part in namespace(a).split(a, len(params))),
        lambda *values: (namespace(values[0]).concat([turned(value) for value in values]),),
    )


def summed(params: tuple[str, str], key: str) -> Weight:
    """The key's array is the sum of two parameters. Import puts all of it into the first.

    The second becomes −0.0, because adding −0.0 changes no number, not even −0.0. Of the two
    parameters only the sum survives a round trip.
    """
    return Weight(
        params,
        (key,),
        lambda a: (a, namespace(a).full_like(a, -0.0)),
        lambda a, b: (a + b,),
        separate=False,
    )


def added(param: str, keys: tuple[str, str]) -> Weight:
    """The parameter is the sum of two keys' arrays, as of torch's `bias_ih` and `bias_hh`.

    Export writes the sum to the first key and −0.0 to the second: the torch module computes the
    same, but its two arrays do not come back one by one.
    """
    return Weight(
        (param,),
        keys,
        lambda a, b: (a + b,),
        lambda a: (a, namespace(a).full_like(a, -0.0)),
        exact=False,
    )


def squeezed(param: str, key: str, axes: tuple[int, ...]) -> Weight:
    """The parameter is the key's array without some axes of size 1."""
    return Weight(
        (param,),
        (key,),
        lambda a: (namespace(a).squeeze(a, axes),),
        lambda a: (namespace(a).expand_dims(a, axes),),
    )


def stacked(params: tuple[str, ...], key: str, axes: tuple[int, ...] = ()) -> Weight:
    """The parameters are the key's rows, without some axes of size 1."""
    return Weight(
        params,
        (key,),
        lambda a: tuple(namespace(a).squeeze(a, axes)),
        lambda *rows: (namespace(rows[0]).expand_dims(namespace(rows[0]).stack(rows), axes),),
    )


def expanded(param: str, key: str, axes: tuple[int, ...]) -> Weight:
    """The parameter is the key's array with more axes, of size 1."""
    row = squeezed(param, key, axes)
    return row._replace(to_jax=row.to_torch, to_torch=row.to_jax)


def tied(param: str, keys: tuple[str, ...]) -> Weight:
    """All keys' arrays are the parameter; import refuses two that differ."""

    def one(a, *others):
        if not isinstance(a, Tracer):
            numbers = np.asarray(a).tobytes()
            if any(np.asarray(other).tobytes() != numbers for other in others):
                raise ValueError("two different arrays, where the model has one")
        return (a,)

    return Weight((param,), keys, one, lambda a: (a,) * len(keys))


def unused(key: str, value: np.ndarray) -> Weight:
    """A key that no parameter holds, such as a counter.

    The key may be missing, and import checks only its shape. Export writes `value`, in its own
    dtype, instead of what import read.
    """
    return Weight((), (key,), lambda a: (), lambda: (value,), exact=False)


def reshaped(row: Weight, shape: tuple[int, ...], flat: tuple[int, ...]) -> Weight:
    """The row, its one parameter of a shape instead of the `flat` one that the row makes."""
    return row._replace(
        to_jax=lambda a: (row.to_jax(a)[0].reshape(shape),),
        to_torch=lambda a: row.to_torch(a.reshape(flat)),
    )


def at(place: str, name: str) -> str:
    """The name inside a module; "" is the whole."""
    return f"{place}.{name}" if place else name


def namespace(a) -> Any:
    """NumPy or jax.numpy, whose array it is."""
    return a.__array_namespace__()


def last_first(a):
    """(out, in, …) as (…, in, out)."""
    return a.transpose(*range(2, a.ndim), 1, 0)


def first_last(a):
    """(…, in, out) as (out, in, …)."""
    return a.transpose(a.ndim - 1, a.ndim - 2, *range(a.ndim - 2))
