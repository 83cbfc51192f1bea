"""Files that are written completely or not at all, and their errors in one line."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from train.process.digest import bytes_digest
from twinscan import files
from twinscan.command_line import CommandLineError

BLOCK = 1 << 20
"""Number of bytes that are read at a time."""


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Turns an OSError into an error that names the path."""
    try:
        yield
    except OSError as error:
        raise CommandLineError(f"{error.filename or path}: {error.strerror}") from None


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a temporary path, which becomes `path` once the file is complete."""
    try:
        with files.whole(path) as partial:
            yield partial
    except OSError as error:
        raise CommandLineError(f"{path}: {error.strerror or error}") from None


def blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes, in blocks."""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def file_digest(path: Path) -> str:
    """The digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, bytes_digest).hexdigest()
