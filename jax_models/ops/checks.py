"""Checks of single arguments: arrays, sizes, numbers and choices, each with its error message."""

import math
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Inexact, Int

Choice = TypeVar("Choice")

KINDS = {
    Float: (jnp.floating, "a floating dtype"),
    Inexact: (jnp.inexact, "a floating or complex dtype"),
    Int: (jnp.integer, "an integer dtype"),
    Bool: (jnp.bool_, "dtype bool"),
}
"""The dtypes that an annotation allows: their common type, and their name in an error."""

LARGEST_SIZE = 2**28 - 1
"""XLA ends the process where the bytes of a kernel, a product of two sizes, pass 2⁶³."""


def wrong_shape(name: str, expected: Any, shape: tuple[int, ...]) -> ValueError:
    """The error of an array of another shape; an expected size may be a name."""
    expected = f"({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
    return ValueError(f"{name}: expected shape {expected}, got {shape}")


def as_array(name: str, value: Any, convert: Callable[[Any], Any] = jnp.asarray) -> Any:
    """An array of JAX's, or of NumPy's by `np.asarray`, from one or from what is like one.

    Lists are, and tensors of other libraries.

    Raises:
        TypeError: it is none, as a list of rows of several lengths is none.

    """
    try:
        return convert(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected an array of numbers, got {described(value)}") from error


def checked_array(name: str, value: Any, kind: Any, shape: tuple[int, ...] | None = None) -> Array:
    """An array of one of the `KINDS` and, if given, of a shape; NumPy's as JAX's, but of integers.

    Integers stay in NumPy, so that their values can be checked before JAX cuts them to 32 bits.
    """
    dtype = getattr(value, "dtype", None)
    if not isinstance(value, jax.Array) and not isinstance(dtype, np.dtype):
        raise TypeError(f"{name}: expected an array, got {described(value)}")
    common, expected = KINDS[kind]
    if not jnp.issubdtype(value.dtype, common):
        raise TypeError(f"{name}: expected {expected}, got {value.dtype}")
    if shape is not None and value.shape != shape:
        raise wrong_shape(name, shape, value.shape)
    if kind is not Int:
        return as_array(name, value)
    if isinstance(value, jax.Array):
        return value
    return as_array(name, value, lambda value: np.asarray(value, value.dtype))


def lengths_within(
    lengths: Int[ArrayLike, " batch"], time: int
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"] | None]:
    """`lengths` as int32 in 0 … time, and the rows whose results are to be NaN.

    Under `jit`, where the values are unknown, a length outside is replaced by the nearest inside,
    and the results of its row become NaN. Elsewhere it raises an error.
    """
    if isinstance(lengths, Tracer):
        dtype = lengths.dtype if lengths.dtype.itemsize >= 4 else jnp.dtype(jnp.int32)
        limits = (jnp.asarray(limit, dtype) for limit in (0, time))
        inside = jnp.clip(lengths.astype(dtype), *limits)
        return inside.astype(jnp.int32), inside != lengths.astype(dtype)
    values = np.asarray(lengths)
    outside = (values < 0) | (values > time)
    if outside.any():
        raise ValueError(f"lengths: expected values in 0 … {time}, got {values[outside].tolist()}")
    return jnp.asarray(values, jnp.int32), None


def nan_rows(rows: Bool[Array, " batch"], tree: Any, batch_axes: Any) -> Any:
    """A tree of arrays, all but the integers NaN in some rows of the batch."""

    def nan(array: Array, axis: int) -> Array:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        shape = [-1 if i == axis else 1 for i in range(array.ndim)]
        return jnp.where(rows.reshape(shape), jnp.nan, array)

    return jax.tree.map(nan, tree, jax.tree.broadcast(batch_axes, tree))


def checked_integer(name: str, value: Any, expected: str = "an integer") -> Any:
    """An integer of any type as int; a symbolic dimension as it is."""
    if is_symbolic_dim(value):
        return value
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected {expected}, got {value!r}") from None


def checked_count(name: str, count: Any) -> int:
    """An integer of at least 0."""
    count = checked_integer(name, count)
    if count < 0:
        raise ValueError(f"{name}: expected at least 0, got {count}")
    return count


def checked_size(name: str, size: Any, largest: float = LARGEST_SIZE) -> int:
    """A positive integer."""
    size = checked_integer(name, size, "a positive integer")
    if size < 1:
        raise ValueError(f"{name}: expected a positive integer, got {size}")
    if isinstance(size, int) and size > largest:
        raise ValueError(f"{name}: expected at most {largest}, got {size}")
    return size


def checked_number(name: str, value: Any) -> float:
    """A finite real number."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    try:
        number = float(value) if is_number and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {reprlib.repr(value)}")
    return number


def checked_positive(name: str, value: Any) -> float:
    """A positive number."""
    value = checked_number(name, value)
    if value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return value


def checked_rate(name: str, rate: Any) -> float:
    """A rate, of dropout or of decay: in [0, 1)."""
    rate = checked_number(name, rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{name}: expected 0 ≤ rate < 1, got {rate}")
    return rate


def check_divides(name: str, count: int, whole: str, size: int) -> None:
    """Refuse a number of parts into which a size cannot be divided equally."""
    if size % count:
        raise ValueError(f"{name}: expected a divisor of {whole}={size}, got {count}")


def checked_bool(name: str, value: Any) -> bool:
    """A bool, Python's or NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def checked_choice(name: str, value: Any, choices: tuple[Choice, ...]) -> Choice:
    """One of the choices."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise ValueError(f"{name}: expected one of {list(choices)}, got {value!r}")
    return value


def checked_dtype(name: str, dtype: Any) -> jnp.dtype:
    """A dtype that can be computed in."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in FLOATING:
        got = repr(dtype) if found is None else found
        raise ValueError(f"{name}: expected one of {', '.join(FLOATING)}, got {got}")
    return found


FLOATING = ("float16", "bfloat16", "float32", "float64")
if TYPE_CHECKING:
    FloatingDtype = DTypeLike
else:

    class FloatingDtype:
        """A floating dtype or its name. It is a class so that `help` shows this name."""


Positive = Annotated[float, "positive"]
Rate = Annotated[float, "in [0, 1)"]
SCALARS: dict[Any, Callable[[str, Any], Any]] = {
    int: checked_integer,
    float: checked_number,
    bool: checked_bool,
    Positive: checked_positive,
    Rate: checked_rate,
    FloatingDtype: checked_dtype,
}


def described(value: Any) -> str:
    """A value, or a NamedTuple's type, in an error."""
    if isinstance(value, type) and not hasattr(value, "_fields"):
        return f"the class {value.__name__}"
    if hasattr(value, "_fields"):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        return f"{name}({', '.join(value._fields)})"
    if isinstance(value, tuple | list):
        return f"{_with_article(value)} of {len(value)}"
    array = isinstance(value, jax.Array | np.ndarray)
    kind = "an array" if array else _with_article(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
    return kind


def _with_article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
