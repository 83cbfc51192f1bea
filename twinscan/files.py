"""Files that are there whole or not at all."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that is there under its own name once all of it is written."""
    path = path.resolve()
    partial = _partial(path)
    try:
        yield partial
        to_disk(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; a device or a pipe gets the text as it comes."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Refuse, before the work, what `write_whole` cannot write; no file of a name is made.

    Raises:
        OSError: what the system says.

    """
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with contextlib.suppress(FileNotFoundError):
        _partial(path).stat()  # the name may be too long
    if path.is_file() or not path.exists():
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:  # of a name that nobody gave
            raise OSError(error.errno, error.strerror, str(path)) from None


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
