"""What the command lines share: arguments from dataclasses, faults as one line and exit code."""

import codecs
import contextlib
import difflib
import io
import os
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

T = TypeVar("T")


class CommandLineError(Exception):
    """A fault of the person's input, told in one line."""

    exit_code = 2


class NonFiniteError(CommandLineError):
    """A computation whose numbers are no longer finite."""

    exit_code = 1


class StoppedError(Exception):
    """The end, in good order, of a command that a signal stopped."""

    def __init__(self, by: signal.Signals, message: str) -> None:
        super().__init__(f"stopped by {by.name}: {message}")
        self.exit_code = 128 + by


def parse(config_type: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """The dataclass that the arguments describe; `--help` prints and exits.

    Raises:
        CommandLineError: an argument is unknown or has no such value.

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
    """The dataclass that some of the arguments describe.

    Raises:
        CommandLineError: one of them has no such value.

    """
    with _faults_in_one_line((), lambda: tyro.cli(config_type, prog=prog, args=["--help"])):
        return tyro.cli(
            config_type, prog=prog, args=args, return_unknown_args=True, add_help=False
        )[0]


@contextlib.contextmanager
def _faults_in_one_line(args: Sequence[str], print_help: Callable[[], object]) -> Iterator[None]:
    """Raise what tyro would print, or a dataclass refuses, as a CommandLineError.

    `args` are the arguments whose flags must be known. The help lists the flags and their values.
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
    """The message for the arguments that are flags and are not in the help; "" if all are."""
    rows = re.findall(r"^[│ ] ((?:-\w, )?--[\w.-]+(?:, --[\w.-]+)*)", options, re.MULTILINE)
    flags = [flag for row in rows for flag in row.split(", ")]
    names = {f"--{flag.rpartition('.')[2]}": flag for flag in flags}
    names |= {flag: flag for flag in flags}
    given = [arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")]
    unknown = [flag + did_you_mean(flag, names) for flag in given if flag not in flags]
    return f"Unrecognized options: {', '.join(unknown)}" if unknown else ""


def did_you_mean(name: str, names: Mapping[str, str]) -> str:
    """The hint at what the most similar of some names stands for; "" if none is similar."""
    similar = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {names[similar[0]]}?)" if similar else ""


def _with_value(message: str, options: str) -> str:
    """The message; if a value is none of a flag's choices, they are listed as in the help."""
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
    """The lines of tyro's reports and of its help, without frames."""
    return [line.strip("│╭╮╰╯ \n") for line in box.splitlines()]


def _message(box: str) -> str:
    """The text of the first section of tyro's report, framed or, in ASCII, ruled."""
    rows = _rows(box)
    rules = (i for i, row in enumerate(rows[2:], 2) if row and set(row) <= {"─", "-"})
    first = 2 if set(rows[1]) <= {"-"} else 1
    return " ".join(rows[first : next(rules, len(rows))])


def with_flag(message: str, of: str = "") -> str:
    """The message, with the flag in the place of the field, of a dataclass, that is refused."""

    def flag(found: re.Match[str]) -> str:
        return "--" + ".".join(filter(None, (of, *found.groups()))).replace("_", "-") + ": "

    return re.sub(r"^(?:Error parsing \w+(?:\.(\w+))?: )?([\w.]+): (?=expected )", flag, message)


def in_one_line(error: Exception) -> str:
    """The lines of an error's message, one after the other."""
    first, *others = str(error).splitlines() or [""]
    return f"{first} {'; '.join(map(str.strip, others))}".rstrip()


def command(module: str) -> str:
    """The line by which a person runs a module with this Python from this folder."""
    python = sys.executable
    if shutil.which("python") == python:
        python = "python"
    elif Path(python).is_relative_to(Path.cwd()):
        python = str(Path(python).relative_to(Path.cwd()))
    return f"{shlex.quote(python)} -m {module}"


PLAIN = {"—": "-", "–": "-", "−": "-", "≤": "<=", "≥": ">=", "×": "x", "→": "->", "µ": "u"}
"""Of characters that `unicodedata` does not spell out, and ASCII lacks."""


def print_anywhere() -> None:
    """Let characters that the output's encoding lacks be spelled with those that it has."""

    def spelled(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        characters = error.object[error.start : error.end]
        plain = (PLAIN.get(c) or unicodedata.normalize("NFKD", c) for c in characters)
        return "".join(c.encode("ascii", "ignore").decode() or "?" for c in plain), error.end

    codecs.register_error("spelled", spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")


@contextlib.contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turn a fault into `prog: error: …` on standard error and its exit code, 2 for the input's."""
    exit_code = CommandLineError.exit_code
    print_anywhere()
    try:
        yield
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
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


def run_command(
    main: Callable[[Sequence[str], str], int | None], args: Sequence[str], prog: str
) -> NoReturn:
    """Run a command, its faults as one line, and end with its exit code."""
    with one_line_errors(prog):
        raise SystemExit(main(args, prog))
