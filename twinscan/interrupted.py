"""Handles signals while a command starts, when Python would print a traceback or nothing."""

import os
import signal


def exit_at_once(prog: str) -> None:
    """Makes Ctrl-C and SIGTERM end the process at once, until the command installs its handlers."""

    def end(number: int, _: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
