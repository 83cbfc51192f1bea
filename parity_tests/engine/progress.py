"""A line that says what runs."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

Say = Callable[[str], None]


@contextlib.contextmanager
def progress(what: str) -> Iterator[Say]:
    """A line on a terminal's stderr that says what runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")
