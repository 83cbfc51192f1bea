"""The functions that receive every report of `compare`. This file imports neither JAX nor torch."""

from collections.abc import Callable
from typing import Any

REPORT_HOOKS: list[Callable[[Any], object]] = []
"""Each takes a `Report`."""
