"""What tokens stand for."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike


class Tokens(Protocol):
    """What tokens stand for."""

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text; an error calls the text by the name."""
        ...

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """The text of tokens, as they come, up to the end of the text."""
        ...


def until_end(tokens: Iterable[ArrayLike], *ends: int | None) -> Iterator[int]:
    """The tokens as integers, up to the first that ends a text."""
    numbers = (int(np.ravel(token)[0]) for token in tokens)
    return itertools.takewhile(lambda token: token not in ends, numbers)
