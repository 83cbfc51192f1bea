"""Who hears of every report that `compare` makes. Imports neither JAX nor torch."""

from collections.abc import Callable
from typing import Any

Listener = Callable[[Any], object]
"""Takes a `Report`."""

LISTENERS: list[Listener] = []


def tell(report: Any) -> None:
    """Hand a report to all who listen."""
    for listener in LISTENERS:
        listener(report)
