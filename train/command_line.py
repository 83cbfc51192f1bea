"""What the command lines share: arguments from dataclasses, faults as one line and exit code 2."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import tyro

T = TypeVar("T")


class CommandLineError(Exception):
    """A fault of the person's input, told in one line."""


def parse(config_type: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """The dataclass that the arguments describe; `--help` prints and exits.

    Raises:
        CommandLineError: an argument is unknown or has no such value.

    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                config_type,
                prog=prog,
                args=args,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise CommandLineError(_message(errors.getvalue())) from None


def _message(box: str) -> str:
    """The text of the first section of tyro's framed report."""
    rows = [line.strip("│╭╮╰╯ \n") for line in box.splitlines()]
    section = []
    for row in rows[1:]:
        if set(row) <= {"─"}:
            break
        section.append(row)
    return " ".join(section)


def seed_faults(seed: int) -> Iterator[str]:
    """What is wrong with `--seed`."""
    if not 0 <= seed < 2**31:
        yield f"--seed: expected 0 … 2³¹ − 1, got {seed}"


@contextlib.contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turn a fault of the input into `prog: error: …` on standard error and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except CommandLineError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    else:
        return
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
