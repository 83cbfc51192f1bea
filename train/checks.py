"""The types of options, each with its check."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from jax_models.checks.values import (
    checked_integer,
    checked_not_negative,
    checked_number,
    checked_positive,
    checked_rate,
    described,
)
from jax_models.options import checked_path


def checked_betas(name: str, betas: Any) -> tuple[float, float]:
    """Two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{name}: expected two numbers in [0, 1), got {betas!r}")
    first, second = (checked_rate(name, beta) for beta in betas)
    return first, second


def checked_decay(name: str, decay: Any) -> float:
    """A number between 0 and 1."""
    decay = checked_number(name, decay)
    if not 0 < decay < 1:
        raise ValueError(f"{name}: expected 0 < decay < 1, got {decay}")
    return decay


def checked_paths(name: str, paths: Any) -> tuple[Path, ...]:
    """Paths. None means no path, and a single path stands for a tuple of one."""
    if paths is None:
        return ()
    if isinstance(paths, tuple | list):
        return tuple(checked_path(name, path) for path in paths)
    return (checked_path(name, paths),)


def checked_texts(name: str, texts: Any) -> tuple[str, ...]:
    """Strings. None means no string, and a single string stands for a tuple of one."""
    texts = () if texts is None else (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}: expected strings, got {texts!r}")
    return tuple(texts)


def checked_contents(name: str, files: Any) -> Mapping[str, bytes]:
    """The contents of files, by the names of the files."""
    if not isinstance(files, Mapping) or not all(
        isinstance(file, str) and isinstance(content, bytes) for file, content in files.items()
    ):
        raise TypeError(f"{name}: expected bytes by file name, got {described(files)}")
    return files


def checked_probability(name: str, value: Any) -> float:
    """A number in 0 … 1."""
    value = checked_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected 0 … 1, got {value}")
    return value


def checked_seed(name: str, seed: Any) -> int:
    """An integer in 0 … 2³¹ − 1."""
    seed = checked_integer(name, seed)
    if not 0 <= seed < 2**31:
        raise ValueError(f"{name}: expected 0 … {2**31 - 1}, got {seed}")
    return seed


Paths = Annotated[tuple[Path, ...], checked_paths]
Contents = Annotated[Mapping[str, bytes], checked_contents]
Texts = Annotated[tuple[str, ...], checked_texts]
Positive = Annotated[float, checked_positive]
NotNegative = Annotated[float, checked_not_negative]
Betas = Annotated[tuple[float, float], checked_betas]
Probability = Annotated[float, checked_probability]
Decay = Annotated[float, checked_decay]
Seed = Annotated[int, checked_seed]
