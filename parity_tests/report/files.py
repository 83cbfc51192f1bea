"""The options that the commands share: the cases to run, and the files to read and write."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from rich.console import Console
from rich.progress import track

from parity_tests.report.html import page
from parity_tests.report.record import Record, changes
from parity_tests.report.terminal import print_record
from twinscan.command_line import CommandLineError
from twinscan.files import check_writable, write_whole
from twinscan.heartbeat import doing, written_by

T = TypeVar("T")
FORMS = {".html": page, ".json": Record.to_json}
"""The function that formats a record, by the suffix of the file."""


@dataclasses.dataclass(frozen=True)
class Files:
    """The options that choose cases and files."""

    case: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Run only the cases whose names contain this; may be given several times."""
    json: Path | None = None
    """Write the measurements to this file, too (docs/design/parity_report.md)."""
    html: Path | None = None
    """Write them as a page to look at, too, which needs no network."""
    compare: Path | None = None
    """Say what has moved since another run wrote this file with --json."""

    def chosen_names(self, names: Iterable[str], no_name: str, hint: str = "") -> list[str]:
        """The names that contain a part of `--case`; all names without `--case`.

        `no_name` begins the error for a part that no name contains, and `hint` ends it.
        """
        names = [*names]
        for part in self.case:
            if not any(part.lower() in name.lower() for name in names):
                raise CommandLineError(f"--case: {no_name} {part} in its name{hint}")
        parts = [part.lower() for part in self.case] or [""]
        return [name for name in names if any(part in name.lower() for part in parts)]

    @property
    def paths_by_flag(self) -> dict[str, Path]:
        """The files to write, by flag."""
        files = {"--json": self.json, "--html": self.html}
        return {flag: path for flag, path in files.items() if path is not None}

    def previous_record(self) -> Record | None:
        """Checks all files before anything runs, and returns the record to compare with.

        Raises:
            CommandLineError: a file cannot be read or written.

        """
        old = None
        if self.compare is not None:
            with errors_naming("--compare", self.compare):
                old = Record.from_json(self.compare.read_bytes())
        for flag, path in self.paths_by_flag.items():
            with errors_naming(flag, path):
                check_writable(path)
        others = [path for path in (self.json, self.compare) if path is not None]
        if self.html is not None and self.html.resolve() in [p.resolve() for p in others]:
            raise CommandLineError(f"--html: {self.html}: expected a file of its own for the page")
        return old

    def print_and_write(self, record: Record, old: Record | None) -> int:
        """Prints and writes a record, and prints the changes since `old`. Returns the exit code.

        The exit code is 1 if something fails.
        """
        console = Console()
        if not console.is_terminal:
            console.width = 160
        print_record(record, console)
        if old is not None:
            lines = changes(old, record)
            console.print(
                f"since {self.compare}: {len(lines) or 'nothing'} moved", *lines, sep="\n"
            )
        self.write(record, self.paths_by_flag)
        return 0 if record.passed else 1

    def write(self, record: Record, flags: Iterable[str]) -> None:
        """Writes the files that these flags name."""
        for flag in flags:
            with errors_naming(flag, self.paths_by_flag[flag]):
                write_whole(self.paths_by_flag[flag], FORMS[flag.replace("--", ".")](record))


@contextlib.contextmanager
def errors_naming(flag: str, path: Path) -> Iterator[None]:
    """A context in which an error of reading or writing a file names the flag of the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandLineError(f"{flag}: {path}: {reason}") from error


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a progress bar on the terminal, and with a line about a slow item."""
    console = Console(stderr=True)
    with written_by(partial(console.print, markup=False, soft_wrap=True)):
        for i, item in enumerate(track(items, what, console=console, transient=True), 1):
            with doing(f"{what} {i} of {len(items)}: {item}"):
                yield item
