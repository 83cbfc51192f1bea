"""Text as tokens: reading, vocabulary, windows, batches."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import grain
import numpy as np
from numpy.typing import ArrayLike

from jax_models.options import CheckedFields, checked_options
from train.checks import Seed
from train.digest import bytes_digest
from twinscan.command_line import CommandLineError

ALL_WORK = "\n" + 10 * "All work and no play makes Jack a doll boy. \n"
"""The seed's text."""


@dataclasses.dataclass(frozen=True)
class Vocabulary(CheckedFields):
    """The distinct characters of a text, in order; a token is a character's place among them."""

    characters: str

    @classmethod
    @checked_options
    def of(cls, text: str) -> "Vocabulary":
        """The vocabulary of a text."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    @checked_options
    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text, int32; an error calls the text by the name.

        Raises:
            CommandLineError: the text has characters outside the vocabulary.

        """
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise CommandLineError(
                f"{name}: not in the vocabulary: {', '.join(map(repr, unknown[:20]))}"
                f"{' …' if len(unknown) > 20 else ''}; it has {self.characters!r}"
            )
        codes = np.array([ord(c) for c in self.characters])
        return np.searchsorted(codes, np.frombuffer(text.encode("utf-32-le"), np.uint32)).astype(
            np.int32
        )

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens."""
        return "".join(self.characters[token] for token in np.ravel(tokens))

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """The text of tokens, as they come."""
        return map(self.decode, tokens)


@checked_options
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


@checked_options
def digest_of(text: str) -> str:
    """By which a text is known again."""
    return bytes_digest(text.encode("utf-8")).hexdigest()


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of a text, each with the token after it: item i begins at starts[i]."""

    tokens: np.ndarray
    window: int
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int | slice) -> np.ndarray:
        return self.tokens[self.starts[index][..., None] + np.arange(self.window + 1)]

    @property
    def rows(self) -> "Windows":
        """Those that begin at multiples of `window`: no two of them predict one token."""
        return dataclasses.replace(self, starts=self.starts[self.starts % self.window == 0])


@checked_options
def split(tokens: np.ndarray, window: int, val_rows: int | None = None) -> dict[str, Windows]:
    """The windows to train on and those to validate on; no token is predicted in both.

    By default all windows of the first nine tenths and all of the rest, as seed 001 splits. With
    `val_rows` as seed 002 does: the text is cut into rows of `window`, and so many of them, drawn
    at random but the same for every run, are to validate on.

    Raises:
        CommandLineError: the text is too short for both parts.

    """
    if val_rows is None:
        n = int(0.9 * len(tokens))
        halves = {"train": tokens[:n], "val": tokens[n:]}
        for name, half in halves.items():
            if len(half) <= window:
                raise CommandLineError(
                    f"--text: the text is too short: its {name} part has {len(half)} characters, "
                    f"and a --window of {window} takes {window + 1}"
                )
        return {
            name: Windows(half, window, np.arange(len(half) - window))
            for name, half in halves.items()
        }
    rows = (len(tokens) - 1) // window
    if val_rows >= rows:
        raise CommandLineError(
            f"--val-rows: expected fewer than the {rows} rows of {window} characters that the text "
            f"has, got {val_rows}"
        )
    starts = window * np.random.default_rng(0).permutation(rows)
    return {
        "train": Windows(tokens, window, starts[val_rows:]),
        "val": Windows(tokens, window, starts[:val_rows]),
    }


@checked_options
def batches(windows: Windows, *, batch_size: int, seed: Seed) -> Sequence[np.ndarray]:
    """Endless batches (batch_size, window + 1): all windows in a random order, and again.

    Batch i is a function of the seed and of i alone: to resume after i batches, go on with batch i.
    """
    source = grain.MapDataset.source(windows)
    return cast(Sequence[np.ndarray], source.shuffle(seed=seed).repeat().batch(batch_size))
