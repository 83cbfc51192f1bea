"""Draws the loss curve of a run."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.process.files import whole

Records = Sequence[dict[str, Any]]
LONG_RUN = 20
"""A run with a line of at least this many points counts as long."""


def draw_curve(training: Records, evaluations: Records, path: Path, caption: str = "") -> None:
    """Draws the losses over the steps as a PNG, which is written completely or not at all.

    If a line has at least `LONG_RUN` points, the vertical axis fits the losses of the last nine
    tenths of the steps and cuts off higher losses before them, which the caption then says. The
    title is the name of the run's folder.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = {
        "training steps, mean": [*_points(training, "loss")],
        "training part": [*_points(evaluations, "train")],
        "validation part": [*_points(evaluations, "val")],
    }
    for label, points in lines.items():
        steps, losses = np.reshape(points, (-1, 2)).T
        is_line = label == "training steps, mean" and len(steps) >= LONG_RUN
        marker = "" if is_line else "."
        axes.plot(steps, losses, marker=marker, linewidth=1, label=label)
    points = np.array([point for line in lines.values() for point in line])
    if max(map(len, lines.values())) >= LONG_RUN:
        last = points[:, 0].max()
        late = points[points[:, 0] >= last / 10, 1]
        low, high = late.min(), np.quantile(late, 0.98)
        margin = 0.05 * (high - low) + 1e-3
        axes.set_ylim(low - margin, high + margin)
        caption += " Losses above the axis are cut off."
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=path.absolute().parent.name, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.supxlabel(textwrap.fill(caption, 100), fontsize="small")
    with whole(path) as partial:
        figure.savefig(partial, dpi=150, format="png")


def _points(records: Records, name: str) -> Iterator[tuple[int, float]]:
    """The step and the loss of each record with a finite loss of this name."""
    for record in records:
        loss = record.get(name)
        if isinstance(loss, float) and math.isfinite(loss):
            yield record["step"], loss
