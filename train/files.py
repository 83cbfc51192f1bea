"""Files: their faults in one line, and files that are there whole or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from train.digest import bytes_digest
from twinscan import files
from twinscan.command_line import CommandLineError

BLOCK = 1 << 20
"""Bytes that are read at a time."""


@contextlib.contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Name the path where the system refuses something of it."""
    try:
        yield
    except OSError as error:
        raise CommandLineError(f"{error.filename or path}: {error.strerror}") from None


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that is there whole or not at all; its faults in one line."""
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
    digest = bytes_digest()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()
