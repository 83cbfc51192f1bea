"""What constructors refuse, read from their annotations."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from flax import nnx
from jaxtyping import Array

from jax_models.ops.checks import (
    SCALARS,
    Scope,
    checked,
    checked_count,
    checked_size,
)
from jax_models.ops.checks import FloatingDtype as FloatingDtype

Index = Annotated[int, "index"]
"""An integer of at least 0."""

Initializer = Callable[..., Array]
"""A function `(key, shape, dtype)` that draws a parameter, as Flax's layers take it."""


def checked_rngs(name: str, rngs: Any) -> nnx.Rngs:
    """Flax's source of random keys."""
    if not isinstance(rngs, nnx.Rngs):
        got = " ".join(repr(rngs).split())
        raise TypeError(
            f"{name}: expected nnx.Rngs, such as nnx.Rngs(0) or nnx.Rngs(key), got {got}"
        )
    if "params" not in rngs and "default" not in rngs:
        raise ValueError(f"{name}: expected a stream `params` or `default`, got {list(rngs)}")
    return rngs


OPTIONS = {
    int: checked_size,
    Index: checked_count,
    nnx.Rngs: checked_rngs,
}
"""The annotations that constructors have beside those of `ops.checks`."""


class CheckedOptions:
    """A class whose constructor refuses what its annotations do not allow.

    `ops.checked` says what they allow. Beside that, `int` is a size, which is positive, an `Index`
    may be 0, and `nnx.Rngs` is what it says.
    """

    def __init_subclass__(cls, **kwargs: Any):
        """Check the constructor, if the class has one of its own."""
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checked(OPTIONS)(cls.__init__)


def check_fields(config: Any, types: dict[Any, Callable[[str, Any], Any]] | None = None) -> None:
    """Refuse what a dataclass's annotations do not allow; its integers are sizes.

    Other annotations are checked by `types`, as in `ops.checked`.
    """
    scope = Scope(SCALARS | {int: checked_size} | (types or {}), {})
    for field in dataclasses.fields(config):
        value = scope.checked(field.name, getattr(config, field.name), field.type)
        object.__setattr__(config, field.name, value)
