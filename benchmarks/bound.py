"""`python -m benchmarks.bound`: errors relative to their bounds, with and without a fault.

Without a fault, a share of the bound above 1 would be a false alarm. The shares are measured on
random configurations of each architecture: the registry's sizes and options in turn, sequences of 1
or 33 steps (or the longest that the case allows), random weights scaled by 1/4 to 4 and inputs
scaled by 1/8 to 8, so that some configurations are ill-conditioned. With each of the planted faults
of `parity_tests/registry/`, the share must be above 1.
"""

import argparse
import dataclasses
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import matplotlib
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.report.store import versions
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import DTYPES, Problem, in_every_dtype
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.registry import CASES, MUTATIONS, Case, Mutation

matplotlib.use("Agg")
from matplotlib import pyplot as plt

NUM_STEPS = (1, 33)
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
BIN_EDGES = np.linspace(-4, 1, 51)
"""The bin edges of the histograms, in log10 of a share. The first bin includes smaller shares."""


@dataclasses.dataclass
class Shares:
    """The shares of the bounds for one architecture."""

    architecture: str
    configurations: int = 0
    undetermined: int = 0
    """Number of configurations in which rounding alone leaves the verdict of a dtype open."""
    alarms: list[str] = dataclasses.field(default_factory=list)
    overflows: list[str] = dataclasses.field(default_factory=list)
    """Configurations without a reference, because torch's results are not finite."""
    quantiles: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Quantiles of the shares, by dtype: smallest, 5%, median, 95%, largest."""
    histograms: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def cases_by_architecture() -> dict[str, list[str]]:
    """The names of the registry's cases that run on a CPU, by architecture."""
    result = defaultdict(list)
    for name, case in CASES.items():
        if "cpu" not in case.platforms:
            continue
        result[case.architecture].append(name)
    return dict(result)


def configurations(case: Case, time: int, seeds: Iterator[int]) -> Iterator[Problem]:
    """A case at one length, with different weights, inputs and scales for each seed."""
    base = case.problem()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        gain, scale = 2.0 ** rng.integers(-2, 3), 2.0 ** rng.integers(-3, 4)
        twin = case.build_twin(seed)
        decays = [a.clone() for a in case.bounded(twin)]
        with torch.no_grad():
            for weight in twin.parameters():
                weight.mul_(gain)
        for a, decay in zip(case.bounded(twin), decays, strict=True):
            a.copy_(decay)
        x = case.inputs(seed, time=min(time, case.max_length or time))
        if np.issubdtype(x.dtype, np.floating):
            x = in_every_dtype(scale * x)
        state = (case.state(seed),) if len(base.inputs) == 2 else ()
        yield dataclasses.replace(base, twin=twin, inputs=(x, *state), seed=seed)


def shares(architecture: str, count: int) -> Shares:
    """Measures a number of configurations of an architecture."""
    # Take all cases and lengths in turn, so that each gets equally many configurations.
    jax.config.update("jax_enable_x64", True)
    result, found = Shares(architecture), defaultdict(list)
    cases = [CASES[name] for name in cases_by_architecture()[architecture]]
    turns = [(case, time) for case in cases for time in NUM_STEPS]
    for turn, (case, time) in enumerate(turns):
        jax_side = JaxSide(case.problem())
        for one in configurations(case, time, iter(range(turn, count, len(turns)))):
            report = measure_twin(one, DTYPES, jax_side=jax_side)
            result.configurations += 1
            name = f"{case.name}, seed {one.seed}"
            # A torch side that overflows is no reference, so it cannot raise a false alarm.
            overflows = [fault for fault in report.faults if "torch side are not finite" in fault]
            result.overflows += [f"{name}: {fault}" for fault in overflows[:1]]
            faults = [fault for fault in report.faults if fault not in overflows]
            errors = [
                (dtype, group, error)
                for dtype, groups in report.errors.items()
                for group, error in groups.items()
            ]
            result.undetermined += any(e.verdict == "undetermined" for *_, e in errors)
            result.alarms += [f"{name}: {fault}" for fault in faults] + [
                f"{name}, {dtype}, {group}: {e}"
                for dtype, group, e in errors
                if e.verdict == "FAIL"
            ]
            for dtype, _, error in errors:
                if error.verdict != "undetermined":
                    found[dtype].append(error.share)
    result.quantiles = {
        dtype: np.quantile(values, QUANTILES).tolist() for dtype, values in found.items()
    }
    result.histograms = {
        dtype: np.histogram(np.log10(np.maximum(values, 10 ** BIN_EDGES[0])), BIN_EDGES)[0].tolist()
        for dtype, values in found.items()
    }
    return result


