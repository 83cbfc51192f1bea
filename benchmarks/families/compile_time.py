"""The time to compile a model of two and of twelve layers.

Loss and gradients of a language model, 8 × 128 tokens, traced and compiled anew each time.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from benchmarks.compare import Session
from benchmarks.outcome import Check, Outcome, Row
from benchmarks.problem import OURS
from benchmarks.report.plot import RowsByAllocator, bars
from benchmarks.report.table import show
from jax_models import HawkLanguageModelConfig, RNNLanguageModelConfig, RWKVLanguageModelConfig
from train.loop import token_losses

PART = "loss and gradients"
LAYERS = (2, 12)
MOST = 1.5
"""Times as long for twelve as for two."""
CONFIGS = {
    "LSTM": RNNLanguageModelConfig(
        256, context_length=None, embedding_features=192, hidden_features=192, cell="lstm"
    ),
    "Hawk": HawkLanguageModelConfig(256, features=192),
    "RWKV": RWKVLanguageModelConfig(256, features=192),
    "Hawk, scanned": HawkLanguageModelConfig(256, features=192, scan_layers=True),
    "RWKV, scanned": RWKVLanguageModelConfig(256, features=192, scan_layers=True),
}


def compiled(config: Any) -> tuple[float, float]:
    """Seconds to trace and compile, and of a call."""
    graphdef, params, rest = nnx.split(config.build(rngs=nnx.Rngs(0)), nnx.Param, ...)
    tokens = jnp.asarray(np.random.default_rng(0).integers(256, size=(8, 129), dtype=np.int32))

    def loss(params, tokens):
        return token_losses(nnx.merge(graphdef, params, rest), tokens).mean()

    start = time.perf_counter()
    run = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
    middle = time.perf_counter()
    jax.block_until_ready(run(params, tokens))
    return middle - start, time.perf_counter() - middle


def measure(session: Session) -> Outcome:
    """By turns."""
    outcome = Outcome()
    session.workers.device("jax")
    for name in ("LSTM",) if session.quick else CONFIGS:
        configs = [dataclasses.replace(CONFIGS[name], num_layers=count) for count in LAYERS]
        turns = [
            [session.workers.call("jax", compiled, config) for config in configs]
            for _ in range(1 if session.quick else 3)
        ]
        seconds = np.median(turns, axis=0)
        found = Outcome()
        for count, (compile_s, run_s) in zip(LAYERS, seconds.tolist(), strict=True):
            contender = f"{OURS}, {count} layers"
            row = Row(name, PART, contender, "jax", 1e3 * run_s, compile_s=compile_s)
            found.rows.append(dataclasses.replace(row, calls=len(turns)))
        ratio = float(seconds[1, 0] / seconds[0, 0])
        found.checks.append(Check(name, PART, "compilation, 12 layers / 2", ratio, MOST))
        show(session.console, found)
        outcome += found
    return outcome


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Bars of the seconds to compile."""
    as_times = {
        allocator: [dataclasses.replace(row, ms=1e3 * (row.compile_s or 0)) for row in rows]
        for allocator, rows in found.items()
    }
    return bars(as_times, title)
