"""The command: how far every JAX layer and its torch twin are from float64."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import torch
import tyro
from rich.console import Console
from rich.progress import track

from parity_tests.checks import is_caught
from parity_tests.engine.measure import measure
from parity_tests.engine.problem import DTYPES, PLATFORMS, available_platforms
from parity_tests.registry import CASES, MUTATIONS
from parity_tests.report.html import page
from parity_tests.report.over_time import errors_over_time
from parity_tests.report.precision import precision_errors
from parity_tests.report.record import (
    ErrorOverTime,
    Measurement,
    MutationResult,
    PrecisionError,
    Record,
    moved,
    versions,
)
from parity_tests.report.terminal import print_record
from twinscan.command_line import CommandLineError, parse
from twinscan.files import check_writable, write_whole

PROG = "python -m parity_tests"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Run every twin pair forward and backward and compare both with the torch twin in float64.

    A cell shows torch's error, JAX's error and their ratio, each relative to the result's size.
    """

    case: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Only the cases with this in their names; may be given several times."""
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Where JAX runs; by default every platform that this machine has."""
    json: Path | None = None
    """Write the measurements to this file, too (docs/parity-report.md)."""
    html: Path | None = None
    """Write them as a page to look at, too, which needs no network."""
    compare: Path | None = None
    """Say what has moved since another run wrote this file by --json."""
    precision: bool = False
    """Measure, too, what matrix products in a TPU's or a GPU's default precision would cost."""
    mutations: bool = False
    """Also plant faults in the cases, each of which a check must catch."""

    @property
    def kept(self) -> dict[str, Path]:
        """The files to write, by flag."""
        files = {"--json": self.json, "--html": self.html}
        return {flag: path for flag, path in files.items() if path is not None}


def choose(arguments: Arguments) -> tuple[list[str], list[str]]:
    """The cases and the platforms that the arguments ask for."""
    names = [
        name
        for name in CASES
        if not arguments.case or any(part.lower() in name.lower() for part in arguments.case)
    ]
    for part in arguments.case:
        if not any(part.lower() in name.lower() for name in names):
            raise CommandLineError(f"--case: no case has {part} in its name")
    platforms = available_platforms()
    if arguments.platform is not None:
        if arguments.platform not in platforms:
            raise CommandLineError(
                f"--platform: this machine has no {arguments.platform}, only {', '.join(platforms)}"
            )
        platforms = [arguments.platform]
    places = {platform for name in names for platform in CASES[name].platforms}
    if places.isdisjoint(platforms):
        raise CommandLineError(
            f"--case: these run on {' and '.join(sorted(places))} only, not on "
            f"{' or '.join(platforms)}: {'; '.join(names)}"
        )
    return names, platforms


def measured(arguments: Arguments, names: Sequence[str], platforms: Sequence[str]) -> Record:
    """Measure all that the arguments ask for in these cases on these platforms."""
    pairs = [(name, p) for name in names for p in platforms if p in CASES[name].platforms]
    measurements, faults = [], []
    for name, platform in progress(pairs, "measuring"):
        # TPUs have no float64 of their own and are measured without
        dtypes = [dtype for dtype in DTYPES if platform != "tpu" or dtype != "float64"]
        report = measure(CASES[name].problem(), dtypes, platform)
        faults += [f"{name}, {platform}: {fault}" for fault in report.faults]
        measurements += [
            Measurement(name, platform, dtype, group, error)
            for dtype, groups in report.errors.items()
            for group, error in groups.items()
        ]
    ran = dict.fromkeys(name for name, _ in pairs)
    record = Record(
        versions(),
        runs(arguments, platforms),
        tuple(measurements),
        tuple(faults),
        cases={name: CASES[name].architecture for name in ran},
        not_run={name: CASES[name].platforms for name in names if name not in ran},
    )
    sound = [(name, platform) for name, platform in pairs if name not in record.faulty]
    if arguments.precision:
        record = dataclasses.replace(record, precision=tuple(precision(sound)))
    if arguments.kept:
        record = dataclasses.replace(record, over_time=tuple(over_time(sound)))
    if arguments.mutations:
        record = dataclasses.replace(record, mutations=tuple(planted(names)))
    return record


def planted(names: Sequence[str]) -> Iterator[MutationResult]:
    """Was each fault caught that was planted in these cases?"""
    for m in progress([m for m in MUTATIONS if m.case in names], "planting faults"):
        yield MutationResult(m.name, m.case, m.kind, m.check, is_caught(m))


def precision(pairs: Sequence[tuple[str, str]]) -> Iterator[PrecisionError]:
    """What coarser matrix products cost each pair."""
    emulable = [(name, platform) for name, platform in pairs if "cpu" in CASES[name].platforms]
    for name, platform in progress(emulable, "precision"):
        yield from precision_errors(name, CASES[name].problem(), platform)


def over_time(pairs: Sequence[tuple[str, str]]) -> Iterator[ErrorOverTime]:
    """How each pair's errors grow along a sequence."""
    for name, platform in progress(pairs, "over time"):
        yield from errors_over_time(CASES[name], platform)


def progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a bar on the terminal."""
    return track(items, what, console=Console(stderr=True), transient=True)


def runs(arguments: Arguments, platforms: Sequence[str]) -> dict[str, str]:
    """What became of each platform."""
    absent = "not on this machine" if arguments.platform is None else "not asked for"
    return {name: "ran" if name in platforms else absent for name in PLATFORMS}


@contextlib.contextmanager
def naming(flag: str, path: Path) -> Iterator[None]:
    """Name the flag whose file cannot be read or written."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandLineError(f"{flag}: {path}: {reason}") from error


def check_files(arguments: Arguments) -> None:
    """Refuse files that cannot be written before the work."""
    for flag, path in arguments.kept.items():
        with naming(flag, path):
            check_writable(path)
    others = [path for path in (arguments.json, arguments.compare) if path is not None]
    if arguments.html is not None and arguments.html.resolve() in [p.resolve() for p in others]:
        raise CommandLineError(f"--html: {arguments.html}: expected a file of its own for the page")


def main(args: Sequence[str], prog: str = PROG) -> int:
    """Print the table; 1 if a row fails, or a planted fault is not caught."""
    arguments = parse(Arguments, args, prog=prog)
    old = None
    if arguments.compare is not None:
        with naming("--compare", arguments.compare):
            old = Record.from_json(arguments.compare.read_bytes())
    names, platforms = choose(arguments)
    check_files(arguments)
    torch.set_num_threads(1)  # the tensors are small
    with jax.enable_x64(True):
        record = measured(arguments, names, platforms)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    print_record(record, console)
    if old is not None:
        lines = moved(old, record)
        console.print(
            f"since {arguments.compare}: {len(lines) or 'nothing'} moved", *lines, sep="\n"
        )
    texts = {"--json": Record.to_json, "--html": page}
    for flag, path in arguments.kept.items():
        with naming(flag, path):
            write_whole(path, texts[flag](record))
    return 0 if record.passed else 1
