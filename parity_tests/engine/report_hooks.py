"""Functions that receive every report of `compare`. Imports neither JAX nor torch."""

from collections.abc import Callable
from typing import Any

Hook = Callable[[Any], object]
"""Takes a `Report`."""

REPORT_HOOKS: list[Hook] = []


def call_hooks(report: Any) -> None:
    """Pass a report to every hook."""
    for hook in REPORT_HOOKS:
        hook(report)
