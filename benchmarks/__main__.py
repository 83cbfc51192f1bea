"""`python -m benchmarks`: our layers and operators against every peer that is installed.

Prints a table a problem: compilation, run, ratio, share of the machine's limits, errors against
float64; and what was promised beside what was measured. Writes a JSON file for each family and
allocator and a plot for each family, in place of those of the last run, and `README.md` over all.
"""

import dataclasses
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from benchmarks import families
from benchmarks.compare import Session
from benchmarks.environment import ALLOCATORS, Allocator
from benchmarks.families.limits import measure_limits
from benchmarks.pieces import OutOfTime, Pieces
from benchmarks.report.page import write_page
from benchmarks.report.plot import bars, draw
from benchmarks.report.store import BrokenRecord, Record, plot_path, read_all, versions, write
from benchmarks.report.table import line
from benchmarks.workers import Unsuitable, Workers
from twinscan.command_line import CommandLineError, parse, run_command

PROG = "python -m benchmarks"
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build/bench-quick")
NOT_QUICK = ("limits", "memory")
"""Any run begins with the limits; programs that save memory compile for longer than they run."""

UNFINISHED = 3
"""The exit code where `--minutes` ran out."""

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure our layers and operators against every peer that is installed."""

    only: tuple[Literal[tuple(families.FAMILIES)], ...] = ()  # pyright: ignore[reportInvalidTypeForm]
    """These families; the results of the others stay."""
    quick: bool = False
    """Most families, few shapes, few bursts, and the default allocator."""
    allocator: tuple[Allocator, ...] = ()
    """`default` is what users have, `tuned` keeps the memory that is freed (on a CPU, with glibc).
    By default both, or `default` with --quick; the results of the other stay."""
    platform: Platform | None = None
    """Of JAX; by default what it finds."""
    page: bool = False
    """Measure nothing; write the page of the records that are there again."""
    minutes: float | None = None
    """Stop after this many minutes, with exit code 3. The same command then continues."""
    out: Path | None = None
    """The folder of the results; by default benchmarks/results, or build/bench-quick with
    --quick."""

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes: expected a number above 0, got {self.minutes}")


def run(
    names: Sequence[str],
    folder: Path,
    *,
    quick: bool,
    platform: str | None,
    allocators: Sequence[Allocator],
    minutes: float | None = None,
) -> list[Record]:
    """Measure families, each with each allocator into its files.

    Raises:
        OutOfTime: the minutes are over.
        Unsuitable: a worker has other threads or another allocator than it should have.
        BrokenRecord: the folder holds one.

    """
    folder.mkdir(parents=True, exist_ok=True)
    read_all(folder)
    asked = [list(names), quick, platform, list(allocators), versions()]
    pieces = None if minutes is None else Pieces(folder, minutes, asked)
    records = []
    console = Console(width=150)
    for allocator in allocators:
        with Workers(platform, allocator) as workers:
            session = Session(workers, console, quick, measure_limits, pieces)
            if allocator == "tuned" and session.platform != "cpu":
                console.print(f"tuned: left out, it is nothing to a {session.platform}")
                continue
            assert session.limits is not None
            for name in names:
                if pieces and pieces.has(f"{name}, {allocator}"):
                    continue
                console.rule(f"{families.title(name)}, {allocator} allocator")
                outcome = families.measure(name, session)
                record = Record(
                    family=name,
                    title=families.title(name),
                    platform=session.platform,
                    allocator=allocator,
                    quick=quick,
                    measured_with={"device": workers.device("jax").split(": ")[1], **versions()},
                    environments=workers.environments(),
                    limits=session.limits,
                    outcome=outcome,
                )
                write(folder, record)
                draw_family(folder, record)
                write_page(folder, families.FAMILIES)
                records.append(record)
                if pieces:
                    pieces.end(f"{name}, {allocator}")
    if pieces:
        pieces.remove()
    for record in records:
        console.rule(f"{record.title}, {record.allocator} allocator")
        for check in record.outcome.checks:
            console.print(line(check))
    return records


def draw_family(folder: Path, record: Record) -> None:
    """The record's family, with all allocators for which there is a record of this platform."""
    key = record.family, record.platform
    found = {
        each.allocator: each.outcome.rows
        for each in read_all(folder)
        if (each.family, each.platform) == key
    }
    plot = getattr(families.family(record.family), "plot", bars)
    draw(plot(found, record.title), plot_path(folder, record))


def main(args: Sequence[str], prog: str = PROG) -> int:
    """Measure as the arguments say."""
    arguments = parse(Arguments, args, prog=prog)
    folder = arguments.out or (QUICK_RESULTS if arguments.quick else RESULTS)
    quick = [name for name in families.FAMILIES if name not in NOT_QUICK]
    names = arguments.only or (quick if arguments.quick else families.FAMILIES)
    if arguments.page:
        write_page(folder, families.FAMILIES)
        return 0
    tunable = platform.libc_ver()[0] == "glibc" and not arguments.quick
    allocators = arguments.allocator or (ALLOCATORS if tunable else ALLOCATORS[:1])
    try:
        run(
            names,
            folder,
            quick=arguments.quick,
            platform=arguments.platform,
            allocators=allocators,
            minutes=arguments.minutes,
        )
    except OutOfTime:
        print(
            f"{prog}: stopped after {arguments.minutes:g} minutes: what is measured is in "
            f"{folder}; the same command continues",
            file=sys.stderr,
        )
        return UNFINISHED
    except (BrokenRecord, Unsuitable) as error:
        raise CommandLineError(str(error)) from None
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:], PROG)
