"""`python -m benchmarks.online_conv`: what an output of a long convolution costs as it goes on.

Microseconds an output, the mean over a whole sequence of this length: ours in a `lax.scan`, ours
step by step from Python, the whole convolution again for each output, and a sum over all inputs
for each output (the last two timed at some outputs: all of theirs cost the same). Batch 1, 256
features, float32; the errors are against an FFT in float64.
"""

import argparse
import json
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.interleave import ENVIRONMENT, relative_error
from benchmarks.operators import versions

FEATURES = 256
LENGTHS = (256, 1024, 4096, 16384)


def measure(length: int) -> list[dict]:
    """The contenders at one length, by turns."""
    import jax
    import jax.numpy as jnp

    from jax_models.ops import empty_long_conv_state, long_conv, online_conv

    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((length, 1, FEATURES))
    h = rng.standard_normal((FEATURES, length))
    spectrum = np.fft.rfft(inputs[:, 0].T, 2 * length) * np.fft.rfft(h, 2 * length)
    expected = np.fft.irfft(spectrum, 2 * length)[:, :length].T[:, None]
    inputs, h = jnp.asarray(inputs, jnp.float32), jnp.asarray(h, jnp.float32)
    steps = list(inputs)
    h_reversed = jnp.pad(h[:, ::-1].T, ((0, length), (0, 0)))
    empty = partial(empty_long_conv_state, 1, FEATURES, length)

    def online_step(h, state, v):
        y, state = online_conv(v[..., None], state, taps=_taps, params=h, max_length=length)
        return state, y[..., 0]

    def direct_step(h_reversed, state, v):
        position, past = state
        past = jax.lax.dynamic_update_slice_in_dim(past, v, position, axis=0)
        weights = jax.lax.dynamic_slice_in_dim(h_reversed, length - 1 - position, length)
        return (position + 1, past), jnp.sum(past * weights, axis=0, keepdims=True)

    def by_steps(step, parameter, state, count: int):
        step = jax.jit(step, donate_argnums=1)

        def run():
            ys, carried = [], state()
            for v in steps[:count]:
                carried, y = step(parameter, carried, v)
                ys.append(y.block_until_ready())
            return ys

        return run

    scan = jax.jit(lambda h, v: jax.lax.scan(partial(online_step, h), empty(), v)[1])
    whole, row = jax.jit(long_conv), jnp.moveaxis(inputs, 0, 2)
    nothing = lambda: (jnp.int32(0), jnp.zeros((length, FEATURES)))  # noqa: E731
    some = min(length, 100_000 // length)

    def again():
        ys = [whole(row, h).block_until_ready() for _ in range(some)]
        return jnp.moveaxis(ys[-1], 2, 0)

    contenders = {
        "twinscan, scan": (lambda: scan(h, inputs).block_until_ready(), length),
        "twinscan, steps": (by_steps(online_step, h, empty, length), length),
        "FFT again": (again, some),
        "direct sum": (by_steps(direct_step, h_reversed, nothing, some), some),
    }
    times, errors = {name: [] for name in contenders}, {}
    for turn in range(4):
        for name, (run, count) in contenders.items():
            start = time.perf_counter()
            y = run()
            if turn:
                times[name].append((time.perf_counter() - start) / count)
            else:
                errors[name] = relative_error(np.stack(y), expected[: len(y)])
    return [
        {
            "length": length,
            "name": name,
            "microseconds": 1e6 * float(np.median(times[name])),
            "error": errors[name],
        }
        for name in contenders
    ]


def _taps(h, length: int):
    return h[:, :length]


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online_conv", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        figures = [row for length in LENGTHS for row in pool.apply(measure, (length,))]
    result = Table(title="µs an output, and the error", title_justify="left")
    result.add_column()
    for length in LENGTHS:
        result.add_column(f"of {length:,}", justify="right")
    for name in dict.fromkeys(row["name"] for row in figures):
        rows = [row for row in figures if row["name"] == name]
        cells = (f"{row['microseconds']:,.0f}  {row['error']:.0e}" for row in rows)
        result.add_row(name, *cells)
    Console(width=110).print(result)
    if options.json:
        report = {"with": versions(), "figures": figures}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
