"""`python -m benchmarks`: our layers and operators against every peer that is installed.

Prints a table a problem: compilation, run, ratio, share of the machine's limits, errors against
float64; and what was promised beside what was measured. Writes a JSON file and a plot for each
family, in place of those of its last run, and `README.md` over all of them.
"""

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks import families
from benchmarks.compare import Session
from benchmarks.families.limits import measure_limits
from benchmarks.report.page import write_page
from benchmarks.report.plot import bars, draw
from benchmarks.report.store import Record, path, versions, write
from benchmarks.report.table import line
from benchmarks.workers import Workers
from train.command_line import one_line_errors

PROG = "python -m benchmarks"
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build/bench-quick")
NOT_QUICK = ("limits", "memory")
"""Any run begins with the limits; programs that save memory compile for longer than they run."""


def run(names: list[str], folder: Path, *, quick: bool, platform: str | None) -> list[Record]:
    """Measure families, each into its files."""
    records = []
    console = Console(width=150)
    with Workers(platform) as workers:
        session = Session(workers, console, quick, measure_limits)
        assert session.limits is not None
        for name in names:
            console.rule(families.title(name))
            outcome = families.measure(name, session)
            record = Record(
                family=name,
                title=families.title(name),
                platform=session.platform,
                quick=quick,
                measured_with={"device": workers.device("jax").split(": ")[1], **versions()},
                limits=session.limits,
                outcome=outcome,
            )
            write(folder, record)
            plot = getattr(families.family(name), "plot", bars)
            draw(record, plot(outcome.rows, record.title), path(folder, record, "png"))
            write_page(folder, families.FAMILIES)
            records.append(record)
    for record in records:
        for check in record.outcome.checks:
            console.print(line(check))
    return records


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--only", nargs="+", choices=families.FAMILIES, help="these families")
    parser.add_argument(
        "--quick", action="store_true", help="most families, few shapes, few bursts"
    )
    parser.add_argument("--platform", help="of JAX: cpu, gpu or tpu; by default what it finds")
    parser.add_argument(
        "--out", type=Path, help=f"folder; {RESULTS.name}/, or {QUICK_RESULTS} with --quick"
    )
    options = parser.parse_args()
    folder = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    quick = [name for name in families.FAMILIES if name not in NOT_QUICK]
    names = options.only or (quick if options.quick else families.FAMILIES)
    run(names, folder, quick=options.quick, platform=options.platform)


if __name__ == "__main__":
    with one_line_errors(PROG):
        main()
