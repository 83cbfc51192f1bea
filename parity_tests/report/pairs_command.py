"""The command on a file that defines pairs: `twinscan parity FILE.py`."""

import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import tyro

from parity_tests.engine.compare import Pair
from parity_tests.engine.problem import in_one_line
from parity_tests.engine.verdict.report import Report
from parity_tests.report.files import Files, progress
from parity_tests.report.save import record_of
from twinscan.command_line import CommandLineError, parse
from twinscan.heartbeat import doing

EXPECTED = "expected a parity_tests.Pair at module level, or a function `-> Pair` without arguments"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Files):
    """Compares the pairs that FILE.py defines.

    A pair is a `parity_tests.Pair` at module level, or the result of a function without arguments
    that is annotated with `-> Pair`. Names that begin with an underscore are ignored.
    """

    file: tyro.conf.Positional[Path]
    """The file."""
    dtypes: tuple[Literal["float64", "float32", "bfloat16"], ...] = ()
    """The dtypes to compare in, instead of the pairs' own."""
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Where JAX runs, instead of on the pairs' own platform."""
    locate: bool = False
    """Say where failing pairs first depart."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that override a pair's own."""
        given = {"dtypes": self.dtypes, "platform": self.platform, "locate": self.locate}
        return {name: value for name, value in given.items() if value}


def load(file: Path) -> ModuleType:
    """Imports a Python file as a module.

    Raises:
        OSError: the file cannot be read.
        CommandLineError: its import raises an exception.

    """
    file.open("rb").close()
    spec = importlib.util.spec_from_file_location(f"pairs_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CommandLineError(f"{file}: {describe_error(error, file)}") from error
    return module


def describe_error(error: BaseException, file: Path) -> str:
    """An exception in one line: its type, its message and, if known, its line in the file."""
    message = in_one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
    if isinstance(error, SyntaxError):
        message, numbers = f"{type(error).__name__}: {error.msg}", [error.lineno]
    return f"{message} (line {numbers[-1]})" if numbers else message


def pairs_of(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """For each name of a pair in a module, a function that returns the pair."""
    found: dict[str, Callable[[], Any]] = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, Pair):
            found[name] = lambda value=value: value
        elif inspect.isfunction(value) and _makes_a_pair(value):
            found[name] = value
    return found


def _makes_a_pair(function: Callable[..., Any]) -> bool:
    signature = inspect.signature(function)
    returned = signature.return_annotation  # a string under `from __future__ import annotations`
    needed = (p for p in signature.parameters.values() if p.default is p.empty)
    return (returned is Pair or str(returned).rpartition(".")[2] == "Pair") and not any(needed)


def compare_pair(make: Callable[[], Any], arguments: Arguments) -> Report:
    """The report of a pair. An exception while the pair is made or compared becomes a fault."""
    try:
        pair = make()
        if not isinstance(pair, Pair):
            raise TypeError(f"expected a parity_tests.Pair, got {pair!r:.40}")
        return pair.compare(**arguments.options)
    except Exception as error:
        return Report(
            {}, (describe_error(error, arguments.file),), platform=arguments.platform or "cpu"
        )


def main(args: Sequence[str], prog: str) -> int:
    """Compares the pairs, prints a row for each pair and dtype, and returns the exit code."""
    arguments = parse(Arguments, args, prog=prog)
    old = arguments.previous_record()
    with doing(f"importing {arguments.file}"):
        makers = pairs_of(load(arguments.file))
    if not makers:
        raise CommandLineError(f"{arguments.file}: {EXPECTED}")
    names = arguments.chosen_names(makers, f"{arguments.file} has no pair with")
    reports = {name: compare_pair(makers[name], arguments) for name in progress(names, "comparing")}
    return arguments.print_and_write(record_of(reports), old)
