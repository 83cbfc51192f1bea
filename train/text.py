"""Text as tokens: reading, vocabulary, windows, batches."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import grain
import numpy as np
from numpy.typing import ArrayLike

from train.command_line import CommandLineError

ALL_WORK = "\n" + 10 * "All work and no play makes Jack a doll boy. \n"
"""The seed's text."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The distinct characters of a text, in order; a token is a character's place among them."""

    characters: str

    @classmethod
    def of(cls, text: str) -> "Vocabulary":
        """The vocabulary of a text."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, int32.

        Raises:
            CommandLineError: the text has characters outside the vocabulary.

        """
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise CommandLineError(
                f"not in the vocabulary: {', '.join(map(repr, unknown[:20]))}"
                f"{' …' if len(unknown) > 20 else ''}; it has {self.characters!r}"
            )
        codes = np.array([ord(c) for c in self.characters])
        return np.searchsorted(codes, np.frombuffer(text.encode("utf-32-le"), np.uint32)).astype(
            np.int32
        )

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens."""
        return "".join(self.characters[token] for token in np.ravel(tokens))


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or the seed's for None.

    Raises:
        CommandLineError: there is no such file, or it is empty or not UTF-8.

    """
    if path is None:
        return ALL_WORK
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandLineError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandLineError(f"{path}: not UTF-8 at byte {error.start}") from None
    if not text:
        raise CommandLineError(f"{path}: the file is empty")
    return text


def split(tokens: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """The first nine tenths to train on, the rest to validate on, as the seed splits.

    Raises:
        CommandLineError: a part is shorter than a window and the token after it.

    """
    n = int(0.9 * len(tokens))
    parts = {"train": tokens[:n], "val": tokens[n:]}
    for name, part in parts.items():
        if len(part) <= window:
            raise CommandLineError(
                f"the text is too short: its {name} part has {len(part)} characters, and a window "
                f"of {window} takes {window + 1}"
            )
    return parts


@dataclasses.dataclass(frozen=True)
class Windows:
    """Every window of a text with the token after it: item i is tokens[i : i + window + 1]."""

    tokens: np.ndarray
    window: int

    def __len__(self) -> int:
        return len(self.tokens) - self.window

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[index : index + self.window + 1]


def batches(tokens: np.ndarray, *, window: int, batch_size: int, seed: int) -> Sequence[np.ndarray]:
    """Endless batches (batch_size, window + 1) of random windows.

    Batch i is a function of the seed and of i alone: to resume after i batches, go on with batch i.
    """
    windows = grain.MapDataset.source(Windows(tokens, window))
    return cast(Sequence[np.ndarray], windows.shuffle(seed=seed).repeat().batch(batch_size))
