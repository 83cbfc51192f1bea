"""A line on the terminal that says what runs."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

Say = Callable[[str], None]
"""Receives a few words about what runs next."""


def silent(text: str) -> None:
    """Says nothing."""


@contextlib.contextmanager
def progress(title: str) -> Iterator[Say]:
    """A context that shows a line on a terminal's stderr, and yields a function that updates it.

    The line begins with the title. Without a terminal, nothing is shown.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    with console.status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")
