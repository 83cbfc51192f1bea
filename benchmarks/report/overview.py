"""Draws the README's picture: our times beside those of other packages."""

from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.outcome import Row
from benchmarks.problem import BOTH, OURS
from benchmarks.report.plot import LONGEST
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
        "Causal attention, 4 × 1,024 steps",
        "attention",
        "4 × 1024, 6 heads of 64",
        {
            "twinscan, native": NATIVE,
            "torch SDPA": TORCH,
            "jax.nn.dot_product_attention": PLAIN,
        },
    ),
)
COLORS = {
    OURS: "C3",
    NATIVE: "C1",
    TORCH: "C0",
    FLAX: "C2",
    EQUINOX: "C4",
    TRANSFORMERS: "C5",
    GEMMA: "C6",
    PLAIN: "C7",
}


def overview(records: list[Record]) -> Figure | None:
    """Draws the times of all packages as multiples of ours, on a CPU.

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

    bars = []  # for each problem: pairs (time, group), the fastest first
    for each in shown:
        groups = {OURS: OURS, **each.others}
        found = rows[each.family, each.problem]
        times = {groups[row.name]: row.ms for row in found if row.name in groups}
        bars.append(sorted((ms / times[OURS], group) for group, ms in times.items()))

    figure = Figure(figsize=(8, 1 + 0.13 * sum(len(b) + 1.5 for b in bars)), layout="constrained")
    axes = figure.subplots()
    middles, top = [], 0.0
    for times in bars:
        for place, (time, group) in enumerate(times):
            (bar,) = axes.barh(top + place, min(time, LONGEST), color=COLORS[group], label=group)
            text = f"{time:.2f}" if time < LONGEST else f"{time:.1f} →"
            axes.text(bar.get_width(), top + place, f" {text}", va="center", fontsize=6)
        middles.append(top + (len(times) - 1) / 2)
        top += len(times) + 1.5
    axes.axvline(1, color="black", linewidth=0.8)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    drawn = [group for group in COLORS if group in named]
    handles = [named[group] for group in drawn]
    figure.legend(handles, drawn, loc="outside lower center", ncols=4, fontsize=8)
    axes.set_yticks(middles, [each.title for each in shown], fontsize=8)
    axes.set_ylim(top - 1, -1)
    axes.margins(x=0.06)
    axes.set_xlabel(f"time as a multiple of twinscan's (shorter is faster; bars end at {LONGEST})")
    return figure
