"""Who hears of every report that `compare` makes. Imports neither JAX nor torch."""

from collections.abc import Callable
from typing import Any

Hook = Callable[[Any], object]
"""Takes a `Report`."""

REPORT_HOOKS: list[Hook] = []


def call_hooks(report: Any) -> None:
    """Hand a report to all who listen."""
    for hook in REPORT_HOOKS:
        hook(report)
