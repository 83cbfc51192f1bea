"""The result of a comparison of two trainings."""

import dataclasses

from parity_tests.engine.bounds.tolerance import Error


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The errors of the loss, the weights and the statistics after each step, by dtype."""

    steps: dict[str, tuple[Error, ...]]
    gradient_norms: dict[str, tuple[tuple[float, float], ...]]
    """For each step, the norm of torch's gradient in float64 and that of JAX's gradient."""
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Parts that were not compared, and why."""
    departures: dict[str, str] = dataclasses.field(default_factory=dict)
    """By dtype, a comparison of loss, gradients and moments at the first step that differs."""

    @property
    def parting(self) -> dict[str, tuple[int, Error]]:
        """By dtype: the first step, counted from 1, after which the sides differ by too much."""
        return {
            dtype: failures[0]
            for dtype, errors in self.steps.items()
            if (failures := [(i, e) for i, e in enumerate(errors, 1) if not e.passed])
        }

    @property
    def passed(self) -> bool:
        """True if both sides agree after every step, without faults."""
        compared = bool(self.steps) and all(self.steps.values())
        return compared and not self.faults and not self.parting

    def __str__(self) -> str:
        """The errors after steps 1, 2, 4, … and the last, and the step at which the sides part."""
        lines = [f"{'':9}{'step':>6}{'torch':>9}{'JAX':>9}{'bound':>9}{'gradient norms':>22}"]
        for dtype, errors in self.steps.items():
            shown = {2**i for i in range(len(errors).bit_length())} | {len(errors)}
            norms = (f"{a:11.3g}{b:11.3g}" for a, b in self.gradient_norms[dtype])
            lines += [
                f"{dtype:9}{step:6}{e.torch:9.1e}{e.jax:9.1e}{e.bound:9.1e}{both_norms}"
                for step, (e, both_norms) in enumerate(zip(errors, norms, strict=True), 1)
                if step in shown
            ]
        for dtype, (step, e) in self.parting.items():
            lines += [
                f"FAIL: {dtype}: they part at step {step} by {e.jax:.1e}, most in {e.tensor}; "
                f"rounding explains {e.bound:.1e}",
                f"      at that step {self.departures[dtype]}",
            ]
        lines += [f"FAIL: {fault}" for fault in self.faults]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
