"""Rows of weight tables, which map parameters of a layer to keys of a torch `state_dict`.

The transforms work on arrays of NumPy and JAX, in both directions, and can be differentiated. No
transform needs torch.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from jax_models.checks.arguments import checked
from jax_models.weights.arguments import ROW_ARGUMENTS, checked_names

checked_row = checked(ROW_ARGUMENTS)
"""The decorator of the functions that make a row. It checks their arguments."""


class _Row(NamedTuple):
    """The fields of a `Weight`."""

    params: tuple[str, ...]
    keys: tuple[str, ...]
    to_jax: Callable[..., tuple[Any, ...]]
    to_torch: Callable[..., tuple[Any, ...]]
    separate: bool
    """Whether the parameters can be compared one by one. False if a key's array is their sum."""
    exact: bool
    """Whether export restores the keys' arrays exactly as they were imported."""
    any_division: bool
    """Whether the keys' arrays are a parameter divided along the first axis at any places. Import
    checks only their total size.
    """
    stacks: bool
    """Whether the i-th array of each parameter depends only on the i-th of the key's array, or on
    the i-th key. Import then reads only what devices of this process hold.
    """
    tied: tuple[str, ...]
    """The keys under which a state_dict may have the row's array. Import needs only one of them, or
    none if the row has no parameters. Empty: import needs all keys.
    """
    otherwise: "Weight | None"
    """The `Weight` that takes the place of this row if a state_dict has its keys instead. The layer
    then trains its parameters instead of this row's (`other_params`). None: there is no other.
    """


class Weight(_Row):
    """A row of a table.

    `to_jax` receives the arrays of the keys and returns a tuple with the arrays of the parameters.
    `to_torch` receives the arrays of the parameters and returns a tuple with those of the keys.
    Both receive arrays of NumPy or JAX. A row without parameters names keys that the layer does not
    use, and that may be missing.

    Raises:
        TypeError: `params`, `keys` or `tied` is neither a tuple nor a list of names, or `separate`,
            `exact`, `any_division` or `stacks` is not a bool.
        ValueError: `params`, `keys` or `tied` has a name twice.

    """

    __slots__ = ()

    def __new__(
        cls,
        params: Sequence[str],
        keys: Sequence[str],
        to_jax: Callable[..., tuple[Any, ...]],
        to_torch: Callable[..., tuple[Any, ...]],
        separate: bool = True,
        exact: bool = True,
        any_division: bool = False,
        stacks: bool = False,
        tied: Sequence[str] = (),
        otherwise: "Weight | None" = None,
    ) -> "Weight":
        """Makes a row from its fields."""
        params, keys = checked_names("params", params), checked_names("keys", keys)
        flags = {"separate": separate, "exact": exact}
        flags |= {"any_division": any_division, "stacks": stacks}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {flag!r:.100}")
        others = {"tied": checked_names("tied", tied), "otherwise": otherwise}
        return super().__new__(cls, params, keys, to_jax, to_torch, **flags, **others)

    def within(self, param: str, key: str) -> "Weight":
        """Returns the row of a layer that is the attribute `param` and torch's submodule `key`."""
        return self._replace(
            params=tuple(join(param, p) for p in self.params),
            keys=tuple(join(key, k) for k in self.keys),
            tied=tuple(join(key, k) for k in self.tied),
            otherwise=self.otherwise and self.otherwise.within(param, key),
        )

    def for_keys(self, state_dict: Collection[Any]) -> "Weight":
        """Returns the row for the keys of a state_dict: itself, or the one that it has `otherwise`.

        A tied row of a parameter is returned with those of its keys that the state_dict has.
        """
        other = self.otherwise
        if other and {*other.keys, *self.keys} & {*state_dict} == {*other.keys}:
            return other
        there = tuple(key for key in self.tied if key in state_dict)
        if not (there and self.params):
            return self
        return self._replace(keys=there, to_torch=lambda *a: self.to_torch(*a)[:1] * len(there))


@checked_row
def same(param: str, key: str) -> Weight:
    """The parameter and the key have the same array."""
    return Weight((param,), (key,), lambda a: (a,), lambda a: (a,))


@checked_row
def transposed(param: str, key: str) -> Weight:
    """The (in, out) parameter is the key's (out, in) matrix."""
    return Weight((param,), (key,), lambda a: (a.T,), lambda a: (a.T,))


@checked_row
def flipped(param: str, key: str) -> Weight:
    """The (…, in, out) parameter is the key's (out, in, …) array, as in `nnx.Conv`."""
    return Weight((param,), (key,), lambda a: (last_first(a),), lambda a: (first_last(a),))


@checked_row
def gates(param: str, keys: Sequence[str]) -> Weight:
    """The parameter joins the gates' (out, in) matrices, or (out,) biases, on its last axis."""
    return Weight(
        (param,),
        keys,
        lambda *gates: (namespace(gates[0]).concat([gate.T for gate in gates], axis=-1),),
        lambda a: tuple(gate.T for gate in namespace(a).split(a, len(keys), axis=-1)),
    )


@checked_row
def parts(
    params: Sequence[str], key: str, sizes: Sequence[int] = (), *, transpose: bool = True
) -> Weight:
    """The key's (out, in) matrix, or (out,) bias, holds several parameters, each transposed.

    Each of them has `sizes` rows, or the same number if no sizes are given.
    """
    if sizes and len(sizes) != len(params):
        raise ValueError(f"sizes: expected {len(params)}, one for each parameter, got {len(sizes)}")
    ends = [*itertools.accumulate(sizes)][:-1] if sizes else len(params)

    def turned(a):
        return a.T if transpose else a

    def joined(*values):
        rows = [turned(value) for value in values]
        given = tuple(len(part) for part in rows)
        if sizes and given != sizes:
            raise ValueError(f"sizes: got {sizes}, but the parameters have {given} rows")
        return (namespace(rows[0]).concat(rows),)

    return Weight(
        params,
        (key,),
        lambda a: tuple(turned(part) for part in namespace(a).split(a, ends)),
        joined,
    )


