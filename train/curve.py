"""The loss curve of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw_curve(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the losses of both parts over the steps into a PNG."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [record["step"] for record in metrics]
    for part, label in (("train", "training part"), ("val", "validation part")):
        axes.plot(steps, [record[part] for record in metrics], marker=".", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per character)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
