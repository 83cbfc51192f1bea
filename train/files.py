"""Files: their faults in one line, their blocks and their digests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from train.digest import bytes_digest
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
