"""The decorator `checked`, which checks the arguments of a function against its annotations."""

import inspect
import math
from collections.abc import Callable
from functools import cache, wraps
from types import CodeType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Required,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from jaxtyping import AbstractArray, Array

from jax_models.checks.keywords import refuse_missing, refuse_unknown
from jax_models.checks.values import (
    KINDS,
    SCALARS,
    checked_array,
    checked_choice,
    described,
    lengths_within,
    set_rows_to_nan,
    wrong_shape,
)

Parameters = ParamSpec("Parameters")

Result = TypeVar("Result")

NOT_EMPTY = {"heads", "key_heads", "kv_heads", "head_features", "kernel_size", "vocab"}
"""Axes whose size must be at least 1. Other axes, such as batch and features, may have size 0."""


class Default(NamedTuple):
    """The default of an option in a TypedDict. Options without a `Default` are None by default."""

    value: Any


class Combined(NamedTuple):
    """Marks an option that the function receives in place of other ones, which it combines."""

    options: tuple[str, ...]
    combine: Callable[..., Any]
    """`combine(time, **options)`, where `time` is the size of the axis of that name."""


def checked(
    types: dict[Any, Callable[[str, Any], Any]] | None = None, batch_axes: Any = 0, **sizes: Any
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Makes a function raise an error for arguments that its annotations do not allow.

        @checked()
        def scaled(x: Float[Array, "batch features"], scale: Float[Array, " features"]): ...

    An axis name stands for the same size in all arrays of a call, including those in NamedTuples. A
    size may be an expression of other sizes, in which the name of several axes (`*batch`) stands
    for the product of their sizes. The values of a dict do not share sizes.
    `Annotated[Norms, ("hidden", "hyper")]` is a NamedTuple whose `hidden` is the call's `hyper`,
    and whose other sizes are independent of the call. With `Annotated[int, check]`, the function
    receives what `check(name, value)` returns. `int` accepts any integer, including NumPy's.
    `float` accepts any finite number, `bool` a bool, a `Literal` one of its choices,
    `FloatingDtype` a dtype or its name, a class its instances, and a `Callable` any function.
    Arguments with other annotations, or with none, are not checked.

    The function receives NumPy arrays as JAX arrays, integers as int, and `lengths` as int32 in 0 …
    time. Under `jit`, where the values are unknown, a length outside that range is replaced with
    the nearest inside, and the row is NaN in all floating results. Keywords that are annotated with
    `Unpack` of a TypedDict are checked against the annotations of the TypedDict, and the function
    receives the value of each `Default` that the caller leaves out, and one value in place of all
    options that a `Combined` names. If the caller passes the combined value itself, the arguments
    were checked when it was made, and are not checked again.

    Args:
        types: further annotations, each with its check `(name, value) -> value`.
        batch_axes: the batch axes of the results, as `vmap` expects in `out_axes`. Used only with
            `lengths`.
        sizes: the values of names in the annotations that are fixed for this function, each a size
            or a tuple.

    """
    checks = SCALARS | (types or {})

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        parameters, named = signature(function), inspect.signature(function).parameters
        annotations = {name: p.annotation for name, p in parameters.parameters.items()}
        defaults = {
            name: p.default
            for name, p in parameters.parameters.items()
            if name not in named and p.default not in (None, p.empty)
        }
        combined = {
            name: mark
            for name, annotation in annotations.items()
            for mark in get_args(annotation)
            if isinstance(mark, Combined)
        }

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in combined:
                if kwargs.get(name) is None:
                    continue
                options = combined[name].options
                if twice := [option for option in options if kwargs.get(option) is not None]:
                    raise TypeError(f"{twice[0]}: expected {name} alone, got {name} as well")
                return function(*args, **kwargs)
            # Bind the arguments first, so that the error for an unknown one can suggest a name.
            try:
                given = parameters.bind(*args, **kwargs)
            except TypeError:
                refuse_unknown(function.__name__, parameters, args, kwargs)
                refuse_missing(function.__name__, parameters, args, kwargs)
                return function(*args, **kwargs)  # Python's own error names what is given twice
            # Check each argument on its own, then the sizes that the arguments share.
            given.arguments = defaults | given.arguments
            scope = Scope(checks, sizes)
            for name, value in given.arguments.items():
                given.arguments[name] = scope.checked(name, value, annotations[name])
            scope.check_shapes()
            # The lengths must be in range before masks are built from them.
            outside = None
            if given.arguments.get("lengths") is not None:
                lengths, time = given.arguments["lengths"], scope.sizes["time"]
                given.arguments["lengths"], outside = lengths_within(lengths, time)
            for name, (options, combine) in combined.items():
                found = {option: given.arguments.pop(option, None) for option in options}
                given.arguments[name] = combine(scope.sizes["time"], **found)
            results: Any = function(*given.args, **given.kwargs)
            return results if outside is None else set_rows_to_nan(outside, results, batch_axes)

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
        """Checks an argument except for its shape, and returns it as the function receives it."""
        if annotation in self.checks:
            return self.checks[annotation](name, value)
        if annotation in (Any, inspect.Parameter.empty):
            return value
        # Annotations from `typing` are not classes, so each kind is handled by itself.
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, UnionType):
            others = [a for a in arguments if a is not NoneType]
            if value is None or len(others) > 1:
                return value
            return self.checked(name, value, others[0])
        if origin is Literal:
            return checked_choice(name, value, arguments)
        if origin is Callable:
            if not callable(value):
                raise TypeError(f"{name}: expected a function, got {described(value)}")
            return value
        if origin is dict:
            if not isinstance(value, dict):
                raise TypeError(f"{name}: expected a dict, got {described(value)}")
            return {
                key: self._checked_alone(f"{name}[{key!r}]", value[key], arguments[1])
                for key in value
            }
        if origin is Annotated:
            annotation, mark, *_ = arguments
            if inspect.isfunction(mark):
                return mark(name, value)
            if not (hasattr(annotation, "_fields") and isinstance(mark, tuple)):
                return self.checked(name, value, annotation)
            inner, outer = mark
            return self._checked_alone(name, value, annotation, **{inner: self.sizes[outer]})
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
        """Raises an error for the first array whose sizes do not match those of the others."""
        for name, shape, axes in self.arrays:
            for axis, size in axes:
                expected = self._size(axis)
                if expected is not None and size != expected:
                    raise self._wrong_shape(name, shape, [axis for axis, _ in axes])

    def _checked_alone(self, name: str, value: Any, annotation: Any, **sizes: Any) -> Any:
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
        """The size of an axis, a tuple for several axes, or None if no array has the name."""
        if axis.lstrip("*").isidentifier():
            return self.sizes.get(axis.lstrip("*"))
        code = _compiled(axis)
        if not self.sizes.keys() >= set(code.co_names):
            return None
        names = {name: self.sizes[name] for name in code.co_names}
        products = {k: math.prod(v) if isinstance(v, tuple) else v for k, v in names.items()}
        return eval(code, {}, products)  # safe, because `axis` comes from our own annotations

    def _wrong_shape(self, name: str, shape: tuple[int, ...], axes: list[str]) -> ValueError:
        expected = []
        for axis in axes:
            size = self._size(axis)
            expected += size if isinstance(size, tuple) else [axis if size is None else size]
        return wrong_shape(name, expected, shape)


def signature(function: Callable) -> inspect.Signature:
    """The signature of a function, with `**options: Unpack[Options]` expanded into single keywords.

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


def _keywords(options: type) -> list[inspect.Parameter]:
    """The options of a TypedDict as keyword parameters, sorted with the required ones last."""
    found = []
    for name, annotation in get_type_hints(options, include_extras=True).items():
        default, (first, *marks) = None, get_args(annotation) or (annotation,)
        if get_origin(annotation) is Required:
            annotation, default = first, inspect.Parameter.empty
        elif marks and isinstance(marks[-1], Default):
            *marks, (default,) = marks
            annotation = Annotated[first, *marks] if marks else first
        keyword = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    return sorted(found, key=lambda parameter: parameter.default is parameter.empty)


@cache
def _hints(annotation: type) -> dict[str, Any]:
    return get_type_hints(annotation)


@cache
def _compiled(axis: str) -> CodeType:
    return compile(axis, "an axis", "eval")
