"""The protocol of a vocabulary."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike


class Tokens(Protocol):
    """A vocabulary: it maps texts to tokens, and tokens to text."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        ...

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text. Errors call the text `name`."""
        ...

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Decodes tokens piece by piece, up to the end of the text."""
        ...


def until_end(tokens: Iterable[ArrayLike], *ends: int) -> Iterator[int]:
    """The tokens as integers, up to the first one that ends a text."""
    numbers = (int(np.ravel(token)[0]) for token in tokens)
    return itertools.takewhile(lambda token: token not in ends, numbers)
