"""Files and folders that are written completely or not at all."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a temporary path, which gets the name `path` once the file or folder is complete."""
    path = path.resolve()
    partial = _partial(path)
    try:
        yield partial
        for written in (*(partial.iterdir() if partial.is_dir() else ()), partial):
            to_disk(written)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        raise


def to_disk(path: Path) -> None:
    """Waits until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Writes a file completely or not at all. A device or a pipe is written directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Checks that `write_whole` can write a file, without creating it.

    Raises:
        OSError: the file cannot be written.

    """
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with contextlib.suppress(FileNotFoundError):
        _partial(path).stat()  # the name may be too long
    if path.is_file() or not path.exists():
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:  # names the temporary file
            raise OSError(error.errno, error.strerror, str(path)) from None


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