def fault_shares() -> dict[str, float]:
    """The share of the bound for each planted fault that the comparison must find."""
    return {
        str(mutation): fault_share(mutation)
        for mutation in track(MUTATIONS, "planted faults")
        if mutation.check is None
    }


def fault_share(mutation: Mutation) -> float:
    """The largest share among the groups of arrays, in the dtype in which that is smallest."""
    with mutation.plant():
        report = measure_twin(CASES[mutation.case].problem(), mutation.dtypes)
    return min(max(error.share for error in groups.values()) for groups in report.errors.values())


def draw(found: list[Shares], planted: dict[str, float], path: Path) -> None:
    """Draws the distribution over all configurations, and the range of each architecture."""
    figure, (above, below) = plt.subplots(
        2, figsize=(8, 9), height_ratios=(1, 2), sharex=True, layout="constrained"
    )
    for offset, dtype in zip((-0.22, 0, 0.22), DTYPES, strict=True):
        counts = np.sum([shares.histograms[dtype] for shares in found], axis=0)
        above.stairs(counts / counts.sum(), 10**BIN_EDGES, label=dtype)
        for row, shares in enumerate(found):
            smallest, low, median, high, largest = np.maximum(
                shares.quantiles[dtype], 10 ** BIN_EDGES[0]
            )
            y, color = row + offset, f"C{DTYPES.index(dtype)}"
            below.plot((smallest, largest), (y, y), color=color, linewidth=0.8)
            below.plot((low, high), (y, y), color=color, linewidth=3)
            below.plot(median, y, "o", color="white", markeredgecolor=color, markersize=3)
    below.plot([*planted.values()], [len(found)] * len(planted), "|", color="C3", markersize=12)
    below.set_yticks(range(len(found) + 1), [*(shares.architecture for shares in found), "faults"])
    below.invert_yaxis()
    below.set(xscale="log", xlabel="share of the bound (smallest, 5 %, median, 95 %, largest)")
    above.set(ylabel="part of all groups", title="where nothing is wrong, and where something is")
    above.legend(title="no fault")
    for axes in (above, below):
        axes.axvline(1, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(found: list[Shares]) -> Table:
    """A table with a row for each architecture."""
    result = Table(title="share of the bound: median and largest", title_justify="left")
    for column in ("", "configurations", "alarms", "overflows", "undetermined", *DTYPES):
        result.add_column(column, justify="right" if column else "left")
    for shares in found:
        counts = (
            shares.configurations,
            len(shares.alarms),
            len(shares.overflows),
            shares.undetermined,
        )
        cells = (
            f"{shares.quantiles[dtype][2]:.0e}  {shares.quantiles[dtype][-1]:.0e}"
            for dtype in DTYPES
        )
        result.add_row(shares.architecture, *map(str, counts), *cells)
    return result


def main() -> int:
    """Measures the shares, and prints, draws and writes them.

    Returns 1 after a false alarm or a fault that was not found.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bound", description=__doc__)
    parser.add_argument("--configurations", type=int, default=1000, help="of each architecture")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--plot", type=Path, help="PNG to draw them into")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    planted = fault_shares()
    context = multiprocessing.get_context("spawn")
    found = []
    for architecture in track(cases_by_architecture(), "configurations"):
        with context.Pool(1) as pool:
            found.append(pool.apply(shares, (architecture, options.configurations)))
    Console(width=120).print(table(found))
    print(f"the smallest of {len(planted)} planted faults: {min(planted.values()):.0e} bounds")
    if options.json:
        figures = {"shares": [*map(dataclasses.asdict, found)], "faults": planted}
        options.json.write_text(json.dumps({"with": versions(), **figures}, indent=1) + "\n")
    if options.plot:
        draw(found, planted, options.plot)
    return int(any(shares.alarms for shares in found) or min(planted.values()) <= 1)


if __name__ == "__main__":
    raise SystemExit(main())
