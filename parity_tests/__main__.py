"""`python -m parity_tests`: how far every JAX layer and its torch twin are from float64."""

import dataclasses
import importlib.metadata
import platform as machine
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from parity_tests.cases import CASES, DTYPES
from parity_tests.measure import GROUPS, measure
from parity_tests.problem import problem
from parity_tests.record import Measurement, Record, moved
from parity_tests.tolerance import FLOAT64, FLOOR_ULPS, Error, K
from train.command_line import CommandLineError, one_line_errors, parse

PROG = "python -m parity_tests"
PLATFORMS = ("cpu", "gpu", "tpu")


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
    compare: Path | None = None
    """Say what has moved since another run wrote this file by --json."""


def available_platforms() -> list[str]:
    """The platforms of this machine."""

    def has(platform: str) -> bool:
        try:
            return bool(jax.devices(platform))
        except RuntimeError:
            return False

    return [platform for platform in PLATFORMS if has(platform)]


def choose(arguments: Arguments) -> tuple[list[str], list[str]]:
    """The cases and the platforms that the arguments ask for."""
    names = [
        name
        for name in CASES
        if not arguments.case or any(part.lower() in name.lower() for part in arguments.case)
    ]
    if not names:
        raise CommandLineError(f"--case: no case has {' or '.join(arguments.case)} in its name")
    platforms = available_platforms()
    if arguments.platform is None:
        return names, platforms
    if arguments.platform not in platforms:
        raise CommandLineError(
            f"--platform: this machine has no {arguments.platform}, only {', '.join(platforms)}"
        )
    return names, [arguments.platform]


def measurements(
    names: Iterable[str], platforms: Iterable[str]
) -> tuple[list[Measurement], list[str]]:
    """Measure the cases: the errors, and what no error can say.

    TPUs have no float64 of their own and are measured without.
    """
    measured, faults = [], []
    for name in names:
        for platform in platforms:
            dtypes = [dtype for dtype in DTYPES if platform != "tpu" or dtype != "float64"]
            report = measure(problem(CASES[name]), dtypes, platform)
            faults += [f"{name}, {platform}: {fault}" for fault in report.faults]
            measured += [
                Measurement(name, platform, dtype, group, error)
                for dtype, groups in report.errors.items()
                for group, error in groups.items()
            ]
    return measured, faults


def table(measured: list[Measurement], width: int) -> Table:
    """A row a case, platform and dtype; of two lines where the width is small."""
    rows: dict[tuple[str, str, str], dict[str, Error]] = {}
    for m in measured:
        rows.setdefault((m.case, m.platform, m.dtype), {})[m.group] = m.error
    result = Table(
        title="errors against the float64 torch twin: torch, JAX, ratio",
        caption=f"float64: JAX ≤ {FLOAT64:.0e}; "
        f"else JAX ≤ {K:.0f} × torch or {K * FLOOR_ULPS:.0f} ulp, the larger",
    )
    result.add_column("case", overflow="fold")
    for column in ("on", "dtype", *GROUPS, "verdict"):
        result.add_column(column, no_wrap=True)
    separator = " " if width >= 150 else "\n           "
    for (case, platform, dtype), groups in rows.items():
        cells = [cell(groups.get(group), separator) for group in GROUPS]
        result.add_row(case, platform, dtype, *cells, verdict(groups.values()))
    return result


def cell(error: Error | None, separator: str) -> str:
    """A group's errors, torch's and JAX's, and their ratio."""
    if error is None:
        return "–"
    ratio = "    –" if error.ratio is None else f"{error.ratio:5.2f}"
    color = "" if error.passed else "[red]"
    return f"{color}{error.torch:.1e} {error.jax:.1e}{separator}{ratio}"


def verdict(errors: Iterable[Error]) -> str:
    """What the errors of a row say together."""
    errors = list(errors)
    passed = "[green]pass" if all(e.passed for e in errors) else "[red]FAIL"
    return f"{passed}, unstable reference" if any(e.unstable for e in errors) else passed


def runs(arguments: Arguments, platforms: Sequence[str]) -> dict[str, str]:
    """What became of each platform."""
    absent = "not on this machine" if arguments.platform is None else "not asked for"
    return {name: "ran" if name in platforms else absent for name in PLATFORMS}


def versions() -> dict[str, str]:
    """What was measured with."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
    return {"python": machine.python_version(), **packages, "torch": torch.__version__}


def previous(path: Path | None) -> Record | None:
    """The record that --compare names."""
    if path is None:
        return None
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(f"--compare: {path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandLineError(f"--compare: {path}: {error}") from error


def main(args: Sequence[str]) -> int:
    """Print the table; 1 if a row fails."""
    arguments = parse(Arguments, args, prog=PROG)
    names, platforms = choose(arguments)
    old = previous(arguments.compare)
    if arguments.json is not None:
        arguments.json.open("a").close()  # fails before the work, not after it
    console = Console()
    if not console.is_terminal:
        console.width = 160
    with jax.enable_x64(True):
        measured, faults = measurements(
            track(names, "measuring", console=Console(stderr=True), transient=True), platforms
        )
    record = Record(versions(), runs(arguments, platforms), tuple(measured), tuple(faults))
    console.print(table(measured, console.width))
    for m in measured:
        if not m.error.passed:
            console.print(f"[red]FAIL[/] {m.key}: worst in {m.error.worst}")
    for fault in faults:
        console.print(f"[red]FAIL[/] {fault}")
    for platform, state in record.platforms.items():
        console.print(f"{platform}: {state}")
    if old is not None:
        lines = moved(old, record)
        console.print(
            f"since {arguments.compare}: {len(lines) or 'nothing'} moved", *lines, sep="\n"
        )
    if arguments.json is not None:
        arguments.json.write_text(record.to_json(), encoding="utf-8")
    return 0 if record.passed else 1


if __name__ == "__main__":
    with one_line_errors(PROG):
        raise SystemExit(main(sys.argv[1:]))
