"""Checks of the arguments of constructors, configs and functions, by their annotations."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jax_models.checks.arguments import Default, Scope, checked
from jax_models.checks.keywords import refuse_unknown, suggests_arguments
from jax_models.checks.values import SCALARS, checked_count, checked_size, described
from jax_models.checks.values import FloatingDtype as FloatingDtype

Result = TypeVar("Result")
Index = Annotated[int, "at least 0"]
"""An integer that is at least 0."""

Initializer = Callable[..., Array]
"""A function `(key, shape, dtype)` that returns initial values, like the initializers of Flax."""


class FilterOptions(TypedDict, total=False):
    """The keyword arguments of all layers, norms and filters."""

    param_dtype: Annotated[FloatingDtype, Default(jnp.float32)]
    """The dtype of the parameters, by default float32."""
    rngs: Required[nnx.Rngs]
    """Random keys for the parameters (`params`) and the masks of dropout (`dropout`)."""


class NormOptions(FilterOptions, total=False):
    """The keyword arguments of layers and norms."""

    dtype: FloatingDtype | None
    """The dtype of the computation. None: the dtype to which x and the parameters promote. States,
    norms, softmaxes, filters and transforms are computed in at least float32.
    """


class MatrixOptions(NormOptions, total=False):
    """The keyword arguments of layers without biases."""

    kernel_init: Initializer | None
    """Initializes matrices and the kernels of convolutions. None: the layer's default."""


class LayerOptions(MatrixOptions, total=False):
    """The keyword arguments of layers."""

    bias_init: Initializer | None
    """Initializes the biases. None: the layer's default, or zero if the layer documents none."""


Options = TypeVar("Options")


def declared_options(kind: type[Options], options: Any) -> Options:
    """Returns the options that a TypedDict declares."""
    known: Any = {name: value for name, value in options.items() if name in kind.__annotations__}
    return known


filter_options: Callable[[Any], FilterOptions] = partial(declared_options, FilterOptions)
norm_options: Callable[[Any], NormOptions] = partial(declared_options, NormOptions)


def with_inits(
    options: Any,
    kernel_init: Initializer,
    bias_init: Initializer | None = nnx.initializers.zeros,
    **others: Any,
) -> dict[str, Any]:
    """Returns the options of a `Linear`, with these initializers unless `options` has its own.

    If `bias_init` is None, the result has no `bias_init`, because the part has no bias.
    """
    others |= norm_options(options)
    if bias_init is not None:
        others["bias_init"] = options.get("bias_init") or bias_init
    return {**others, "kernel_init": options.get("kernel_init") or kernel_init}


def checked_rngs(name: str, rngs: Any) -> nnx.Rngs:
    """Returns Flax's source of random keys, or raises an error."""
    if not isinstance(rngs, nnx.Rngs):
        got = " ".join(repr(rngs).split())
        raise TypeError(
            f"{name}: expected nnx.Rngs, such as nnx.Rngs(0) or nnx.Rngs(key), got {got}"
        )
    if "params" not in rngs and "default" not in rngs:
        raise ValueError(f"{name}: expected a stream `params` or `default`, got {list(rngs)}")
    return rngs


def refuse_unused(name: str, value: Any, *, unless: bool, because: str) -> None:
    """Raises an error if an option is given that has no effect, such as an unused initializer.

    An option counts as given unless it is None or, for a flag, False.
    """
    unused = False if isinstance(value, bool) else None
    if value is not unused and not unless:
        got = "an initializer" if callable(value) else value
        raise ValueError(f"{name}: expected {unused} {because}, got {got}")


def checked_path(name: str, path: Any) -> Path:
    """Returns a path or a string as a Path, or raises an error."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, got {described(path)}")
    return Path(path)


OPTIONS: dict[Any, Callable[[str, Any], Any]] = {
    int: checked_size,
    Index: checked_count,
    nnx.Rngs: checked_rngs,
    Path: checked_path,
}
"""The checks of annotations, in addition to those of `ops.checks`. An `int` is a size."""

checked_options = checked(OPTIONS)
"""The decorator of functions whose arguments are checked against their annotations."""


class ConstructorSignature:
    """Makes `inspect.signature` and `help` of a class show the arguments of its constructor.

    Without it, both would show the `*args, **kwargs` of Flax's metaclass.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        """The signature of the class. An instance keeps the signature of its `__call__`."""
        if instance is not None:
            raise AttributeError("__signature__")
        _, *parameters = inspect.signature(owner.__init__).parameters.values()
        return inspect.Signature(parameters)


def explain_call_errors(method: Callable[..., Result]) -> Callable[..., Result]:
    """Makes the errors of a layer's call explain unknown arguments and parameters without values.

    Both are checked only after an error, because checking all parameters before each call would
    take longer than a step of a small layer.
    """
    method = suggests_arguments(method)

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Result:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(nnx.state(self))):
                raise ValueError(
                    f"{type(self).__name__}: expected parameters with values, got the shapes that "
                    "nnx.eval_shape makes: load them first, as from_torch does"
                ) from None
            raise

    return call


METHODS: dict[str, Callable[[Any], Any]] = {
    "__init__": checked_options,
    "init_state": checked({int: checked_count}),
    "__call__": explain_call_errors,
    "step": explain_call_errors,
    "logits": explain_call_errors,
}
"""The decorators of the methods of layers and models."""


class CheckedOptions:
    """A class whose constructor checks its arguments against its annotations.

    `checked` documents the annotations. In addition, an `int` is a size, which is
    positive, an `Index` may be 0, and an argument annotated `nnx.Rngs` must be an `nnx.Rngs`.
    `METHODS` lists the decorators of other methods.
    """

    __signature__ = ConstructorSignature()

    def __init_subclass__(cls, **kwargs: Any):
        """Decorates the methods that the class itself defines."""
        super().__init_subclass__(**kwargs)
        for name in METHODS.keys() & vars(cls).keys():
            setattr(cls, name, METHODS[name](vars(cls)[name]))


class CheckedFields:
    """A dataclass that refuses unknown fields and values that its annotations do not allow."""

    def __new__(cls, *args: Any, **kwargs: Any):
        """Raises an error for unknown fields that suggests the right names."""
        self = super().__new__(cls)
        refuse_unknown("__init__", inspect.signature(cls.__init__), (self, *args), kwargs)
        return self

    def __post_init__(self):
        """Checks each field, and stores the value that the check returns."""
        values = {name: getattr(self, name) for name in self.field_types()}
        for name, value in self.checked_fields(values).items():
            object.__setattr__(self, name, value)

    @classmethod
    def field_types(cls) -> dict[str, Any]:
        """The annotations of the fields, by their names."""
        return {field.name: field.type for field in dataclasses.fields(cls)}  # pyright: ignore

    @classmethod
    def checked_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of some fields after the checks of their annotations."""
        scope, types = Scope(SCALARS | OPTIONS, {}), cls.field_types()
        return {name: scope.checked(name, v, types.get(name, Any)) for name, v in values.items()}
