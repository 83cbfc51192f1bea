"""Time against the number of steps, 128 to 65,536.

One layer of each architecture runs forward and backward on one row of width 64. The exponent is
that of a power of T, fitted to the times from 2,048 steps on; Hyena's times are first divided by
log T. The exponent of a recurrence should be 1.
"""

import dataclasses
from collections import defaultdict

import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table

import jax_models
from benchmarks.compare import Session, compare
from benchmarks.outcome import Check, Outcome, Row
from benchmarks.problem import BOTH, OURS, Contenders, Function, Sequences
from benchmarks.report.plot import OPACITIES, RowsByAllocator
from benchmarks.report.table import milliseconds

FITTED_FROM = 2048
MAX_EXPONENT = 1.1
ARCHITECTURES = {
    "RNN": lambda features, time, rngs: jax_models.RNN(features, features, rngs=rngs),
    "LSTM": lambda features, time, rngs: jax_models.LSTM(features, features, rngs=rngs),
    "GRU": lambda features, time, rngs: jax_models.GRU(features, features, rngs=rngs),
    "HyperLSTM": lambda features, time, rngs: jax_models.HyperLSTM(
        features, features, features // 4, 8, rngs=rngs
    ),
    "Hawk": lambda features, time, rngs: jax_models.Hawk(
        features, parameterization="direct", rngs=rngs
    ),
    "RWKV": lambda features, time, rngs: jax_models.RWKVTimeMix(features, rngs=rngs),
    "Hyena": lambda features, time, rngs: jax_models.HyenaBlock(features, time, rngs=rngs),
    "attention": lambda features, time, rngs: jax_models.SelfAttentionBlock(
        features, 4, max_length=time, rngs=rngs
    ),
}
LONGEST = {"attention": 4096, "HyperLSTM": 16384}


@dataclasses.dataclass(frozen=True)
class Scaling(Sequences):
    """A layer of an architecture over a number of steps."""

    architecture: str
    parts = (BOTH,)
    rounds = 3

    @property
    def name(self) -> str:
        """The architecture and the number of steps."""
        return f"{self.architecture}, T {self.time}"


def problems(quick: bool) -> list[Scaling]:
    """128 to 65,536 steps for each architecture, or up to 4,096 in a quick run."""
    times = [128, 1024, 4096] if quick else [128, 512, 2048, 4096, 16384, 65536]
    return [
        Scaling(1, time, 64, name)
        for name in (("LSTM",) if quick else ARCHITECTURES)
        for time in times
        if time <= LONGEST.get(name, time)
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Scaling):
    """Our layer."""
    make = ARCHITECTURES[problem.architecture]
    layer = make(problem.features, problem.time, nnx.Rngs(0))
    graphdef, weights, rest = nnx.split(layer, nnx.Param, ...)
    x = np.random.default_rng(0).standard_normal(problem.shape, np.float32)

    def apply(params):
        x, weights = params
        return nnx.merge(graphdef, weights, rest)(x)[0]

    return Function((x, weights), apply, lambda gradients: {})


def measure(session: Session) -> Outcome:
    """Measures the times, and checks the exponents of all architectures except attention."""
    outcome = compare(session, __name__, contenders, problems(session.quick), shown=False)
    session.console.print(table(outcome.rows))
    for name, exponent in exponents(outcome.rows).items():
        if name != "attention":
            what = "exponent of T" + (", after log T" if name == "Hyena" else "")
            outcome.checks.append(Check(name, BOTH, what, exponent, MAX_EXPONENT))
    return outcome


def curves(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """The pairs (steps, milliseconds), by architecture."""
    result = defaultdict(list)
    for row in rows:
        name, time = row.problem.split(", T ")
        result[name].append((int(time), row.ms))
    return result


def table(rows: list[Row]) -> Table:
    """A table with a row for each architecture."""
    fitted = exponents(rows)
    times = sorted({time for curve in curves(rows).values() for time, _ in curve})
    result = Table("", *(f"T {time:,}" for time in times), "exponent")
    for name, curve in curves(rows).items():
        cells = (milliseconds(dict(curve)[time]) if time in dict(curve) else "–" for time in times)
        result.add_row(name, *cells, f"{fitted[name]:.2f}")
    return result


def exponents(rows: list[Row]) -> dict[str, float]:
    """The fitted exponents, by architecture."""
    result = {}
    for name, curve in curves(rows).items():
        time, ms = np.array([point for point in curve if point[0] >= FITTED_FROM]).T
        if name == "Hyena":
            ms = ms / np.log(time)
        result[name] = float(np.polyfit(np.log(time), np.log(ms), 1)[0])
    return result


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws a line for each architecture, with its exponent; pale for the second allocator."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for (allocator, rows), opacity in zip(found.items(), OPACITIES, strict=False):
        fitted = exponents(rows)
        for turn, (name, curve) in enumerate(curves(rows).items()):
            label = f"{name}, {allocator}: T^{fitted[name]:.2f}"
            label += " log T" if name == "Hyena" else ""
            line = {"color": f"C{turn}", "alpha": opacity, "label": label}
            axes.plot(*zip(*curve, strict=True), "o-", **line)
    axes.set(xscale="log", yscale="log", xlabel="T, steps", ylabel="ms, forward and backward")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=len(found))
    figure.suptitle(title)
    return figure
