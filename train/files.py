"""Files: their faults in one line, and files that are there whole or not at all."""

import contextlib
import os
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


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write a file to, which then takes the path: whole, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        to_disk(partial)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CommandLineError(f"{path}: {error.strerror or error}") from None


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
