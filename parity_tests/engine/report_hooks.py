"""Functions that receive every report of `compare`. Imports neither JAX nor torch."""

from collections.abc import Callable
from typing import Any

REPORT_HOOKS: list[Callable[[Any], object]] = []
"""Each takes a `Report`."""