def side_by_side(
    projections: Sequence[str], key: str, sizes: Sequence[int], num_heads: int = 1
) -> Weight:
    """The key's (out, in) matrix holds, for each head, `sizes` rows of each projection in turn."""
    ends = [*itertools.accumulate(sizes)][:-1]

    def to_jax(a):
        by_head = namespace(a).split(a.reshape(num_heads, -1, a.shape[1]), ends, axis=1)
        return tuple(part.reshape(-1, a.shape[1]).T for part in by_head)

    def to_torch(*kernels):
        by_head = [kernel.T.reshape(num_heads, -1, len(kernel)) for kernel in kernels]
        return (namespace(kernels[0]).concat(by_head, axis=1).reshape(-1, len(kernels[0])),)

    return Weight(tuple(f"{name}.kernel" for name in projections), (key,), to_jax, to_torch)


@checked_row
def summed(params: tuple[str, str], key: str) -> Weight:
    """The key's array is the sum of two parameters. Import puts all of it into the first.

    The second parameter becomes −0.0, because adding −0.0 changes no number, not even −0.0. A round
    trip restores only the sum of the two parameters.
    """
    return Weight(
        params,
        (key,),
        lambda a: (a, namespace(a).full_like(a, -0.0)),
        lambda a, b: (a + b,),
        separate=False,
    )


@checked_row
def added(param: str, keys: tuple[str, str]) -> Weight:
    """The parameter is the sum of two keys' arrays, such as torch's `bias_ih` and `bias_hh`.

    Export writes the sum to the first key and −0.0 to the second. The torch module then computes
    the same, but its two original arrays are not restored.
    """
    return Weight(
        (param,),
        keys,
        lambda a, b: (a + b,),
        lambda a: (a, namespace(a).full_like(a, -0.0)),
        exact=False,
    )


@checked_row
def squeezed(param: str, key: str, axes: tuple[int, ...]) -> Weight:
    """The parameter is the key's array without some axes of size 1."""
    return Weight(
        (param,),
        (key,),
        lambda a: (namespace(a).squeeze(a, axes),),
        lambda a: (namespace(a).expand_dims(a, axes),),
    )


@checked_row
def stacked(params: tuple[str, ...], key: str, axes: tuple[int, ...] = ()) -> Weight:
    """The parameters are the rows of the key's array, without some axes of size 1."""
    return Weight(
        params,
        (key,),
        lambda a: tuple(namespace(a).squeeze(a, axes)),
        lambda *rows: (namespace(rows[0]).expand_dims(namespace(rows[0]).stack(rows), axes),),
    )


@checked_row
def expanded(param: str, key: str, axes: tuple[int, ...]) -> Weight:
    """The parameter is the key's array with further axes of size 1."""
    row = squeezed(param, key, axes)
    return row._replace(to_jax=row.to_torch, to_torch=row.to_jax)


@checked_row
def tied(param: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> Weight:
    """All keys have the array of the parameter.

    Export writes the `keys`. Import needs only one of the `keys` and `optional` keys, and refuses
    arrays that differ.
    """
    return repeated(same(param, keys[0]), (*keys, *optional), len(keys))


@checked_row
def unused(key: str, value: np.ndarray) -> Weight:
    """A key that corresponds to no parameter, such as a counter.

    The key may be missing, and import checks only its shape. Export writes `value`, in its own
    dtype, instead of what import read.
    """
    return Weight((), (key,), lambda a: (), lambda: (value,), exact=False)


@checked_row
def ignored(key: str) -> Weight:
    """A key that import does not read and export does not write, such as a computed constant."""
    return Weight((), (), lambda: (), lambda: (), tied=(key,))


def repeated(row: Weight, keys: tuple[str, ...], count: int) -> Weight:
    """The row with several keys, each of which has the array of the row's single key.

    Export writes the first `count` of them. Import needs only one, and refuses arrays that differ.
    """

    def one(a, *others):
        if not isinstance(a, Tracer):
            numbers = np.asarray(a).tobytes()
            if any(np.asarray(other).tobytes() != numbers for other in others):
                raise ValueError("two different arrays, where the model has one")
        return row.to_jax(a)

    return row._replace(
        keys=keys[:count],
        to_jax=one,
        to_torch=lambda *values: row.to_torch(*values) * count,
        stacks=False,
        tied=tuple(dict.fromkeys(keys)),
    )


def reshaped(row: Weight, shape: tuple[int, ...], flat: tuple[int, ...]) -> Weight:
    """The row with its single parameter reshaped to `shape` from the row's own shape, `flat`."""
    return row._replace(
        to_jax=lambda a: (row.to_jax(a)[0].reshape(shape),),
        to_torch=lambda a: row.to_torch(a.reshape(flat)),
    )


def join(place: str, name: str) -> str:
    """Joins the path of a module and a name. "" is the path of the whole model."""
    return f"{place}.{name}" if place else name


def last_word(path: str) -> str:
    """The last word of a path, such as `bias` of `blocks.0.bias`."""
    return path.rpartition(".")[2]


def namespace(a) -> Any:
    """Returns the array's namespace, NumPy or jax.numpy."""
    return a.__array_namespace__()


def last_first(a):
    """Transposes (out, in, …) to (…, in, out)."""
    return a.transpose(*range(2, a.ndim), 1, 0)


def first_last(a):
    """Transposes (…, in, out) to (out, in, …)."""
    return a.transpose(a.ndim - 1, a.ndim - 2, *range(a.ndim - 2))
