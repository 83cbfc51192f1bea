"""The result of `locate`: the calls that were compared, and the culprit."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Visit:
    """A call of a torch submodule, its JAX counterpart, and how far JAX's arrays are off.

    In the backward pass, the input error is that of the gradients of the outputs, and the output
    error is that of the gradients of the inputs and weights. Errors are relative to the float64
    torch submodule, and None if nothing was compared.
    """

    torch_name: str
    jax_name: str
    input_error: float | None
    output_error: float | None
    departs: bool
    remark: str = ""
    number: int | None = None
    """The number of the call, from 1, if the submodule is called several times."""


@dataclasses.dataclass(frozen=True)
class Location:
    """The submodules that were compared, up to the first that departs, and the culprit."""

    dtype: str
    visits: tuple[Visit, ...]
    culprit: str | None
    """The torch name of the submodule whose own code departs; "" is the whole module. None if
    nothing departs, or if it is unknown which submodule does."""
    verdict: str
    """The last line of the report: the culprit, forward or backward, or why there is none."""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A table up to the culprit, in which successive calls that agree share a row."""
        rows = _rows(self.visits)
        names = [_name(row) for row in rows]
        width = max([len(name) + 2 for name in names] + [11])
        lines = [f"{self.dtype:{width}}{'input':>9}{'output':>9}  in the model"] if names else []
        for name, row in zip(names, rows, strict=True):
            errors = [v.input_error for v in row], [v.output_error for v in row]
            shown = "".join(f"{_short(_largest(each)):>9}" for each in errors)
            remark = f"  {row[0].remark}" if row[0].remark else ""
            lines.append(f"{name:{width}}{shown}  {row[0].jax_name or '(itself)'}{remark}")
        return "\n".join([*lines, *self.remarks, f"first to depart: {self.verdict}"])


def _rows(visits: Iterable[Visit]) -> list[list[Visit]]:
    """The visits by row: those of successive calls of a submodule that agree share one.

    Other submodules may be called in between, such as the other cells in a loop.
    """
    rows: list[list[Visit]] = []
    open_rows: dict[tuple[str, str, str], list[Visit]] = {}
    for visit in visits:
        key = visit.torch_name, visit.jax_name, visit.remark
        row = open_rows.get(key)
        if visit.number is None or visit.departs:
            rows.append([visit])
        elif row and row[-1].number is not None and abs(row[-1].number - visit.number) == 1:
            row.append(visit)
        else:
            open_rows[key] = [visit]
            rows.append(open_rows[key])
    return rows


def _name(row: Sequence[Visit]) -> str:
    """The name of the submodule of a row, and the numbers of its calls."""
    name, numbers = row[0].torch_name or "(itself)", sorted(v.number for v in row if v.number)
    if not numbers:
        return name
    first, last = numbers[0], numbers[-1]
    return f"{name}, call {first}" if first == last else f"{name}, calls {first} to {last}"


def _largest(errors: Iterable[float | None]) -> float | None:
    return max((error for error in errors if error is not None), default=None)


def _short(error: float | None) -> str:
    if error is None:
        return "–"
    return "other" if not np.isfinite(error) else f"{error:.1e}"
