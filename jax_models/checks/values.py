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
"""The dtypes that each annotation allows: their common type, and their name in an error."""

LARGEST_SIZE = 2**28 - 1
"""The largest size. XLA crashes if a kernel, a product of two sizes, exceeds 2⁶³ bytes."""


def wrong_shape(name: str, expected: Any, shape: tuple[int, ...]) -> ValueError:
    """Returns the error for an array of the wrong shape. An expected size may be a name."""
    expected = f"({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
    return ValueError(f"{name}: expected shape {expected}, got {shape}")


def as_array(name: str, value: Any, convert: Callable[[Any], Any] = jnp.asarray) -> Any:
    """Converts a value to a JAX array, or with `convert=np.asarray`, to a NumPy array.

    The value may be an array, a list, or a tensor of another library.

    Raises:
        TypeError: the value is not an array, such as a list of rows of different lengths.

    """
    try:
        return convert(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected an array of numbers, got {described(value)}") from error


def checked_array(name: str, value: Any, kind: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Returns an array of one of the `KINDS` and, if given, of this shape, or raises an error.

    NumPy arrays become JAX arrays, except for integers: their values must be checked before JAX
    truncates them to 32 bits.
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
    lengths: Int[ArrayLike, " batch"], time: int | Int[Array, " batch"], name: str = "lengths"
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"] | None]:
    """Returns `lengths` as int32 in 0 … time, and a mask of rows whose results must become NaN.

    Under `jit`, where the values are unknown, a length outside that range is replaced with the
    nearest inside, and the mask marks its row. Outside `jit`, it raises an error, and the mask is
    None. Each row may have its own `time`.
    """
    if isinstance(lengths, Tracer) or isinstance(time, Tracer):
        lengths = jnp.asarray(lengths)
        dtype = lengths.dtype if lengths.dtype.itemsize >= 4 else jnp.dtype(jnp.int32)
        limits = (jnp.asarray(limit, dtype) for limit in (0, time))
        inside = jnp.clip(lengths.astype(dtype), *limits)
        return inside.astype(jnp.int32), inside != lengths.astype(dtype)
    values = np.asarray(lengths)
    outside = (values < 0) | (values > np.asarray(time))
    if outside.any():
        limit = time if np.ndim(time) == 0 else "the row's length"
        raise ValueError(f"{name}: expected values in 0 … {limit}, got {values[outside].tolist()}")
    return jnp.asarray(values, jnp.int32), None


def set_rows_to_nan(rows: Bool[Array, " batch"], tree: Any, batch_axes: Any) -> Any:
    """Sets some rows of the batch to NaN in all arrays of a tree that are not integers."""

    def nan(array: Array, axis: int) -> Array:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        shape = [-1 if i == axis else 1 for i in range(array.ndim)]
        return jnp.where(rows.reshape(shape), jnp.nan, array)

    return jax.tree.map(nan, tree, jax.tree.broadcast(batch_axes, tree))


def checked_integer(name: str, value: Any, expected: str = "an integer") -> Any:
    """Returns an integer of any type as int, and a symbolic dimension unchanged."""
    if is_symbolic_dim(value):
        return value
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected {expected}, got {value!r}") from None


def checked_count(name: str, count: Any) -> int:
    """Returns an integer that is at least 0, or raises an error."""
    count = checked_integer(name, count)
    if count < 0:
        raise ValueError(f"{name}: expected at least 0, got {count}")
    return count


def checked_size(name: str, size: Any, largest: float = LARGEST_SIZE) -> int:
    """Returns a positive integer, or raises an error."""
    size = checked_integer(name, size, "a positive integer")
    if size < 1:
        raise ValueError(f"{name}: expected a positive integer, got {size}")
    if isinstance(size, int) and size > largest:
        raise ValueError(f"{name}: expected at most {largest}, got {size}")
    return size


def checked_number(name: str, value: Any) -> float:
    """Returns a finite real number as a float, or raises an error."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    try:
        number = float(value) if is_number and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {reprlib.repr(value)}")
    return number


def checked_not_negative(name: str, value: Any) -> float:
    """Returns a finite number of at least 0 as a float, or raises an error."""
    value = checked_number(name, value)
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    return value


def checked_positive(name: str, value: Any) -> float:
    """Returns a positive number as a float, or raises an error."""
    value = checked_number(name, value)
    if value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return value


def checked_rate(name: str, rate: Any) -> float:
    """Returns a rate in [0, 1), such as that of dropout, or raises an error."""
    rate = checked_number(name, rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{name}: expected 0 ≤ rate < 1, got {rate}")
    return rate


def check_divides(name: str, count: int, whole: str, size: int) -> None:
    """Raises an error if a size cannot be divided into `count` equal parts."""
    if size % count:
        raise ValueError(f"{name}: expected a divisor of {whole}={size}, got {count}")


def checked_bool(name: str, value: Any) -> bool:
    """Returns a bool of Python or NumPy as a Python bool, or raises an error."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def checked_choice(name: str, value: Any, choices: tuple[Choice, ...]) -> Choice:
    """Returns one of the choices, or raises an error."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise ValueError(f"{name}: expected one of {list(choices)}, got {value!r}")
    return value


def checked_dtype(name: str, dtype: Any) -> jnp.dtype:
    """Returns one of the supported floating dtypes, or raises an error."""
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
NotNegative = Annotated[float, "not negative"]
Rate = Annotated[float, "in [0, 1)"]
SCALARS: dict[Any, Callable[[str, Any], Any]] = {
    int: checked_integer,
    float: checked_number,
    bool: checked_bool,
    Positive: checked_positive,
    NotNegative: checked_not_negative,
    Rate: checked_rate,
    FloatingDtype: checked_dtype,
}


def described(value: Any) -> str:
    """Describes a value or the type of a NamedTuple in an error message."""
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
