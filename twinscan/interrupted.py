"""Ends a command without a traceback at a signal while it starts, and at a closed pipe."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


def exit_at_once(prog: str) -> None:
    """Makes Ctrl-C and SIGTERM end the process with one line, until other handlers are set."""

    def end(number: int, _: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)


@contextlib.contextmanager
def until_the_pipe_is_closed() -> Iterator[None]:
    """Ends the command if its reader, such as `head`, has closed the pipe of the output.

    The output is flushed here, because Python would print a traceback if it failed to do so while
    it exits.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
