"""A checkpoint that somebody else trained: its model, and what its tokens stand for."""

import codecs
import contextlib
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jax_models import HyenaDNALanguageModel, LanguageModel, load_pretrained
from jax_models.weights.checkpoint import json_object
from train.vocabulary import Subwords, Tokens, until_end
from twinscan.command_line import CommandLineError, in_one_line

WORLD_SIZE = 2**16
"""Tokens of a model of RWKV's World vocabulary; the last ones stand for nothing."""
END_OF_TEXT = 0
TOKENIZER = "tokenizer.json"
OR_TOKENS = "give the tokens themselves, by --prompt-tokens"


class Numbers:
    """Tokens as they are."""

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """Integers between spaces."""
        numbers = text.split()
        for number in numbers:
            if not re.fullmatch("[0-9]+", number):
                raise CommandLineError(f"{name}: expected integers from 0 on, got {number!r}")
        return np.array([*map(int, numbers)])

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """A space before each."""
        return (f" {int(np.ravel(token)[0])}" for token in tokens)


class World:
    """RWKV's World vocabulary, of the package `rwkv`: a token is a piece of UTF-8."""

    def __init__(self) -> None:
        try:
            from rwkv.rwkv_tokenizer import (  # pyright: ignore[reportMissingImports]
                TRIE_TOKENIZER,
            )
        except ImportError:
            raise CommandLineError(
                "--prompt: the vocabulary is in the package rwkv: pip install rwkv "
                f"(or {OR_TOKENS})"
            ) from None
        with resources.as_file(resources.files("rwkv") / "rwkv_vocab_v20230424.txt") as path:
            self._trie = TRIE_TOKENIZER(path)

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The longest tokens, one after the other."""
        try:
            return np.array(self._trie.encode(text), np.int32)
        except UnicodeEncodeError:
            raise CommandLineError(f"{name}: expected text in UTF-8") from None

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Up to the end of the text. A token may hold some bytes of a character only."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            number = int(np.ravel(token)[0])
            if number == END_OF_TEXT:
                break
            yield decoder.decode(self._trie.idx2token.get(number, b"\xff"))
        yield decoder.decode(b"", final=True)


class Nucleotides:
    """The tokens of HyenaDNA: A, C, G, T and N, after seven that stand for no nucleotide."""

    letters = "ACGTN"
    first = 7
    end_of_text = 1

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """A token for each letter, int32."""
        if unknown := {*text} - {*self.letters}:
            found = ", ".join(map(repr, sorted(unknown)[:20]))
            raise CommandLineError(f"{name}: expected nucleotides, {self.letters}, got {found}")
        return np.array([self.first + self.letters.index(letter) for letter in text], np.int32)

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """The letters of tokens, as they come, up to the end of the text."""
        for token in until_end(tokens, self.end_of_text):
            known = self.first <= token < self.first + len(self.letters)
            yield self.letters[token - self.first] if known else "\N{REPLACEMENT CHARACTER}"


class OwnTokens(Subwords):
    """The tokens of the tokenizer in a checkpoint's folder.

    The tokenizer puts its own before a text. Which ones end a text, the checkpoint's configuration
    says: of the usual names a large vocabulary has some that stand for something else.
    """

    def __init__(self, folder: Path):
        super().__init__((folder / TOKENIZER).read_text(encoding="utf-8"))
        self.ends = _ends(folder)
        self.end_of_text = None

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text, int32, and those before it."""
        return np.array(self.tokenizer.encode(text).ids, np.int32)

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """The text of tokens, as they come, up to the end of the text."""
        return super().pieces(until_end(tokens, *self.ends))


def read_model(path: Path) -> LanguageModel:
    """The model in a file of torch's or of safetensors, or the RecurrentGemma in a folder.

    Raises:
        CommandLineError: there is no such file, or no such model in it.

    """
    with faults_of_checkpoint(path):
        model = load_pretrained(path)
        if not isinstance(model, LanguageModel):
            raise ValueError(f"expected a language model, got a {type(model).__name__}")
        return model


def tokens_of(model: LanguageModel, path: Path) -> Tokens:
    """What the tokens of the model in a file or a folder stand for.

    Raises:
        CommandLineError: it is not known.

    """
    if isinstance(model, HyenaDNALanguageModel):
        return Nucleotides()
    if path.is_dir():
        if not (path / TOKENIZER).exists():
            raise CommandLineError(f"--prompt: {path} has no {TOKENIZER} ({OR_TOKENS})")
        with faults_of_checkpoint(path):
            return OwnTokens(path)
    if model.config.vocab_size != WORLD_SIZE:
        raise CommandLineError(
            f"--prompt: expected a model of RWKV's World vocabulary ({WORLD_SIZE} tokens), got one "
            f"of {model.config.vocab_size} ({OR_TOKENS})"
        )
    return World()


@contextlib.contextmanager
def faults_of_checkpoint(path: Path) -> Iterator[None]:
    """Name the path, in one line, where a checkpoint is not what it should be."""
    try:
        yield
    except OSError as error:
        raise CommandLineError(f"{error.filename or path}: {error.strerror or error}") from None
    except (ImportError, TypeError, ValueError) as error:
        raise CommandLineError(f"{path}: {in_one_line(error)}") from None


def _ends(folder: Path) -> list[int]:
    """The tokens that end a text."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        ends = json_object(path).get("eos_token_id") if path.exists() else None
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    return []
