"""Prints what a command is doing whenever it has printed nothing for a while."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SECONDS, LATER = 10.0, 60.0
"""Longest silence, in the first minutes of a command and afterwards."""
FIRST_MINUTES = 10
IMPORTING = "importing packages"
"""What every command does first."""
Activity = Callable[[], str]
"""Describes what a command is doing, such as the step that it has reached."""

_activities: list[tuple[Activity, float]] = []
"""What the command is doing and since when, from the outermost activity to the innermost one."""
_writers: list[Callable[[str], object]] = [lambda line: print(line, file=sys.stderr, flush=True)]
"""The functions that write a line, the last of which is used."""
_last_line = threading.Event()
"""Set when a line is printed, from which the silence is measured anew."""
_is_beating = threading.Lock()
"""Held while the thread of a `heartbeat` runs."""


@contextlib.contextmanager
def doing(activity: str | Activity) -> Iterator[None]:
    """Says what the command is doing in this context, for `heartbeat` to print."""
    describe = activity if callable(activity) else lambda: activity
    begun = (describe, time.monotonic())
    _activities.append(begun)
    try:
        yield
    finally:
        _activities.remove(begun)


@contextlib.contextmanager
def written_by(write: Callable[[str], object]) -> Iterator[None]:
    """Writes the lines of `heartbeat` with this function, instead of to stderr."""
    _writers.append(write)
    try:
        yield
    finally:
        _writers.remove(write)


def line_printed() -> None:
    """Notes that the command has printed a line."""
    _last_line.set()


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Prints a line about the innermost activity after each long silence, from another thread.

    Each command runs in a heartbeat. A heartbeat inside another one does nothing.
    """
    if not _is_beating.acquire(blocking=False):
        yield
        return
    is_over = threading.Event()

    def beat() -> None:
        begin = time.monotonic()
        while not is_over.is_set():
            is_late = time.monotonic() - begin > 60 * FIRST_MINUTES
            if _last_line.wait(LATER if is_late else SECONDS):
                _last_line.clear()
                continue
            for describe, since in _activities[-1:]:  # the other thread may just have ended it
                seconds = round(time.monotonic() - since)
                _writers[-1](describe() + (f" ({seconds} s so far)" if seconds else ""))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        line_printed()
        thread.join()
        _is_beating.release()
