"""Published checkpoints: their models and their vocabularies."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jax_models import LanguageModel, LanguageModelConfig, load_pretrained
from jax_models.weights.checkpoint import json_object
from train.data.published_vocabulary import PUBLISHED, World
from train.data.tokens import Tokens
from train.data.vocabulary import Subwords
from twinscan.command_line import CommandLineError, error_in_one_line
from twinscan.heartbeat import doing

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
OR_TOKENS = "give the tokens themselves, by --prompt-tokens"


class Numbers:
    """A vocabulary whose text is the tokens themselves, as integers."""

    ends = ()

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of integers that are separated by spaces."""
        numbers = text.split()
        for number in numbers:
            if not re.fullmatch("[0-9]+", number):
                raise CommandLineError(f"{name}: expected integers from 0 on, got {number!r}")
        return np.array([*map(int, numbers)])

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """The tokens, each after a space."""
        return (f" {int(np.ravel(token)[0])}" for token in tokens)


class CheckpointTokens(Subwords):
    """The tokens of the tokenizer in a checkpoint's folder.

    The tokenizer may add special tokens before a text. The checkpoint's configuration says which
    tokens end a text, because in a large vocabulary the usual names may mean something else. The
    `end` of a run that was trained from the checkpoint ends a text, too.
    """

    def __init__(self, folder: Path, end: str | None = None):
        super().__init__((folder / TOKENIZER).read_text(encoding="utf-8"), end)
        run_ends = () if end is None else self.ends
        self.ends = tuple(dict.fromkeys((*run_ends, *_ends(folder))))
        self.end_of_text = None

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text, int32, with the special tokens that the tokenizer adds."""
        return np.array(self.tokenizer.encode(text).ids, np.int32)


def read_model(path: Path) -> LanguageModel:
    """The language model in a file or a folder.

    Raises:
        CommandLineError: the file does not exist or does not hold a language model.

    """
    with faults_of_checkpoint(path), doing(f"reading {path}"):
        model = load_pretrained(path)
        if not isinstance(model, LanguageModel):
            raise ValueError(f"expected a language model, got a {type(model).__name__}")
        return model


def tokenizer_of(config: LanguageModelConfig, path: Path) -> str | None:
    """The value of `--tokenizer` for the model in a file or a folder; None if unknown."""
    if config.tokenizer is not None:
        return config.tokenizer
    if (path / TOKENIZER).exists():
        return str(path / TOKENIZER)
    return World.name if config.vocab_size == World.size else None


def tokens_of(model: LanguageModel, path: Path) -> Tokens:
    """The vocabulary of the model in a file or a folder.

    Raises:
        CommandLineError: the vocabulary is unknown, or its package is not installed.

    """
    name = tokenizer_of(model.config, path)
    if name is None and path.is_dir():
        raise CommandLineError(f"--prompt: {path} has no {TOKENIZER} ({OR_TOKENS})")
    if name is None:
        raise CommandLineError(
            f"--prompt: expected a model of RWKV's World vocabulary ({World.size} tokens), got one "
            f"of {model.config.vocab_size} ({OR_TOKENS})"
        )
    if name not in PUBLISHED:
        with faults_of_checkpoint(path):
            return CheckpointTokens(path)
    try:
        return PUBLISHED[name]()
    except ImportError as error:
        raise CommandLineError(f"--prompt: {error} (or {OR_TOKENS})") from None


def plain_tokens(vocabulary: Tokens, text: str, name: str) -> np.ndarray:
    """The tokens of a text, without the special tokens that a checkpoint's tokenizer adds."""
    if isinstance(vocabulary, CheckpointTokens):
        return Subwords.encode(vocabulary, text, name)
    return vocabulary.encode(text, name)


@contextlib.contextmanager
def faults_of_checkpoint(path: Path, flag: str = "") -> Iterator[None]:
    """Turns an error about a checkpoint into one line that names the flag and the path."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename or path}: {error.strerror or error}"
        raise CommandLineError(f"{flag}{reason}") from None
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise CommandLineError(f"{flag}{path}: {error_in_one_line(error)}") from None


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens of the tokenizer in a folder, by names such as `eos_token`."""
    known = optional_json(folder / SPECIAL_TOKENS) | optional_json(folder / TOKENIZER_CONFIG)
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in known.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }


def optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, which is empty if the file does not exist."""
    return json_object(path) if path.exists() else {}


def _ends(folder: Path) -> list[int]:
    """The tokens that end a text. A multimodal model may name them in its `text_config`."""
    config = optional_json(folder / "config.json")
    generation = optional_json(folder / "generation_config.json")
    for source in (generation, config, config.get("text_config") or {}):
        ends = source.get("eos_token_id")
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    return []
