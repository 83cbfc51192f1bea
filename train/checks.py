"""What configs, command lines and functions of a run refuse, read from their annotations."""

import os
from pathlib import Path
from typing import Annotated, Any

from jax_models.ops import checks
from jax_models.ops.checks import (
    checked_count,
    checked_integer,
    checked_number,
    checked_positive,
    checked_rate,
    checked_size,
    described,
)
from jax_models.options import Index

Positive = Annotated[float, "positive"]
"""A number above 0."""
NotNegative = Annotated[float, "not negative"]
"""A number of at least 0."""
Betas = tuple[float, float]
"""Two numbers in [0, 1)."""
Seed = Annotated[int, "seed"]
"""An integer in 0 … 2³¹ − 1."""


def checked_not_negative(name: str, value: Any) -> float:
    """A finite number of at least 0."""
    value = checked_number(name, value)
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    return value


def checked_betas(name: str, betas: Any) -> Betas:
    """Two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{name}: expected two numbers in [0, 1), got {betas!r}")
    first, second = (checked_rate(name, beta) for beta in betas)
    return first, second


def checked_seed(name: str, seed: Any) -> int:
    """An integer in 0 … 2³¹ − 1."""
    seed = checked_integer(name, seed)
    if not 0 <= seed < 2**31:
        raise ValueError(f"{name}: expected 0 … {2**31 - 1}, got {seed}")
    return seed


def checked_path(name: str, path: Any) -> Path:
    """A path, or a str as one."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, got {described(path)}")
    return Path(path)


TYPES = {
    int: checked_size,
    Index: checked_count,
    Positive: checked_positive,
    NotNegative: checked_not_negative,
    Betas: checked_betas,
    Seed: checked_seed,
    Path: checked_path,
}
"""The annotations that a run has beside those of `ops.checks`; an `int` is a size."""

checked = checks.checked(TYPES)
"""The decorator of a function that refuses what its annotations do not allow."""
