"""Shared parts of the command lines: arguments as dataclasses, and errors in one line."""

import codecs
import contextlib
import difflib
import importlib
import io
import re
import shlex
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import jax
import tyro

import jax_models
from jax_models.entry_points import DuplicateNameError
from twinscan.heartbeat import IMPORTING, doing, heartbeat
from twinscan.interrupted import until_the_pipe_is_closed

T = TypeVar("T")


class CommandLineError(Exception):
    """A wrong input, which is reported in one line."""

    exit_code = 2


class NonFiniteError(CommandLineError):
    """A computation whose results are not finite."""

    exit_code = 1


class StoppedError(Exception):
    """A command that a signal stopped after it saved its results."""

    def __init__(self, by: signal.Signals, message: str) -> None:
        super().__init__(f"stopped by {by.name}: {message}")
        self.exit_code = 128 + by


def parse(config_type: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Parses the arguments into a dataclass. `--help` prints the options and exits.

    Raises:
        CommandLineError: an argument is unknown, or its value is wrong.

    """

    def run(args: Sequence[str]) -> T:
        return tyro.cli(
            config_type,
            prog=prog,
            args=args,
            default=tyro.MISSING_NONPROP if default is None else default,
            config=(tyro.conf.AvoidSubcommands,),
        )

    with _faults_in_one_line(args, lambda: run(["--help"])):
        return run(args)


def parse_known(config_type: type[T], args: Sequence[str], *, prog: str) -> T:
    """Parses the arguments that are fields of the dataclass, and ignores the others.

    Raises:
        CommandLineError: a value is wrong.

    """
    with _faults_in_one_line((), lambda: tyro.cli(config_type, prog=prog, args=["--help"])):
        return tyro.cli(
            config_type, prog=prog, args=args, return_unknown_args=True, add_help=False
        )[0]


@contextlib.contextmanager
def _faults_in_one_line(args: Sequence[str], print_help: Callable[[], object]) -> Iterator[None]:
    """Turns the errors of tyro and of the dataclasses into a CommandLineError.

    `args` are the arguments whose flags must be known. `print_help` lists all flags and values.
    """
    errors, options = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        with contextlib.redirect_stdout(options), contextlib.suppress(SystemExit):
            print_help()
        unknown = _unknown_flags(args, options.getvalue())
        message = unknown or _with_value(_message(errors.getvalue()), options.getvalue())
        raise CommandLineError(with_flag(message)) from None
    except ValueError as error:
        raise CommandLineError(with_flag(str(error))) from None


def _unknown_flags(args: Sequence[str], options: str) -> str:
    """An error about the flags that the help does not list; "" if it lists all of them."""
    rows = re.findall(r"^[│ ] ((?:-\w, )?--[\w.-]+(?:, --[\w.-]+)*)", options, re.MULTILINE)
    flags = [flag for row in rows for flag in row.split(", ")]
    names = {f"--{flag.rpartition('.')[2]}": flag for flag in flags}
    names |= {flag: flag for flag in flags}
    given = [arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")]
    unknown = [flag + did_you_mean(flag, names) for flag in given if flag not in flags]
    return f"Unrecognized options: {', '.join(unknown)}" if unknown else ""


def did_you_mean(name: str, names: Mapping[str, str]) -> str:
    """A hint at the most similar name; "" if none is similar. `names` maps to printed forms."""
    similar = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {names[similar[0]]}?)" if similar else ""


def _with_value(message: str, options: str) -> str:
    """Rewrites a message about a value that is not one of a flag's choices, to list the choices."""
    found = re.match(r"invalid choice '(.*)' for argument '(.*?)'", message)
    if found is None:
        return message
    value, flag = found.groups()
    text = "".join(_rows(options))
    [choices] = re.findall(rf"{re.escape(flag)} [^{{]*{{(.*?)}}", text)[:1]
    names = {name: name for name in choices.split(",") if name != "None"}
    hint = did_you_mean(value, names)
    return f"{flag}: expected one of {', '.join(names)}, got {value}{hint}"


def _rows(box: str) -> list[str]:
    """The lines of a report or help of tyro, without frames."""
    return [line.strip("│╭╮╰╯ \n") for line in box.splitlines()]


def _message(box: str) -> str:
    """The text of the first section of tyro's report, which has a frame, or only rules in ASCII."""
    rows = _rows(box)
    rules = (i for i, row in enumerate(rows[2:], 2) if row and set(row) <= {"─", "-"})
    first = 2 if set(rows[1]) <= {"-"} else 1
    return " ".join(rows[first : next(rules, len(rows))])


def with_flag(message: str, of: str = "") -> str:
    """Replaces the name of a dataclass field at the start of a message by its flag."""

    def flag(found: re.Match[str]) -> str:
        return "--" + ".".join(filter(None, (of, *found.groups()))).replace("_", "-") + ": "

    return re.sub(r"^(?:Error parsing \w+(?:\.(\w+))?: )?([\w.]+): (?=expected )", flag, message)


def error_in_one_line(error: Exception) -> str:
    """The lines of an error's message, joined."""
    first, *others = str(error).splitlines() or [""]
    return f"{first} {'; '.join(map(str.strip, others))}".rstrip()


def command_line_of_twinscan() -> str:
    """The command `twinscan` of this Python, as the user can type it in this folder."""
    program, module = Path(sys.executable).with_name("twinscan"), ""
    if not program.exists():
        program, module = Path(sys.executable), " -m twinscan"
    if shutil.which(program.name) == str(program):
        return f"{program.name}{module}"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return f"{shlex.quote(str(program))}{module}"


ASCII_SPELLINGS = {
    "—": "-",
    "–": "-",
    "−": "-",
    "≤": "<=",
    "≥": ">=",
    "×": "x",
    "→": "->",
    "µ": "u",
}
"""ASCII spellings of characters that `unicodedata` cannot decompose."""


def prepare_output() -> None:
    """Makes the output appear line by line, also in a pipe or a file.

    Characters that the encoding of the output lacks are replaced by similar ASCII characters.
    """

    def spelled(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        characters = error.object[error.start : error.end]
        plain = (ASCII_SPELLINGS.get(c) or unicodedata.normalize("NFKD", c) for c in characters)
        return "".join(c.encode("ascii", "ignore").decode() or "?" for c in plain), error.end

    codecs.register_error("spelled", spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled", line_buffering=True)


@contextlib.contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turns an error into the line `prog: error: …` and an exit code, 2 for wrong input."""
    exit_code = CommandLineError.exit_code
    prepare_output()
    try:
        with until_the_pipe_is_closed():
            yield
    except CommandLineError as error:
        message, exit_code = str(error), error.exit_code
    except StoppedError as stop:
        print(f"{prog}: {stop}", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message, exit_code = (
            "out of memory: a batch, a window or a model of this size is too large",
            1,
        )
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    else:
        return
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(exit_code)


def run_module(module: str, args: Sequence[str] | None = None, prog: str | None = None) -> NoReturn:
    """Imports the module of a command, and runs its `main` as `run_command` does.

    By default, the command is `python -m` with the module, and gets the arguments of the process.
    If the import fails because two packages define the same name, the error is also one line.
    """
    prog = prog or f"python -m {module.removesuffix('.__main__')}"
    with heartbeat():
        with one_line_errors(prog), doing(IMPORTING):
            if module.startswith("train."):
                jax_models.tune_allocator()
            try:
                main = importlib.import_module(module).main
            except DuplicateNameError as error:
                raise CommandLineError(str(error)) from None
        run_command(main, sys.argv[1:] if args is None else args, prog)


def run_command(
    main: Callable[[Sequence[str], str], int | None], args: Sequence[str], prog: str
) -> NoReturn:
    """Runs a command, with its errors in one line, and exits with its exit code."""
    with one_line_errors(prog):
        try:
            exit_code = main(args, prog)
        except SystemExit as stop:  # such as that of --help
            exit_code = stop.code
    raise SystemExit(exit_code)
