"""Vocabularies of published models, which are chosen by name."""

import codecs
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from jax_models.options import CheckedFields
from train.data.tokens import until_end
from twinscan.command_line import CommandLineError


@dataclasses.dataclass(frozen=True)
class Published(CheckedFields):
    """A vocabulary that is chosen by name.

    The last of its `size` tokens may have no meaning. `end` is the token that ends a document,
    unless the text is a single document.
    """

    has_end: bool = False
    name: ClassVar[str]
    unit: ClassVar[str] = "token"
    size: ClassVar[int]
    end: ClassVar[int]

    def __len__(self) -> int:
        return self.size

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document; None if the text is a single document."""
        return self.end if self.has_end else None

    @property
    def ends(self) -> tuple[int, ...]:
        """The token that ends a text."""
        return (self.end,)

    def fields(self) -> dict[str, Any]:
        """The fields that `vocabulary.from_fields` reads."""
        return {"published": self.name, "has_end": self.has_end}


@dataclasses.dataclass(frozen=True)
class World(Published):
    """RWKV's World vocabulary, from the package `rwkv`. A token is a sequence of bytes of UTF-8.

    Raises:
        ImportError: the package is not installed.

    """

    name = "world"
    size = 2**16
    end = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _trie()

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text: at each place, the longest token that fits."""
        try:
            return np.array(_trie().encode(text), np.int32)
        except UnicodeEncodeError:
            raise CommandLineError(f"{name}: expected text in UTF-8") from None

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Decodes tokens, up to the end of the text. A token may end inside a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in until_end(tokens, *self.ends):
            yield decoder.decode(_trie().idx2token.get(token, b"\xff"))
        yield decoder.decode(b"", final=True)


@functools.cache
def _trie() -> Any:
    """The tokenizer of the package `rwkv`."""
    try:
        from rwkv.rwkv_tokenizer import TRIE_TOKENIZER  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("the vocabulary is in the package rwkv: pip install rwkv") from None
    with resources.as_file(resources.files("rwkv") / "rwkv_vocab_v20230424.txt") as path:
        return TRIE_TOKENIZER(path)


@dataclasses.dataclass(frozen=True)
class Nucleotides(Published):
    """The tokens of HyenaDNA: seven special tokens, then A, C, G, T and N."""

    name = "nucleotides"
    size = 16
    end = 1
    letters: ClassVar[str] = "ACGTN"
    first: ClassVar[int] = 7

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """A token for each letter, int32. Line ends are ignored."""
        text = text.replace("\n", "")
        if unknown := {*text} - {*self.letters}:
            found = ", ".join(map(repr, sorted(unknown)[:20]))
            raise CommandLineError(f"{name}: expected nucleotides, {self.letters}, got {found}")
        return np.array([self.first + self.letters.index(letter) for letter in text], np.int32)

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Decodes tokens letter by letter, up to the end of the text."""
        for token in until_end(tokens, *self.ends):
            known = self.first <= token < self.first + len(self.letters)
            yield self.letters[token - self.first] if known else "\N{REPLACEMENT CHARACTER}"


PUBLISHED: dict[str, type[World] | type[Nucleotides]] = {
    vocabulary.name: vocabulary for vocabulary in (World, Nucleotides)
}
