"""`python -m tpu_compile`: compiles the layers for TPUs and checks the compiled programs."""

if __name__ == "__main__":
    from twinscan.command_line import run_module

    run_module("tpu_compile.__main__")

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from parity_tests.registry import CASES
from tpu_compile import libtpu
from tpu_compile.outcome import Outcome, compile_program, counts_as_text
from tpu_compile.programs import (
    Program,
    different_layers,
    kernel_programs,
    layer_programs,
    train_step,
)
from tpu_compile.sharded import sharded_programs
from train.run.config import PRESETS
from twinscan.command_line import CommandLineError, parse

PROG = "python -m tpu_compile"
CHIPS = ("v5e", "v6e")
SHAPES = ("1x1", "16x16")
SCHEMA = 1
"""The version of the JSON; `docs/design/tpu_compile.md` describes it."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile layers, kernels and a training step for TPUs, with products in full float32.

    Needs no TPU. Of each class of layers and each `method`, the first case of the registry is
    compiled twice: its forward pass alone, and with the gradients of its weights. The first
    language model with each kind of blocks is compiled once, with the gradients. The training step
    of the preset is compiled for one chip and for 256, that of 2 blocks of a model with a billion
    parameters for 256, and that of 2 blocks on a million tokens for 16. By default, all are
    compiled for a v5e, and the kernels also for a v6e, because nothing else depends on the kind of
    chip.
    """

    case: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Only the cases with this in their names ("train step" is one), of all in the registry; may be
    given several times."""
    chip: Annotated[tuple[Literal["v5e", "v6e"], ...], tyro.conf.UseAppendAction] = ()
    """Only this kind of chip; may be given several times."""
    preset: Literal[tuple(PRESETS)] = "lstm"  # pyright: ignore[reportInvalidTypeForm]
    """The preset of `python -m train` whose training step is compiled."""
    large: bool = False
    """Compile only the training steps of large models with all their blocks: a billion parameters,
    a million tokens, and hybrids of published sizes. Takes minutes."""
    rows: int | None = None
    """Rows of a batch on each chip; by default as many as the preset's batch has."""
    json: Path | None = None
    """Write the figures to this file, too (docs/design/tpu_compile.md)."""


def programs(arguments: Arguments) -> Iterator[Program]:
    """The programs that the arguments select."""

    def asked_for(name: str) -> bool:
        parts = arguments.case
        return not parts or any(part.lower() in name.lower() for part in parts)

    if arguments.large:
        yield from (
            each for each in sharded_programs(libtpu.topology, large=True) if asked_for(each.name)
        )
        return
    # The programs that take longest come first, so that no core is idle at the end.
    if not arguments.chip or "v5e" in arguments.chip:
        yield from (each for each in sharded_programs(libtpu.topology) if asked_for(each.name))
    # Only kernels depend on the kind of chip: all else has the same operations for each.
    for chip in arguments.chip or CHIPS[:1]:
        one, many = (libtpu.topology(f"{chip}:{shape}") for shape in SHAPES)
        if asked_for(f"train step of {arguments.preset}"):
            for topology in (one, many):
                yield train_step(arguments.preset, arguments.rows, topology)
        cases = [case for case in CASES.values() if "tpu" in case.platforms]
        for case in cases if arguments.case else different_layers(cases):
            if asked_for(case.name):
                yield from layer_programs(case, one)
    for chip in arguments.chip or CHIPS:
        one = libtpu.topology(f"{chip}:{SHAPES[0]}")
        yield from (kernel for kernel in kernel_programs(one) if asked_for(kernel.name))


def table(outcomes: Sequence[Outcome]) -> Table:
    """A table with a row for each program."""
    result = Table(
        title="compiled for TPUs, not run",
        caption="code, peak memory and operations (a loop's once) are those of one chip",
    )
    result.add_column("case", overflow="fold")
    for column in ("part", "chips"):
        result.add_column(column, no_wrap=True)
    for column in ("seconds", "code, KiB", "peak, KiB", "kflop"):
        result.add_column(column, no_wrap=True, justify="right")
    result.add_column("collectives")
    for column in ("precision", "verdict"):
        result.add_column(column, no_wrap=True)
    for outcome in outcomes:
        program = outcome.program
        result.add_row(
            program.name,
            program.part,
            program.topology,
            number(outcome.seconds, 1),
            number(outcome.code_bytes, 2**10),
            number(outcome.peak_bytes, 2**10),
            number(outcome.flops, 1e3),
            counts_as_text(outcome.collectives),
            counts_as_text(outcome.precisions),
            "[red]FAIL" if outcome.faults else "[green]pass",
        )
    return result


def number(value: float | None, unit: float) -> str:
    """A number in a unit, or a dash if there is none."""
    return "–" if value is None else f"{value / unit:,.1f}"


def main(args: Sequence[str], prog: str = PROG) -> int:
    """Compiles the programs and prints the table. The exit code is 1 if a program fails."""
    arguments = parse(Arguments, args, prog=prog)
    if arguments.rows is not None and arguments.rows < 1:
        raise CommandLineError(f"--rows: expected at least 1, got {arguments.rows}")
    # Check all arguments before the long compilation.
    versions = {"jax": version("jax"), "libtpu": libtpu.load()}
    asked_for = [*programs(arguments)]
    if not asked_for:
        raise CommandLineError(f"--case: no case has {' or '.join(arguments.case)} in its name")
    if arguments.json is not None:
        arguments.json.open("a").close()  # raises now if it cannot be written
    # Compile several programs at the same time.
    console = Console()
    if not console.is_terminal:
        console.width = 160
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(compile_program, asked_for)
        progress = Console(stderr=True)
        outcomes = [*track(compiled, "compiling", len(asked_for), console=progress, transient=True)]
    console.print(table(outcomes))
    for outcome in outcomes:
        for fault in outcome.faults:
            console.print(f"[red]FAIL[/] {escape(outcome.program.title)}: {escape(fault)}")
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()))
    if arguments.json is not None:
        record = {
            "schema": SCHEMA,
            "versions": versions,
            "programs": [outcome.to_dict() for outcome in outcomes],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(outcome.faults for outcome in outcomes) else 0
