"""The report of a comparison."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jax_models.options import Index, checked_options
from parity_tests.engine.bounds.tolerance import Error, worst
from parity_tests.engine.locate.location import Location
from parity_tests.engine.logits import LogitsError, logits_lines


@dataclasses.dataclass(frozen=True)
class Report:
    """How far the JAX port and the torch module are from the torch module in float64.

    `tensors` holds the errors by dtype, group and tensor, and the arrays of both sides if `compare`
    was called with `arrays=True`; `faults` are failures other than numerical errors; `notes` are
    remarks, such as those on parts that were not compared.
    """

    tensors: dict[str, dict[str, dict[str, Error]]]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    location: Location | None = None
    """The submodule where a failing pair first departs, if that was requested."""
    logits: dict[str, dict[str, LogitsError]] = dataclasses.field(default_factory=dict)
    """The errors of logits by dtype and side, if they were requested."""
    twin: str = ""
    """The class of the torch module."""
    platform: str = "cpu"
    """The platform on which JAX ran."""
    sides: tuple[str, str] = ("torch", "JAX")
    """The names of the reference and of the side that is measured."""
    constant_moves: tuple[np.ndarray, ...] = dataclasses.field(
        default=(), repr=False, compare=False
    )
    """The relative changes of the reference's rounded constants with which float64 was compared."""

    @functools.cached_property
    def errors(self) -> dict[str, dict[str, Error]]:
        """By dtype and group: the error that is the largest relative to its bound."""
        return {
            dtype: {group: worst(named) for group, named in groups.items()}
            for dtype, groups in self.tensors.items()
        }

    @property
    def failures(self) -> Iterator[tuple[str, str, Error]]:
        """The dtype, group and error of each group whose error is above its bound."""
        for dtype, groups in self.errors.items():
            yield from ((dtype, group, e) for group, e in groups.items() if not e.passed)

    @property
    def passed(self) -> bool:
        """True if something was compared and all of it agrees."""
        return bool(self.errors) and not self.faults and not any(self.failures)

    def __str__(self) -> str:
        """A table of the errors, the faults and notes, and where the pair first departs."""
        lines = [*self._rows(failing=False), *self._faults, *(f"note: {n}" for n in self.notes)]
        lines += logits_lines(self.logits)
        lines += [] if self.location is None else [f"\n{self.location}"]
        return "\n".join(lines)

    @property
    def short(self) -> str:
        """The rows that fail, the faults, and where the pair first departs."""
        lines = [*(self._rows(failing=True) if any(self.failures) else ()), *self._faults]
        lines += [] if self.location is None else [f"\n{self.location}"]
        return "\n".join(lines)

    @checked_options
    def table(self, worst: Index = 20) -> str:
        """A table of the `worst` tensors, whose errors are the largest relative to their bounds."""
        errors = [
            (dtype, group, error)
            for dtype, groups in self.tensors.items()
            for group, named in groups.items()
            for error in named.values()
        ]
        errors.sort(key=lambda row: row[2].share, reverse=True)
        rows = (f"{_row(*row)}{row[2].share:9.3g}  {row[2].tensor}" for row in errors[:worst])
        return "\n".join([f"{self._head}{'/ bound':>9}", *rows])

    def _rows(self, *, failing: bool) -> Iterator[str]:
        yield self._head
        for dtype, groups in self.errors.items():
            for group, e in groups.items():
                if not (failing and e.passed):
                    verdict = "pass" if e.passed else f"{e.verdict}, worst in {e.tensor}"
                    unstable = ", unstable reference" if e.unstable else ""
                    yield f"{_row(dtype, group, e)}  {verdict}{unstable}"

    @property
    def _head(self) -> str:
        reference, model = self.sides
        return f"{'':9}{'':18}{reference:>9}{model:>9}{'ratio':>9}{'bound':>9}"

    @property
    def _faults(self) -> list[str]:
        return [f"FAIL: {fault}" for fault in self.faults]


def _row(dtype: str, group: str, e: Error) -> str:
    ratio = "–" if e.ratio is None else f"{e.ratio:.3g}"
    return f"{dtype:9}{group:18}{e.torch:9.1e}{e.jax:9.1e}{ratio:>9}{e.bound:9.1e}"
