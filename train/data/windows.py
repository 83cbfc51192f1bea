"""Windows of the tokens of a text, and batches of windows."""

import dataclasses
import mmap
import os
import weakref
from pathlib import Path
from typing import Annotated, Any

import grain
import numpy as np

from jax_models.checks.values import described
from jax_models.options import checked_options
from train.checks import Seed
from twinscan.command_line import CommandLineError


class TokenFile:
    """Tokens in a file, which is mapped into memory only while some of them are read.

    With a permanent mapping, every page that was ever read would count as memory of the process.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._dtype = dtype
        self._count = path.stat().st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapping, self._dtype)[index]


def checked_tokens(name: str, tokens: Any) -> "TokenArray":
    """Checks that an argument is tokens, in memory or in a file."""
    if not isinstance(tokens, np.ndarray | TokenFile):
        raise TypeError(f"{name}: expected an array or a file of tokens, got {described(tokens)}")
    return tokens


TokenArray = Annotated[np.ndarray | TokenFile, checked_tokens]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of a text, each with the token after it. Window i begins at starts[i]."""

    tokens: TokenArray
    window: int
    starts: range | np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int | slice) -> np.ndarray:
        return self.at(np.asarray(self.starts[index]))

    def at(self, starts: np.ndarray) -> np.ndarray:
        """The windows that begin at these places, int32 (*shape, window + 1)."""
        indices = np.asarray(starts)[..., None] + np.arange(self.window + 1)
        return self.tokens[indices].astype(np.int32)

    @property
    def rows(self) -> "Windows":
        """Adjacent windows, which predict each token once."""
        if isinstance(self.starts, np.ndarray):
            return self
        return dataclasses.replace(self, starts=self.starts[:: self.window])


@checked_options
def split(tokens: TokenArray, window: int, val_rows: int | None = None) -> dict[str, Windows]:
    """The windows to train on, and those to validate on. No token is predicted in both.

    By default, all windows of the first nine tenths are for training, and all windows of the rest
    are for validation. With `val_rows`, the text is cut into rows of `window`, and that many of
    them are for validation. They are drawn at random, but are the same for every run.

    Raises:
        CommandLineError: the text is too short for both parts.

    """
    if val_rows is None:
        n = int(0.9 * len(tokens))
        parts = {"train": range(n), "val": range(n, len(tokens))}
        for name, part in parts.items():
            if len(part) <= window:
                raise CommandLineError(
                    f"--text: the text is too short: its {name} part has {len(part)} tokens, "
                    f"and a --window of {window} takes {window + 1}"
                )
        return {name: Windows(tokens, window, part[:-window]) for name, part in parts.items()}
    rows = (len(tokens) - 1) // window
    if val_rows >= rows:
        raise CommandLineError(
            f"--val-rows: expected fewer than the {rows} rows of {window} tokens that the text "
            f"has, got {val_rows}"
        )
    starts = window * np.random.default_rng(0).permutation(rows)
    return {
        "train": Windows(tokens, window, starts[val_rows:]),
        "val": Windows(tokens, window, starts[:val_rows]),
    }


class Batches:
    """Endless batches (batch_size, window + 1) of all windows, shuffled in each epoch.

    Each epoch has each window once. Batch i depends only on the seed and on i, so a run that
    resumes after i batches continues with batch i.
    """

    @checked_options
    def __init__(self, windows: Windows, *, batch_size: int, seed: Seed):
        self.windows = windows
        # Grain shuffles the numbers of the windows rather than their starts, because it records the
        # time and the size of each item of a data source, which takes longer than all the rest.
        shuffled = grain.MapDataset.range(len(windows)).shuffle(seed=seed).repeat()
        self._starts = shuffled.batch(
            batch_size, batch_fn=lambda batch: [windows.starts[i] for i in batch]
        )

    def starts(self, index: int) -> np.ndarray:
        """The places in the text where the windows of a batch begin."""
        return np.asarray(self._starts[index])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.windows.at(self.starts(index))
