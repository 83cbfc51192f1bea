"""The time to compile a model of two and of twelve layers, and single layers.

The loss and its gradients are traced and compiled anew each time, for a language model on 8 × 128
tokens and for a layer on inputs of 8 × 128 × 192.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
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
from jax_models import (
    LSTM,
    HawkLanguageModelConfig,
    HyperLSTM,
    RNNLanguageModelConfig,
    RWKVBlock,
    RWKVLanguageModelConfig,
)
from train.step import token_losses

PART = "loss and gradients"
LAYERS = (2, 12)
MAX_RATIO = 1.5
"""The largest allowed ratio of the time for twelve layers to that for two."""
CONFIGS = {
    "LSTM": RNNLanguageModelConfig(
        256, context_length=None, embedding_features=192, hidden_features=192, cell="lstm"
    ),
    "Hawk": HawkLanguageModelConfig(256, features=192, parameterization="direct"),
    "RWKV": RWKVLanguageModelConfig(256, features=192),
    "Hawk, scanned": HawkLanguageModelConfig(
        256, features=192, parameterization="direct", scan_layers=True
    ),
    "RWKV, scanned": RWKVLanguageModelConfig(256, features=192, scan_layers=True),
}


SINGLE_LAYERS = {
    "LSTM layer": lambda rngs: LSTM(192, 192, rngs=rngs),
    "HyperLSTM layer": lambda rngs: HyperLSTM(192, 192, 48, 16, rngs=rngs),
    "RWKV block": lambda rngs: RWKVBlock(192, rngs=rngs),
}
MAX_RATIO_TO_LSTM = {"HyperLSTM layer": 2.5, "RWKV block": 1.7}
"""The largest allowed ratios of the time to that of the LSTM layer."""


def time_model(config: Any) -> tuple[float, float]:
    """The seconds to trace and compile a language model, and the seconds of a call."""
    tokens = np.random.default_rng(0).integers(256, size=(8, 129), dtype=np.int32)
    return time_compilation(
        config.build(rngs=nnx.Rngs(0)),
        tokens,
        lambda model, x: token_losses(model, x[:, :-1], x[:, 1:]).mean(),
    )


def time_layer(name: str) -> tuple[float, float]:
    """The seconds to trace and compile a layer, and the seconds of a call."""
    x = np.random.default_rng(0).standard_normal((8, 128, 192), np.float32)
    return time_compilation(
        SINGLE_LAYERS[name](nnx.Rngs(0)), x, lambda layer, x: jnp.sum(layer(x)[0] ** 2)
    )


def time_compilation(
    module: nnx.Module, x: np.ndarray, loss: Callable[..., Any]
) -> tuple[float, float]:
    """The seconds to trace and compile the loss and its gradients, and the seconds of a call."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    arguments = params, jnp.asarray(x)

    def of_params(params, x):
        return loss(nnx.merge(graphdef, params, rest), x)

    jax.clear_caches()
    start = time.perf_counter()
    run = jax.jit(jax.value_and_grad(of_params)).lower(*arguments).compile()
    middle = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return middle - start, time.perf_counter() - middle


def measure(session: Session) -> Outcome:
    """Measures the models and the single layers."""
    outcome = Outcome()
    session.workers.device("jax")
    parts = {
        name: partial(measure_model, session, name)
        for name in (("LSTM",) if session.quick else CONFIGS)
    }
    parts["single layers"] = partial(measure_layers, session)
    for name, measure_part in parts.items():
        found = session.measure_once(f"{__name__}: {name}", measure_part)
        show(session.console, found)
        outcome += found
    return outcome


def measure_model(session: Session, name: str) -> Outcome:
    """Measures a model with two and with twelve layers."""
    configs = [dataclasses.replace(CONFIGS[name], num_layers=count) for count in LAYERS]
    found, seconds = measure_in_turn(session, time_model, configs, [name] * 2, LAYERS)
    ratio = seconds[1] / seconds[0]
    found.checks.append(Check(name, PART, "compilation, 12 layers / 2", ratio, MAX_RATIO))
    return found


def measure_layers(session: Session) -> Outcome:
    """Measures the single layers."""
    names = ["LSTM layer"] if session.quick else [*SINGLE_LAYERS]
    found, seconds = measure_in_turn(session, time_layer, names, names, [1] * len(names))
    for name, compile_s in zip(names, seconds, strict=True):
        if name in MAX_RATIO_TO_LSTM:
            ratio = compile_s / seconds[0]
            what = "compilation / LSTM layer"
            found.checks.append(Check(name, PART, what, ratio, MAX_RATIO_TO_LSTM[name]))
    return found


def measure_in_turn(
    session: Session,
    measure: Callable[..., tuple[float, float]],
    arguments: Sequence[Any],
    names: Sequence[str],
    layers: Sequence[int],
) -> tuple[Outcome, list[float]]:
    """Compiles for each argument in turn. Returns rows, and the median seconds to compile."""
    turns = [
        [session.workers.call("jax", measure, argument) for argument in arguments]
        for _ in range(1 if session.quick else 3)
    ]
    found = Outcome()
    seconds = np.median(turns, axis=0).tolist()
    for name, count, (compile_s, run_s) in zip(names, layers, seconds, strict=True):
        contender = OURS if count == 1 else f"{OURS}, {count} layers"
        row = Row(name, PART, contender, "jax", 1e3 * run_s, compile_s=compile_s)
        found.rows.append(dataclasses.replace(row, calls=len(turns)))
    return found, [compile_s for compile_s, _ in seconds]


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws bars of the time to compile."""
    as_times = {
        allocator: [dataclasses.replace(row, ms=1e3 * (row.compile_s or 0)) for row in rows]
        for allocator, rows in found.items()
    }
    return bars(as_times, title)
