"""Ctrl-C while a command imports and prepares, where Python would print a traceback or lose it."""

import os
import signal


def exit_at_once(prog: str) -> None:
    """Let Ctrl-C end the process at once, with one line, until another handler is set."""

    def end(*_: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, end)
