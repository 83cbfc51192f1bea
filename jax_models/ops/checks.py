"""What calls and constructors refuse, read from their annotations, when they are traced."""

import inspect
import math
import operator
import reprlib
from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import CodeType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    Required,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import AbstractArray, Array, Bool, Float, Inexact, Int

from jax_models.ops.keywords import refuse_unknown
from jax_models.ops.rows import Default, Rows

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Choice = TypeVar("Choice")

KINDS = {
    Float: (jnp.floating, "a floating dtype"),
    Inexact: (jnp.inexact, "a floating or complex dtype"),
    Int: (jnp.integer, "an integer dtype"),
    Bool: (jnp.bool_, "dtype bool"),
}
"""The dtypes that an annotation allows: their common type, and their name in an error."""

NOT_EMPTY = {"heads", "kv_heads", "head_features", "kernel_size", "vocab"}
"""Axes whose size must be at least 1. Others, such as batch and features, may be 0."""

MASKS = ("lengths", "reset", "time_axis")
"""The arguments that `Rows` joins."""
LARGEST_SIZE = 2**28 - 1
"""XLA ends the process where the bytes of a kernel, a product of two sizes, pass 2⁶³."""


def checked(
    types: dict[Any, Callable[[str, Any], Any]] | None = None, batch_axes: Any = 0, **sizes: Any
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make a function refuse arguments that its annotations do not allow.

        @checked()
        def scaled(x: Float[Array, "batch features"], scale: Float[Array, " features"]): ...

    One name is one size in all arrays of a call, those in NamedTuples among them. A size may be an
    expression of others, in which the name of several axes (`*batch`) stands for their product.
    The values of a dict share no sizes; `Annotated[Norms, ("hidden", "hyper")]` is a NamedTuple
    whose `hidden` is the call's `hyper`, and whose other sizes are its own. With
    `Annotated[int, check]`, the function receives what `check(name, value)` returns.
    `int` takes any integer, NumPy's too, `float` any finite number, `bool` a bool, a `Literal` one
    of its choices, and `FloatingDtype` a dtype or its name; a class takes its instances, a
    `Callable` any function. An argument without an annotation passes, and so do other annotations.

    The function gets NumPy arrays as JAX's, integers as int, and `lengths` as int32 in 0 … time.
    Under `jit`, where nobody sees the values, a length outside counts as the nearest inside, and
    the row is NaN in all floating results. Keywords that are annotated with `Unpack` of a
    TypedDict are checked by its annotations. If the TypedDict has `rows`, the function gets the
    masks as one `Rows`; a caller that passes `rows` has checked all arguments already.

    Args:
        types: other annotations, and the checks `(name, value) -> value` that they stand for.
        batch_axes: of the results, as `vmap` takes them; where there are `lengths`.
        sizes: what a name in the annotations stands for in this function, a size or a tuple.

    """
    checks = SCALARS | (types or {})

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        parameters = signature(function)
        annotations = {name: p.annotation for name, p in parameters.parameters.items()}

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if "rows" in annotations and kwargs.get("rows") is not None:
                if twice := [name for name in MASKS if kwargs.get(name) is not None]:
                    raise TypeError(f"{twice[0]}: expected rows alone, got rows as well")
                return function(*args, **kwargs)
            try:
                given = parameters.bind(*args, **kwargs)
            except TypeError:
                refuse_unknown(function.__name__, parameters, args, kwargs)
                return function(*args, **kwargs)  # Python's message names what is missing
            scope = Scope(checks, sizes)
            for name, value in given.arguments.items():
                given.arguments[name] = scope.checked(name, value, annotations[name])
            scope.check_shapes()
            outside = None
            if given.arguments.get("lengths") is not None:
                lengths, time = given.arguments["lengths"], scope.sizes["time"]
                given.arguments["lengths"], outside = lengths_within(lengths, time)
            if "rows" in annotations:
                masks = {name: given.arguments.pop(name, None) for name in MASKS}
                given.arguments["rows"] = Rows.of(scope.sizes["time"], **masks)
            results: Any = function(*given.args, **given.kwargs)
            return results if outside is None else nan_rows(outside, results, batch_axes)

        call.__signature__ = parameters  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate


class Scope:
    """The arrays of one call, and the sizes that they share."""

    def __init__(self, checks: dict[Any, Callable[[str, Any], Any]], sizes: dict[str, Any]):
        self.checks = checks
        self.sizes = dict(sizes)
        self.arrays: list[tuple[str, tuple[int, ...], list[tuple[str, Any]]]] = []

    def checked(self, name: str, value: Any, annotation: Any) -> Any:
        """An argument as the function gets it; shapes are for `check_shapes`."""
        if annotation in self.checks:
            return self.checks[annotation](name, value)
        if annotation in (Any, inspect.Parameter.empty):
            return value
        # Annotations of `typing`, which are not classes and stand for several checks or none.
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, UnionType):
            others = [a for a in arguments if a is not NoneType]
            if value is None or len(others) > 1:
                return value
            return self.checked(name, value, others[0])
        if origin is Literal:
            return checked_choice(name, value, arguments)
        if origin is Callable:
            return checked_function(name, value)
        if origin is dict:
            if not isinstance(value, dict):
                raise TypeError(f"{name}: expected a dict, got {described(value)}")
            return {key: self._alone(f"{name}[{key!r}]", value[key], arguments[1]) for key in value}
        if origin is Annotated:
            annotation, mark, *_ = arguments
            if inspect.isfunction(mark):
                return mark(name, value)
            if not (hasattr(annotation, "_fields") and isinstance(mark, tuple)):
                return self.checked(name, value, annotation)
            theirs, ours = mark
            return self._alone(name, value, annotation, **{theirs: self.sizes[ours]})
        # Arrays, NamedTuples of arrays, and other classes.
        if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
            known = annotation.dtype in KINDS and "..." not in annotation.dim_str
            return self._array(name, value, annotation) if known else value
        if hasattr(annotation, "_fields"):
            if not isinstance(value, annotation):
                raise TypeError(f"{name}: expected {described(annotation)}, got {described(value)}")
            hints = _hints(annotation)
            fields = value._asdict().items()
            return type(value)(
                *(self.checked(f"{name}.{key}", field, hints[key]) for key, field in fields)
            )
        is_class = isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False)
        if is_class and not isinstance(value, annotation):
            raise TypeError(f"{name}: expected {annotation.__name__}, got {described(value)}")
        return value

    def check_shapes(self) -> None:
        """Refuse the first array whose sizes are not those of the others."""
        for name, shape, axes in self.arrays:
            for axis, size in axes:
                expected = self._size(axis)
                if expected is not None and size != expected:
                    raise self._wrong_shape(name, shape, [axis for axis, _ in axes])

    def _alone(self, name: str, value: Any, annotation: Any, **sizes: Any) -> Any:
        scope = Scope(self.checks, sizes)
        value = scope.checked(name, value, annotation)
        scope.check_shapes()
        return value

    def _array(self, name: str, value: Any, annotation: Any) -> Array:
        array = checked_array(name, value, annotation.dtype)
        axes = annotation.dim_str.split()
        several = [i for i, axis in enumerate(axes) if axis.startswith("*")]
        shape: list[Any] = list(array.shape)
        if several and len(shape) >= len(axes) - 1:
            [i] = several
            end = len(shape) - (len(axes) - 1 - i)
            shape[i:end] = [tuple(shape[i:end])]
        if len(shape) != len(axes):
            raise self._wrong_shape(name, array.shape, axes)
        pairs = [*zip(axes, shape, strict=True)]
        for axis, size in pairs:
            if axis in NOT_EMPTY and size == 0:
                raise ValueError(f"{name}: expected {axis} ≥ 1, got shape {array.shape}")
            if axis.lstrip("*").isidentifier():
                self.sizes.setdefault(axis.lstrip("*"), size)
        self.arrays.append((name, array.shape, pairs))
        return array

    def _size(self, axis: str) -> Any:
        """A size, or the tuple of several; None of a name that no array of the call has."""
        if axis.lstrip("*").isidentifier():
            return self.sizes.get(axis.lstrip("*"))
        code = _compiled(axis)
        if not self.sizes.keys() >= set(code.co_names):
            return None
        names = {name: self.sizes[name] for name in code.co_names}
        products = {k: math.prod(v) if isinstance(v, tuple) else v for k, v in names.items()}
        return eval(code, {}, products)  # of our own annotations

    def _wrong_shape(self, name: str, shape: tuple[int, ...], axes: list[str]) -> ValueError:
        expected = []
        for axis in axes:
            size = self._size(axis)
            expected += size if isinstance(size, tuple) else [axis if size is None else size]
        return wrong_shape(name, expected, shape)


def checked_function(name: str, value: Any) -> Any:
    """What can be called, or the fault."""
    if not callable(value):
        raise TypeError(f"{name}: expected a function, got {described(value)}")
    return value


def signature(function: Callable) -> inspect.Signature:
    """The signature of a function, with `**options: Unpack[Options]` as single keywords.

    Annotations are evaluated, unless a string among them has a name that is not defined. An option
    that is not `Required` defaults to None, or to the value in `Annotated[…, Default(…)]`.
    """
    try:
        found = inspect.signature(function, eval_str=True)
    except NameError:
        found = inspect.signature(function)
    parameters = []
    for parameter in found.parameters.values():
        packed = get_origin(parameter.annotation) is Unpack
        parameters += _keywords(*get_args(parameter.annotation)) if packed else [parameter]
    return found.replace(parameters=parameters)


def _keywords(options: type) -> Iterator[inspect.Parameter]:
    """The options of a TypedDict as keywords."""
    for name, annotation in get_type_hints(options, include_extras=True).items():
        default, (first, *marks) = None, get_args(annotation) or (annotation,)
        if get_origin(annotation) is Required:
            annotation, default = first, inspect.Parameter.empty
        elif marks and isinstance(marks[-1], Default):
            *marks, (default,) = marks
            annotation = Annotated[first, *marks] if marks else first
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, keyword, default=default, annotation=annotation)


@cache
def _hints(annotation: type) -> dict[str, Any]:
    return get_type_hints(annotation)


@cache
def _compiled(axis: str) -> CodeType:
    return compile(axis, "an axis", "eval")


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


def _as_numpy(value: Any) -> np.ndarray:
    return np.asarray(value, value.dtype)


def checked_array(name: str, value: Any, kind: Any, shape: tuple[int, ...] | None = None) -> Array:
    """An array of one of the `KINDS` and, if given, of a shape; NumPy's as JAX's, but of integers.

    Of those the values may be looked at before JAX takes their last 32 bits.
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
    return value if isinstance(value, jax.Array) else as_array(name, value, _as_numpy)


def lengths_within(
    lengths: Int[ArrayLike, " batch"], time: int
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"] | None]:
    """`lengths` as int32 in 0 … time, and the rows whose results are to be NaN.

    Those have a length outside where nobody sees the values, under `jit`: there the nearest length
    inside stands for it. Elsewhere it is an error.
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


SCALARS: dict[Any, Callable[[str, Any], Any]] = {
    int: checked_integer,
    float: checked_number,
    bool: checked_bool,
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
