"""Trains and times the layers that the registry compares, for docs/guides/which_layer.md.

    python -m benchmarks.which_layer learning GRU LSTM
    python -m benchmarks.which_layer speed
    python -m benchmarks.which_layer tables

Without names, all layers are measured. Each result is stored as soon as it is known, in
`benchmarks/results/which_layer-cpu.json`, with its date, the processor and the versions of Python
and of packages, and replaces an earlier one of the same layer. `tables` prints the tables of the
page, which a test compares with the page.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_models as m
from benchmarks.report.store import versions
from parity_tests.registry import COMPARED

FILE = Path(__file__).parent / "results" / "which_layer-cpu.json"


WIDTH, STEPS, BATCH = 64, 1000, 32
LEARNING_RATES = 1e-3, 3e-3, 1e-2
CLIP = 1.0
"""The global norm to which gradients are clipped."""


def adding(key: jax.Array):
    """The last output is the sum of two marked numbers out of 96. Its variance is 0.167."""
    key, at_first, at_second = jax.random.split(key, 3)
    values = jax.random.uniform(key, (BATCH, 96))
    first = jax.random.randint(at_first, (BATCH, 1), 0, 48)
    second = jax.random.randint(at_second, (BATCH, 1), 48, 96)
    marks = (jnp.arange(96) == first) | (jnp.arange(96) == second)
    x = jnp.stack([values, marks.astype(jnp.float32)], axis=-1)
    target = jnp.where(marks, values, 0).sum(axis=1)

    def loss_fn(y):
        loss = jnp.mean((y[:, -1, 0] - target) ** 2)
        return loss, loss

    return x, loss_fn


def classified(logits: jax.Array, target: jax.Array):
    """The loss, and the share of outputs that are right."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=-1) == target)


def parity(key: jax.Array):
    """Each of 32 outputs says whether the number of ones so far is odd."""
    bits = jax.random.randint(key, (BATCH, 32), 0, 2)
    x = jax.nn.one_hot(bits, 2)
    return x, lambda y: classified(y[..., :2], jnp.cumsum(bits, axis=1) % 2)


def recall(key: jax.Array):
    """16 steps each hold a key and its value, and 16 more steps ask for the values of the keys."""
    at_keys, at_values, at_queries = jax.random.split(key, 3)
    order = jnp.broadcast_to(jnp.arange(16), (BATCH, 16))
    keys = jax.random.permutation(at_keys, order, axis=1, independent=True)
    queries = jax.random.permutation(at_queries, order, axis=1, independent=True)
    values = jax.random.randint(at_values, (BATCH, 16), 0, 8)  # value of key i
    written = jnp.take_along_axis(values, keys, axis=1)
    first = jnp.concatenate([jax.nn.one_hot(keys, 16), jax.nn.one_hot(written, 8)], axis=-1)
    second = jnp.concatenate([jax.nn.one_hot(queries, 16), jnp.zeros((BATCH, 16, 8))], axis=-1)
    target = jnp.take_along_axis(values, queries, axis=1)
    return jnp.concatenate([first, second], axis=1), lambda y: classified(y[:, 16:, :8], target)


