"""Handles signals while a command starts, when Python would print a traceback or nothing."""

import os
import signal


def exit_at_once(prog: str) -> None:
    """Makes Ctrl-C and SIGTERM end the process with one line, until other handlers are set."""

    def end(number: int, _: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
