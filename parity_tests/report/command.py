"""The command that measures the errors of every JAX layer and its torch twin against float64."""

import contextlib
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import torch

from jax_models.entry_points import broken_packages
from parity_tests.checks import is_caught
from parity_tests.engine.problem import DTYPES, PLATFORMS, available_platforms
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.registry import CASES, ENTRY_POINTS, MUTATIONS
from parity_tests.registry.mutation import Mutation
from parity_tests.report import pairs_command
from parity_tests.report.files import Files, progress
from parity_tests.report.over_time import errors_over_time
from parity_tests.report.precision import precision_errors
from parity_tests.report.record import MutationResult, Record, join_records, versions
from parity_tests.report.save import record_of
from twinscan.command_line import CommandLineError, parse

PROG = "python -m parity_tests"
UNFINISHED = 3
"""The exit code if `--minutes` ran out before everything was measured."""


@dataclasses.dataclass(frozen=True)
class Arguments(Files):
    """Runs every twin pair forward and backward and compares both with the torch twin in float64.

    A cell shows torch's error, JAX's error and their ratio, each relative to the result's size.
    With the name of a file, FILE.py, the pairs that it defines are compared instead.
    """

    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Where JAX runs; by default every platform that this machine has."""
    precision: bool = False
    """Also measure the error of matrix products in the default precision of a TPU or a GPU."""
    mutations: bool = False
    """Also plant faults in the cases; a check must catch each of them."""
    minutes: float | None = None
    """Stop after this many minutes, with exit code 3. The measurements so far are in the file of
    --json, and the same command continues from there."""

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes: expected a number above 0, got {self.minutes}")
        if self.minutes is not None and self.json is None:
            raise ValueError("minutes: expected with --json FILE, where the measurements are kept")


def cases_and_platforms(arguments: Arguments) -> tuple[list[str], list[str]]:
    """The cases and the platforms that the arguments ask for."""
    names = arguments.chosen_names(CASES, "no case has", broken_packages(ENTRY_POINTS))
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


Fields = dict[str, Any]
"""Fields of a `Record` that one measurement adds to."""
Work = Callable[[Record], Fields]
"""Makes one measurement, given the record of all earlier ones."""


def planned_work(
    arguments: Arguments, names: Sequence[str], platforms: Sequence[str]
) -> Iterator[tuple[str, Work]]:
    """The measurements that the arguments ask for in these cases on these platforms, by name."""
    places = [(name, p) for name in names for p in platforms if p in CASES[name].platforms]
    kinds: dict[str, Callable[[str, str, Record], Fields]] = {"errors": measure_errors}
    if arguments.precision:
        kinds["precision"] = measure_precision
    if arguments.json is not None:
        kinds["over time"] = measure_over_time
    for kind, work in kinds.items():
        for name, platform in places:
            yield f"{kind}: {name}, {platform}", partial(work, name, platform)
    for m in MUTATIONS if arguments.mutations else ():
        if m.case in names:
            yield f"planted: {m.name}: {m.case}", partial(plant_and_check, m)


def measure_errors(name: str, platform: str, so_far: Record) -> Fields:
    """How far both sides of a case are from the float64 twin."""
    # TPUs have no float64.
    dtypes = [dtype for dtype in DTYPES if platform != "tpu" or dtype != "float64"]
    record = record_of({name: measure_twin(CASES[name].problem(), dtypes, platform)})
    cases = {name: CASES[name].architecture}
    return {"measurements": record.measurements, "faults": record.faults, "cases": cases}


def measure_precision(name: str, platform: str, so_far: Record) -> Fields:
    """The errors of coarser matrix products in a case, unless the case has a fault."""
    if name in so_far.faulty or "cpu" not in CASES[name].platforms:
        return {}
    return {"precision": tuple(precision_errors(name, CASES[name].problem(), platform))}


def measure_over_time(name: str, platform: str, so_far: Record) -> Fields:
    """How the errors of a case grow along a sequence, unless the case has a fault."""
    if name in so_far.faulty:
        return {}
    return {"over_time": tuple(errors_over_time(CASES[name], platform))}


def plant_and_check(m: Mutation, so_far: Record) -> Fields:
    """Plants a fault, and tells whether it is caught."""
    return {"mutations": (MutationResult(m.name, m.case, m.kind, m.check, is_caught(m)),)}


def measure_all(arguments: Arguments, names: Sequence[str], platforms: Sequence[str]) -> Record:
    """Measures everything that the arguments ask for, or as much as the time allows.

    An unfinished record has the names of its measurements in `done`.
    """
    todo = dict(planned_work(arguments, names, platforms))
    record = earlier_record(arguments, names, platforms, todo)
    deadline = time.monotonic() + 60 * (arguments.minutes or float("inf"))
    longest = 0.0
    remaining = [name for name in todo if name not in record.done]
    for name in progress(remaining, "measuring"):
        start = time.monotonic()
        if longest and start + longest > deadline:
            return record
        with jax.enable_x64(True):
            fields = {"measurements": (), **todo[name](record)}
        record = join_records([record, Record({}, {}, **fields)])
        record = dataclasses.replace(record, done=(*record.done, name))
        if arguments.minutes is not None:
            arguments.write(record, ["--json"])
        longest = max(longest, time.monotonic() - start)
    return dataclasses.replace(record, done=())


def earlier_record(
    arguments: Arguments, names: Sequence[str], platforms: Sequence[str], todo: dict[str, Work]
) -> Record:
    """The record of an unfinished run of the same command on this machine, or a new one."""
    kinds = ", ".join(jax.devices(platform)[0].device_kind for platform in platforms)
    absent = "not on this machine" if arguments.platform is None else "not asked for"
    new = Record(
        versions() | {"device": kinds},
        {name: "ran" if name in platforms else absent for name in PLATFORMS},
        (),
        not_run={
            name: CASES[name].platforms
            for name in names
            if not {*platforms} & {*CASES[name].platforms}
        },
        date=f"{datetime.date.today()}",
    )
    if arguments.minutes is not None and arguments.json is not None:
        with contextlib.suppress(OSError, ValueError):  # there is no file, or it holds no record
            old = Record.from_json(arguments.json.read_bytes())
            places = ("versions", "platforms", "not_run")
            fits = all(getattr(old, name) == getattr(new, name) for name in places)
            if old.done and fits and {*old.done} <= todo.keys():
                return old
    return new


def main(args: Sequence[str], prog: str = PROG) -> int:
    """Measures, prints and writes the report, and returns the exit code.

    The exit code is 1 if a row fails or a planted fault is not caught, and `UNFINISHED` if the time
    ran out.
    """
    if any(Path(arg).suffix == ".py" for arg in args):
        return pairs_command.main(args, prog)
    if args and Path(args[0]).is_dir():
        raise CommandLineError(f"{args[0]}: expected a file of pairs, FILE.py, got a folder")
    arguments = parse(Arguments, args, prog=prog)
    names, platforms = cases_and_platforms(arguments)
    old = arguments.previous_record()
    torch.set_num_threads(1)  # the tensors are too small to share among threads
    record = measure_all(arguments, names, platforms)
    if record.done:
        total = len(dict(planned_work(arguments, names, platforms)))
        print(
            f"{prog}: stopped after {arguments.minutes:g} minutes: {len(record.done)} of {total} "
            f"measurements are in {arguments.json}; the same command continues",
            file=sys.stderr,
        )
        return UNFINISHED
    return arguments.print_and_write(record, old)
