"""Draws the README's picture: our times beside those of other packages."""

from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.outcome import Row
from benchmarks.problem import BOTH
from benchmarks.report.store import Record


class Shown(NamedTuple):
    """A problem in the picture."""

    title: str
    family: str
    problem: str
    others: dict[str, str]
    """The group of each contender that is shown, by the contender's name."""


NATIVE = "twinscan with twinscan-native"
TORCH, FLAX, EQUINOX = "PyTorch", "Flax's nnx.RNN", "Equinox"
TRANSFORMERS, GEMMA, PLAIN = "transformers", "recurrentgemma", "plain JAX"
LAYERS = {"twinscan, native": NATIVE, "torch.nn": TORCH, "nnx.RNN": FLAX, "equinox": EQUINOX}
ASSOCIATIVE = {"lax.associative_scan": PLAIN}
SHOWN = (
    Shown("LSTM, 128 steps × 32 rows", "gated", "LSTM T128 B32 H256", LAYERS),
    Shown(
        "LSTM, rows of several lengths",
        "gated",
        "LSTM T128 B32 H256 with lengths",
        {name: LAYERS[name] for name in ("twinscan, native", "torch.nn", "nnx.RNN")},
    ),
    Shown("LSTM, 1,024 steps × 1 row", "gated", "LSTM T1024 B1 H256", LAYERS),
    Shown("GRU, 256 steps × 32 rows", "gated", "GRU T256 B32 H256", LAYERS),
    Shown("minGRU, 8,192 steps", "min_rnn", "1 × 8192 × 256", {"torch loop": TORCH}),
    Shown(
        "RG-LRU's recurrence",
        "linear_recurrence",
        "4 × 2048 × 1024",
        {"torch loop": TORCH, "recurrentgemma": GEMMA, **ASSOCIATIVE},
    ),
    Shown(
        "RWKV-4's recurrence",
        "wkv",
        "8 × 512 × 512",
        {"torch loop": TORCH, "transformers": TRANSFORMERS, "lax.scan": PLAIN},
    ),
    Shown(
        "Gated DeltaNet's recurrence",
        "delta_rule",
        "4 × 2048, 4 heads of 64",
        {"transformers, a decay a head": TRANSFORMERS, "lax.scan": PLAIN},
    ),
    Shown(
        "Hyena's long convolution",
        "long_conv",
        "4 × 256, L 4096",
        {"torch.fft": TORCH, "plain jnp.fft": PLAIN},
    ),
    Shown(
        "attention with a mask",
        "attention",
        "4 × 1024, 6 heads of 64",
        {"torch SDPA": TORCH, "jax.nn.dot_product_attention": PLAIN},
    ),
)
STYLES = {
    NATIVE: ("*", "black"),
    TORCH: ("s", "C1"),
    TRANSFORMERS: ("D", "C3"),
    FLAX: ("o", "C0"),
    EQUINOX: ("^", "C2"),
    GEMMA: ("v", "C4"),
    PLAIN: ("x", "0.4"),
}


def overview(records: list[Record]) -> Figure | None:
    """Draws the times of the other packages as multiples of ours, on a CPU.

    Each time is that of a forward and a backward pass with the default allocator. Returns None if
    the records have none of the problems.
    """
    rows: dict[tuple[str, str], list[Row]] = {}
    for record in records:
        if (record.platform, record.allocator) == ("cpu", "default"):
            for row in record.outcome.rows:
                if row.part == BOTH:
                    rows.setdefault((record.family, row.problem), []).append(row)
    shown = [each for each in SHOWN if (each.family, each.problem) in rows]
    if not shown:
        return None

    figure = Figure(figsize=(8, 0.9 + 0.36 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1)
    labels = []
    for y, each in enumerate(shown):
        found = rows[each.family, each.problem]
        ours = next(row.ms for row in found if row.ours)
        labels.append(f"{each.title}\n{ours:,.0f} ms with twinscan")
        for row in found:
            if row.name in each.others:
                group = each.others[row.name]
                marker, color = STYLES[group]
                axes.plot(row.ms / ours, y, marker, color=color, label=group, markersize=7)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        [named[group] for group in STYLES if group in named],
        [group for group in STYLES if group in named],
        loc="lower right",
        fontsize=8,
    )
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time as a multiple of twinscan's: left of 1 is faster, right of 1 is slower")
    return figure
