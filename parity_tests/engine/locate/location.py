"""The result of `locate`: the calls that were compared, and the culprit."""

import dataclasses

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
        """A table up to the culprit."""
        names = [visit.torch_name or "(itself)" for visit in self.visits]
        width = max([len(name) + 2 for name in names] + [11])
        lines = [f"{self.dtype:{width}}{'input':>9}{'output':>9}  in the model"] if names else []
        for name, visit in zip(names, self.visits, strict=True):
            errors = "".join(f"{_short(e):>9}" for e in (visit.input_error, visit.output_error))
            remark = f"  {visit.remark}" if visit.remark else ""
            lines.append(f"{name:{width}}{errors}  {visit.jax_name or '(itself)'}{remark}")
        return "\n".join([*lines, *self.remarks, f"first to depart: {self.verdict}"])


def _short(error: float | None) -> str:
    if error is None:
        return "–"
    return "other" if not np.isfinite(error) else f"{error:.1e}"
