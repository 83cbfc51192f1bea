"""`python -m benchmarks.operators`: the operators against their peers.

Forward, and forward with backward, on the same random float32 inputs. The errors are those of the
output and of the gradients (the largest of them), against float64.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.interleave import Measured, measure

PROBLEMS = ("linear_recurrence", "wkv", "long_conv", "attention")


def measure_shape(
    problem: str, shape: tuple[int, ...]
) -> tuple[list[tuple[Measured, Measured]], int]:
    """Each contender forward, and forward with backward; and the inputs' bytes."""
    module = importlib.import_module(f"benchmarks.{problem}")
    arrays = [x.astype(np.float32) for x in module.inputs(shape)]
    expected = module.oracle(*(x.astype(np.float64) for x in arrays))
    forward = measure(module, arrays, expected[:1], backward=False)
    both = measure(module, arrays, expected, backward=True)
    return list(zip(forward, both, strict=True)), sum(x.nbytes for x in arrays[:-1])


def table(title: str, rows: list[tuple[Measured, Measured]], size: int) -> Table:
    """The contenders of one problem, ours first; the ratios are of our time over theirs."""
    result = Table(title=title, title_justify="left")
    result.add_column()
    for column in (
        "fwd ms",
        "ratio",
        "fwd+bwd ms",
        "ratio",
        "compile s",
        "memory",
        "error",
        "grad",
    ):
        result.add_column(column, justify="right")
    our_forward, our_both = rows[0]
    for forward, both in rows:
        result.add_row(
            forward.name,
            f"{forward.ms:.2f}",
            f"{our_forward.ms / forward.ms:.2f}",
            f"{both.ms:.2f}",
            f"{our_both.ms / both.ms:.2f}",
            "–" if both.compile_s is None else f"{both.compile_s:.1f}",
            "–" if both.memory is None else f"{both.memory / size:.1f} ×",
            f"{both.errors[0]:.0e}",
            f"{max(both.errors[1:]):.0e}",
        )
    return result


def versions() -> dict[str, str | int]:
    """What the figures were measured with."""
    found: dict[str, str | int] = {"cores": len(os.sched_getaffinity(0))}
    found["python"] = platform.python_version()
    for package in ("jax", "torch", "recurrentgemma", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--only", choices=PROBLEMS, help="one of the operators")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("B", "T", "D"), help="one shape")
    options = parser.parse_args()
    console = Console(width=110)
    figures = []
    for problem in [options.only] if options.only else PROBLEMS:
        shapes = importlib.import_module(f"benchmarks.{problem}").SHAPES
        for shape in [tuple(options.shape)] if options.shape else shapes:
            rows, size = measure_shape(problem, shape)
            title = f"{problem}, batch {shape[0]}, time {shape[1]}, features {shape[2]}"
            console.print(table(title, rows, size))
            figures += [
                {
                    "problem": problem,
                    "shape": shape,
                    "name": forward.name,
                    "forward_ms": forward.ms,
                    "forward_and_backward_ms": both.ms,
                    "compile_s": both.compile_s,
                    "memory_over_inputs": both.memory and both.memory / size,
                    "errors": both.errors,
                }
                for forward, both in rows
            ]
            if options.json:
                report = {"with": versions(), "figures": figures}
                options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
