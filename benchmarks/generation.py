"""`python -m benchmarks.generation`: time and memory of a generated token, early and late."""

import argparse
import statistics
import time

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from jax_models import stream
from train.config import PRESETS

WINDOW = 500


def token_times(model, num_tokens: int) -> list[float]:
    """Microseconds of each token, sampling included, from a prompt of one token."""
    tokens = stream(model, np.zeros((1, 1), np.int32), num_tokens, key=jax.random.key(0))
    times, last = [], time.perf_counter()
    for token in tokens:
        token.block_until_ready()
        now = time.perf_counter()
        times.append(1e6 * (now - last))
        last = now
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument("--num-tokens", type=int, default=10_000 + WINDOW)
    options = parser.parse_args()
    result = Table(title="a token of the presets' models, random weights", title_justify="left")
    for column in ("", "µs from token 10", f"µs from token {options.num_tokens - WINDOW}", "state"):
        result.add_column(column, justify="right" if column else "left")
    for name in ("lstm", "hawk", "rwkv"):
        model = PRESETS[name].model.build(rngs=nnx.Rngs(0))
        times = token_times(model, options.num_tokens)
        early = statistics.median(times[10 : 10 + WINDOW])
        late = statistics.median(times[-WINDOW:])
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_state(1)))
        result.add_row(name, f"{early:.0f}", f"{late:.0f}", f"{size / 1024:.1f} KiB")
    Console(width=100).print(result)


if __name__ == "__main__":
    main()