class Model(nnx.Module):
    """A layer between two linear maps."""

    def __init__(self, layer: Callable[..., Any], in_features: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(in_features, WIDTH, rngs=rngs)
        self.layer = layer(WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The outputs of all steps."""
        y, _ = self.layer(self.first(x))
        return self.last(y[..., :WIDTH])  # an RWKV7Block also returns the values of its first layer


def learning(layer: Callable[..., Any], task: Callable[..., Any]) -> list[dict[str, float]]:
    """Trains the layer on a task with each learning rate.

    Returns the mean metric of the last 50 steps, and the largest norm of a gradient.
    """
    model = Model(layer, task(jax.random.key(0))[0].shape[-1], nnx.Rngs(0))
    graphdef, initial, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def train(rate):
        optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(rate))

        def step(carry, key):
            weights, state = carry
            x, loss_fn = task(key)

            def score(weights):
                return loss_fn(nnx.merge(graphdef, weights, rest)(x))

            (_, metric), gradient = jax.value_and_grad(score, has_aux=True)(weights)
            updates, state = optimizer.update(gradient, state, weights)
            return (optax.apply_updates(weights, updates), state), (
                metric,
                optax.global_norm(gradient),
            )

        keys = jax.random.split(jax.random.key(1), STEPS)
        _, (metrics, norms) = jax.lax.scan(step, (initial, optimizer.init(initial)), keys)
        return metrics[-50:].mean(), norms.max()

    results = []
    for rate in LEARNING_RATES:
        metric, norm = map(float, train(rate))
        results.append({"rate": rate, "metric": metric, "norm": norm})
    return results


def median_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call, over as many calls as fit into so many seconds."""
    jax.block_until_ready(call())
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 3:
        before = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - before)
    return float(np.median(times))


def speed(layer: Callable[..., Any]) -> dict[str, float]:
    """The times and the memory of a layer of width 256, in float32."""
    model = layer(256, rngs=nnx.Rngs(0))
    graphdef, weights, rest = nnx.split(model, nnx.Param, ...)

    def compiled(batch: int, steps: int):
        def loss(weights, x):
            return jnp.mean(nnx.merge(graphdef, weights, rest)(x)[0] ** 2)

        x = jnp.asarray(np.random.default_rng(0).standard_normal((batch, steps, 256), np.float32))
        before = time.perf_counter()
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x).compile()
        return program, x, time.perf_counter() - before

    program, x, compile_seconds = compiled(32, 128)
    train = median_seconds(lambda: program(weights, x), 0.7)
    long, x, _ = compiled(1, 4096)
    train_long = median_seconds(lambda: long(weights, x), 0.7)
    memory: Any = long.memory_analysis()

    # The state after 4,096 steps, and the time of the next step.
    if isinstance(model, m.Attention) and model.window is None:
        model = nnx.view(model, max_length=4352)
    _, state = nnx.jit(lambda layer, x: layer(x[:, :4095]))(model, x)
    graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
    step = jax.jit(lambda weights, x, s: nnx.merge(graphdef, weights, rest).step(x, s))
    x_t = x[:, 0]
    return {
        "parameters": sum(w.size for w in jax.tree.leaves(weights)),
        "train 32 × 128, ms": 1e3 * train,
        "train 1 × 4096, ms": 1e3 * train_long,
        "memory 1 × 4096, MiB": memory.temp_size_in_bytes / 2**20,
        "compile 32 × 128, s": compile_seconds,
        "step, µs": 1e6 * median_seconds(lambda: step(weights, x_t, state), 0.3),
        "state, KiB": sum(s.nbytes for s in jax.tree.leaves(state)) / 2**10,
    }


TASKS = adding, parity, recall


def store(layer: str, part: str, measured: dict[str, Any]) -> None:
    """Adds results to a layer's row of one part, `speed` or `learning`."""
    record = json.loads(FILE.read_text()) if FILE.exists() else {"layers": {}}
    row = record["layers"].setdefault(layer, {}).setdefault(part, {})
    row |= measured | {"date": time.strftime("%Y-%m-%d"), "versions": versions()}
    FILE.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


DIGITS = {
    "parameters": 0,
    "train 32 × 128, ms": 0,
    "train 1 × 4096, ms": 0,
    "memory 1 × 4096, MiB": 0,
    "compile 32 × 128, s": 1,
    "step, µs": 0,
    "state, KiB": 1,
}
"""The figures of `speed`, and how many decimals the page shows."""


def tables(record: dict[str, Any]) -> list[str]:
    """The rows of the page's two tables."""
    learned, timed = [], []
    for name, rows in record["layers"].items():
        found = rows.get("learning", {})
        if all(task.__name__ in found for task in TASKS):
            cells = [
                " · ".join(f"{1e4 * run['metric']:,.0f}" for run in found["adding"]),
                *(
                    " · ".join(f"{100 * run['metric']:.0f}" for run in found[task.__name__])
                    for task in (parity, recall)
                ),
                f"{max(run['norm'] for task in TASKS for run in found[task.__name__]):,.0f}",
            ]
            learned.append(f"| {' | '.join([f'`{name}`', *cells])} |")
        if "speed" in rows:
            cells = [f"{rows['speed'][figure]:,.{n}f}" for figure, n in DIGITS.items()]
            timed.append(f"| {' | '.join([f'`{name}`', *cells])} |")
    return [*learned, *timed]


def main(part: str, *names: str) -> None:
    """Measures the layers with these names, by default all of them."""
    if part == "tables":
        print("\n".join(tables(json.loads(FILE.read_text()))))
        return
    for name in names or COMPARED:
        if part == "speed":
            measured: dict[str, Any] = speed(COMPARED[name])
            print(name, measured, flush=True)
            store(name, "speed", measured)
            continue
        for task in TASKS:
            start = time.perf_counter()
            measured = {task.__name__: learning(COMPARED[name], task)}
            seconds = time.perf_counter() - start
            metrics = " ".join(f"{found['metric']:.3g}" for found in measured[task.__name__])
            print(f"{name:36} {task.__name__:8} {seconds:5.0f} s  {metrics}", flush=True)
            store(name, "learning", measured)


if __name__ == "__main__":
    main(*sys.argv[1:])
