"""`python -m benchmarks.forms`: which form of loop is fastest for each cell, batch and width.

"hoisted" multiplies all inputs before the loop, "joined" the input with the state in each step.
Each is measured forward, since under differentiation all loops are hoisted: what to judge the rule
of `method="auto"` in `jax_models.ops.recurrence` by. Written to `results/forms-<platform>.json`.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import RESULTS, Platform
from benchmarks.compare import Session, compare
from benchmarks.environment import Allocator
from benchmarks.families.gated.problem import Gated
from benchmarks.outcome import TIE, Outcome
from benchmarks.problem import FORWARD, Contenders, Function
from benchmarks.report.store import versions
from benchmarks.report.table import milliseconds
from benchmarks.workers import Unsuitable, Workers
from jax_models import ops
from twinscan.command_line import CommandLineError, parse, run_command

PROG, MODULE = "python -m benchmarks.forms", "benchmarks.forms"
FORMS = ("hoisted", "joined")
TIME = 64
STATES = {"LSTM": ops.LSTMState, "GRU": ops.GRUState, "RNN": ops.RNNState}

contenders = Contenders()


@dataclasses.dataclass(frozen=True)
class Forward(Gated):
    """A layer's forward pass."""

    parts = (FORWARD,)


def in_form(problem: Gated, form: str) -> Function:
    """The operator, told its form."""
    x, w_ih, w_hh, b_ih, b_hh = problem.arrays().values()
    state_type = STATES[problem.cell]
    run = getattr(ops, problem.cell.lower())
    names = ("kernel_ih", "kernel_hh", "bias_ih", "bias_hh")

    def apply(params):
        x, weights = params
        zeros = (jnp.zeros((problem.batch, problem.hidden)) for _ in state_type._fields)
        return run(x, state_type(*zeros), **weights, method=form)[0]

    weights = dict(zip(names, (w_ih.T, w_hh.T, b_ih, b_hh), strict=True))
    return Function((x, weights), apply)


for form in FORMS:
    contenders.jax(form)(lambda problem, form=form: in_form(problem, form))


def choices(outcome: Outcome, problems: Sequence[Gated]) -> list[dict]:
    """The times of the forms that there are, and which is fastest: None for a tie."""
    result = []
    for problem in problems:
        rows = [row for row in outcome.rows if row.problem == problem.name]
        ms = {row.name: row.ms for row in rows}
        if not ms:
            continue
        fast, *slow = sorted(ms, key=ms.__getitem__)
        tie = any(ms[form] <= (1 + TIE) * ms[fast] for form in slow)
        sizes = {"cell": problem.cell, "batch": problem.batch, "hidden": problem.hidden}
        result.append({**sizes, "ms": ms, "fastest": None if tie else fast})
    return result


def table(chosen: list[dict]) -> Table:
    """A line a shape."""
    result = Table("", *FORMS, "fastest")
    for choice in chosen:
        name = f"{choice['cell']} B{choice['batch']} H{choice['hidden']}"
        times = (choice["ms"].get(form) for form in FORMS)
        cells = ("–" if ms is None else milliseconds(ms) for ms in times)
        result.add_row(name, *cells, choice["fastest"] or "tie")
    return result


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure both forms of loop, for each cell, batch and width."""

    cell: tuple[Literal["LSTM", "GRU", "RNN"], ...] = ("LSTM", "GRU", "RNN")
    batch: tuple[int, ...] = (1, 4, 8, 10, 16, 30, 64, 100)
    hidden: tuple[int, ...] = (64, 256, 1024)
    allocator: Allocator = "default"
    """`default` is what users have, `tuned` keeps the memory that is freed."""
    platform: Platform | None = None
    """Of JAX; by default what it finds."""
    out: Path = RESULTS
    """The folder of the results."""


def main(args: Sequence[str], prog: str = PROG) -> None:
    """Measure, print, and write."""
    arguments = parse(Arguments, args, prog=prog)
    problems = [
        Forward(cell, TIME, batch, hidden)
        for cell in arguments.cell
        for batch in arguments.batch
        for hidden in arguments.hidden
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    try:
        with Workers(arguments.platform, arguments.allocator) as workers:
            session = Session(workers, console)
            outcome = compare(session, MODULE, contenders, problems)
            environments = workers.environments()
    except Unsuitable as error:
        raise CommandLineError(str(error)) from None
    chosen = choices(outcome, problems)
    record = {
        "measured_with": versions(),
        "environments": {name: dataclasses.asdict(each) for name, each in environments.items()},
        "time": TIME,
        "choices": chosen,
    }
    file = arguments.out / f"forms-{session.platform}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(chosen))


if __name__ == "__main__":
    run_command(main, sys.argv[1:], PROG)
