"""A checkpoint that somebody else trained: its model, and what its tokens stand for."""

import codecs
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError

from jax_models import LanguageModel, read_pth, rwkv_from_torch
from twinscan.command_line import CommandLineError

WORLD_SIZE = 2**16
"""Tokens of a model of RWKV's World vocabulary; the last ones stand for nothing."""
END_OF_TEXT = 0


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
                "(or give the tokens themselves, by --prompt-tokens)"
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


def read_model(path: Path) -> LanguageModel:
    """The RWKV language model in a file of torch's or of safetensors.

    Raises:
        CommandLineError: there is no such file, or no such model in it.

    """
    try:
        path.stat()  # safetensors has words of its own for a missing file
        if path.suffix == ".safetensors":
            from safetensors.flax import load_file

            return rwkv_from_torch(load_file(path))
        return rwkv_from_torch(read_pth(path))
    except OSError as error:
        raise CommandLineError(f"{path}: {error.strerror or error}") from None
    except (ImportError, SafetensorError, TypeError, ValueError) as error:
        raise CommandLineError(f"{path}: {error}") from None


def tokens_of(model: LanguageModel) -> World:
    """What the tokens of a pretrained model stand for.

    Raises:
        CommandLineError: it is not known.

    """
    if model.config.vocab_size != WORLD_SIZE:
        raise CommandLineError(
            f"--prompt: expected a model of RWKV's World vocabulary ({WORLD_SIZE} tokens), got one "
            f"of {model.config.vocab_size} (give the tokens themselves, by --prompt-tokens)"
        )
    return World()
