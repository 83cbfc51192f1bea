"""The files of a command that measures: what it writes, and what it compares with."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from parity_tests.report.html import page
from parity_tests.report.record import Record, moved
from parity_tests.report.terminal import print_record
from twinscan.command_line import CommandLineError
from twinscan.files import check_writable, write_whole

T = TypeVar("T")
FORMS = {".html": page, ".json": Record.to_json}
"""What a file holds, by the end of its name."""


@dataclasses.dataclass(frozen=True)
class Files:
    """The options."""

    json: Path | None = None
    """Write the measurements to this file, too (docs/parity-report.md)."""
    html: Path | None = None
    """Write them as a page to look at, too, which needs no network."""
    compare: Path | None = None
    """Say what has moved since another run wrote this file by --json."""

    @property
    def kept(self) -> dict[str, Path]:
        """The files to write, by flag."""
        files = {"--json": self.json, "--html": self.html}
        return {flag: path for flag, path in files.items() if path is not None}

    def before(self) -> Record | None:
        """Before the work: the record to compare with, if all files can be read and written.

        Raises:
            CommandLineError: one cannot.

        """
        old = None
        if self.compare is not None:
            with naming("--compare", self.compare):
                old = Record.from_json(self.compare.read_bytes())
        for flag, path in self.kept.items():
            with naming(flag, path):
                check_writable(path)
        others = [path for path in (self.json, self.compare) if path is not None]
        if self.html is not None and self.html.resolve() in [p.resolve() for p in others]:
            raise CommandLineError(f"--html: {self.html}: expected a file of its own for the page")
        return old

    def after(self, record: Record, old: Record | None) -> int:
        """Print and write a record, and what has moved; the exit code, 1 if something fails."""
        console = Console()
        if not console.is_terminal:
            console.width = 160
        print_record(record, console)
        if old is not None:
            lines = moved(old, record)
            console.print(
                f"since {self.compare}: {len(lines) or 'nothing'} moved", *lines, sep="\n"
            )
        self.write(record, self.kept)
        return 0 if record.passed else 1

    def write(self, record: Record, flags: Iterable[str]) -> None:
        """Write those of the files that these flags name."""
        for flag in flags:
            with naming(flag, self.kept[flag]):
                write_whole(self.kept[flag], FORMS[flag.replace("--", ".")](record))


@contextlib.contextmanager
def naming(flag: str, path: Path) -> Iterator[None]:
    """Name the flag whose file cannot be read or written."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandLineError(f"{flag}: {path}: {reason}") from error


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a bar on the terminal."""
    return track(items, what, console=Console(stderr=True), transient=True)
