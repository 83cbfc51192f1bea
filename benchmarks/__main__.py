"""`python -m benchmarks`: our layers and operators against every peer that is installed.

Prints a table for each problem, with the times to compile and to run, the ratio of our time to the
peers', the share of the machine's limits and the errors against float64, and then compares the
measured ratios with their targets. Writes a JSON file for each family and allocator and a plot for
each family, which replace those of the last run. The documentation's page of results shows them.
"""

import dataclasses
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from benchmarks import families
from benchmarks.compare import Session
from benchmarks.environment import Allocator
from benchmarks.families.limits import measure_limits
from benchmarks.report.overview import overview
from benchmarks.report.plot import bars, draw
from benchmarks.report.store import BrokenRecord, Record, plot_path, read_all, versions, write
from benchmarks.report.table import check_line
from benchmarks.resume import OutOfTime, ResumableRun
from benchmarks.workers import Unsuitable, Workers
from twinscan.command_line import CommandLineError, parse, run_command

PROG = "python -m benchmarks"
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build/bench-quick")
UNFINISHED = 3
"""The exit code if `--minutes` ran out."""

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure our layers and operators against every peer that is installed."""

    only: tuple[Literal[tuple(families.FAMILIES)], ...] = ()  # pyright: ignore[reportInvalidTypeForm]
    """Measure only these families. The results of the others stay."""
    quick: bool = False
    """Most families, few shapes, few bursts, and the default allocator."""
    allocator: tuple[Allocator, ...] = ()
    """`default` is what users have, `tuned` keeps the memory that is freed (on a CPU, with glibc).
    By default, all families are measured with `default`, and those in which the allocator changes
    who is faster also with `tuned`, unless --quick is given. The results of the other stay."""
    platform: Platform | None = None
    """The platform of JAX; by default the one that JAX chooses."""
    minutes: float | None = None
    """Stop after this many minutes, with exit code 3. The same command then continues."""
    out: Path | None = None
    """The folder of the results; by default benchmarks/results, or build/bench-quick with
    --quick."""

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes: expected a number above 0, got {self.minutes}")


def run(
    folder: Path,
    *,
    quick: bool,
    platform: str | None,
    names: Mapping[Allocator, Sequence[str]],
    minutes: float | None = None,
) -> list[Record]:
    """Measures the named families with each allocator, and writes the results into the folder.

    Raises:
        OutOfTime: there is not enough time left for the next measurement.
        Unsuitable: a worker does not have the threads or the allocator that it should have.
        BrokenRecord: the folder holds a record that cannot be read.

    """
    # Read the old records before the long measurements, because the plots need them at the end.
    folder.mkdir(parents=True, exist_ok=True)
    read_all(folder)
    request = [
        quick,
        platform,
        {allocator: [*found] for allocator, found in names.items()},
        versions(),
    ]
    resumable = None if minutes is None else ResumableRun(folder, minutes, request)
    records = []
    console = Console(width=150)
    # Malloc is chosen when a process starts, so each allocator gets its own workers.
    for allocator, chosen in names.items():
        with Workers(platform, allocator) as workers:
            session = Session(workers, console, quick, measure_limits, resumable)
            if allocator == "tuned" and session.platform != "cpu":
                device = session.platform.upper()
                console.print(f"tuned: left out, because malloc has no effect on a {device}")
                continue
            # Write each family as soon as it is measured, so that a later failure loses nothing.
            assert session.limits is not None
            for name in chosen:
                if resumable and resumable.is_written(f"{name}, {allocator}"):
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
                draw_plots(folder, record)
                records.append(record)
                if resumable:
                    resumable.mark_written(f"{name}, {allocator}")
    if resumable:
        resumable.remove()
    # Repeat all checks at the end, where they are easy to find.
    for record in records:
        console.rule(f"{record.title}, {record.allocator} allocator")
        for check in record.outcome.checks:
            console.print(check_line(check))
    return records


def draw_plots(folder: Path, record: Record) -> None:
    """Draws a family on the platform of a record, and the README's picture."""
    key = record.family, record.platform
    records = read_all(folder)
    found = {
        each.allocator: each.outcome.rows for each in records if (each.family, each.platform) == key
    }
    plot = getattr(families.family(record.family), "plot", bars)
    draw(plot(found, record.title), plot_path(folder, record))
    if picture := overview(records):
        draw(picture, folder / "overview.png")


def main(args: Sequence[str], prog: str = PROG) -> int:
    """Measures the families."""
    arguments = parse(Arguments, args, prog=prog)
    folder = arguments.out or (QUICK_RESULTS if arguments.quick else RESULTS)
    names = arguments.only or families.FAMILIES
    if arguments.only == () and arguments.quick:
        names = [name for name in names if name != "limits"]  # every run begins with them anyway
    chosen: dict[Allocator, Sequence[str]] = dict.fromkeys(arguments.allocator, names)
    if not chosen:
        chosen["default"] = names
        tuned = [name for name in names if name in families.TUNED]
        if tuned and platform.libc_ver()[0] == "glibc" and not arguments.quick:
            chosen["tuned"] = tuned
    try:
        run(
            folder,
            quick=arguments.quick,
            platform=arguments.platform,
            names=chosen,
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
