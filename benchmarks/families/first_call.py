"""The first call of a model in a new process, which is traced and compiled.

Every measurement starts a process, which imports its packages and builds a model before its time
begins. It is repeated once if other processes ran. XLA's persistent cache is off. The contender
"plain scans" is our model with only the definitions of its operators, which are plain `lax.scan`s.
The variants of ours compile one block for all.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.compare import Session
from benchmarks.models import large_configs
from benchmarks.outcome import Outcome, Row, check_targets
from benchmarks.problem import (
    FORWARD,
    NATIVE,
    OURS,
    CannotSolve,
    Framework,
    only_definitions,
    with_kernels,
    without_kernels,
)
from benchmarks.report.table import show
from benchmarks.workers import QUIET_LOAD, Burst, Workers, burst
from jax_models import (
    HawkLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    RNNLanguageModelConfig,
    RWKV7LanguageModelConfig,
)

STEP = "training step"
PLAIN = "plain scans"
MAX_RATIO = 2.0
"""The largest allowed ratio of our first call to that of the plain scans."""
VOCAB_SIZE, FEATURES = 256, 192
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 257), np.int32)

Call = Callable[[], Any]
Tracing = Callable[[], AbstractContextManager[None]]


def configs(quick: bool) -> dict[str, Any]:
    """The configs of the models by name, of few features, so that compiling takes most time."""
    num_layers = 2 if quick else 12
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_layers": num_layers}
    lstm = RNNLanguageModelConfig(
        **sizes, cell="lstm", embedding_features=FEATURES, hidden_features=FEATURES
    )
    if quick:
        return {"LSTM": lstm}
    sizes |= {"features": FEATURES}
    large = large_configs(num_layers, FEATURES)
    return {
        "LSTM": lstm,
        "Hawk": HawkLanguageModelConfig(**sizes),
        "Hyena": HyenaDNALanguageModelConfig(**sizes),
        **{
            name: dataclasses.replace(large[name], vocab_size=VOCAB_SIZE)
            for name in ("RWKV-7", "Qwen3.5", "Granite 4")
        },
    }


def jax_call(logits: Callable[[Any, Any], jax.Array], params: Any, part: str) -> Call:
    """A jitted forward pass, or a jitted training step with AdamW."""
    optimizer = optax.adamw(1e-3)

    def loss(params):
        of_tokens = optax.softmax_cross_entropy_with_integer_labels
        return of_tokens(logits(params, TOKENS[:, :-1]), TOKENS[:, 1:]).mean()

    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    run, arguments = (
        (logits, (params, TOKENS[:, :-1]))
        if part == FORWARD
        else (step, (params, optimizer.init(params)))
    )
    return lambda: jax.block_until_ready(jax.jit(run)(*arguments))


def ours(tracing: Tracing, config: Any, part: str) -> Call:
    """Our model, with the forms of its operators that a context leaves."""
    graphdef, params, rest = nnx.split(config.build(rngs=nnx.Rngs(0)), nnx.Param, ...)
    call = jax_call(lambda params, x: nnx.merge(graphdef, params, rest)(x)[0], params, part)

    def first():
        with tracing():
            return call()

    return first


def as_one_block(config: Any, part: str, **options: Any) -> Call:
    """Our model, of whose blocks only one is compiled."""
    return ours(without_kernels, dataclasses.replace(config, **options), part)


def equinox(config: Any, part: str) -> Call:
    """An LSTM with the cells of Equinox, in a `lax.scan` for each layer."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    key = jax.random.key(0)
    embedding = eqx.nn.Embedding(VOCAB_SIZE, FEATURES, key=key)
    cells = [eqx.nn.LSTMCell(FEATURES, FEATURES, key=key) for _ in range(config.num_layers)]
    head = eqx.nn.Linear(FEATURES, VOCAB_SIZE, key=key)
    params, rest = eqx.partition((embedding, cells, head), eqx.is_array)

    def logits(params, tokens):
        embedding, cells, head = eqx.combine(params, rest)

        def of_row(tokens):
            x = jax.vmap(embedding)(tokens)
            zeros = jax.numpy.zeros(FEATURES)
            for cell in cells:

                def step(state, x_t, cell=cell):
                    state = cell(x_t, state)
                    return state, state[0]

                _, x = jax.lax.scan(step, (zeros, zeros), x)
            return jax.vmap(head)(x)

        return jax.vmap(of_row)(tokens)

    return jax_call(logits, params, part)


def transformers(config: Any, part: str) -> Call:
    """The model of transformers, which is not compiled."""
    import torch
    from transformers.models.auto import AutoConfig, AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.tensor(TOKENS[:, :-1], dtype=torch.long)

    def step():
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    return partial(torch.no_grad()(model), tokens) if part == FORWARD else step


class Contender(NamedTuple):
    """A contender, and the models and parts that it solves."""

    framework: Framework
    make: Callable[[Any, str], Call]
    solves: Callable[[Any, str], bool] = lambda config, part: True


def is_large_step(config: Any, part: str) -> bool:
    """Whether it is a training step of an architecture whose blocks take long to compile."""
    return part == STEP and config.family in large_configs()


def has_kernels(config: Any, part: str) -> bool:
    """Whether twinscan-native has kernels for the model."""
    return not isinstance(config, HyenaDNALanguageModelConfig | RWKV7LanguageModelConfig)


CONTENDERS = {
    OURS: Contender("jax", partial(ours, without_kernels)),
    NATIVE: Contender("jax", partial(ours, with_kernels), has_kernels),
    f"{OURS}, scan_layers": Contender(
        "jax", partial(as_one_block, scan_layers=True), is_large_step
    ),
    f'{OURS}, remat="full"': Contender("jax", partial(as_one_block, remat="full"), is_large_step),
    PLAIN: Contender(  # Hyena's convolutions have no scans
        "jax",
        partial(ours, only_definitions),
        lambda config, part: not isinstance(config, HyenaDNALanguageModelConfig),
    ),
    "equinox": Contender(
        "jax", equinox, lambda config, part: isinstance(config, RNNLanguageModelConfig)
    ),
    "transformers": Contender("torch", transformers, lambda config, part: hasattr(config, "to_hf")),
}


def first_burst(name: str, config: Any, part: str) -> Burst:
    """A contender's first call. Runs in a new process."""
    return burst(CONTENDERS[name].make(config, part), seconds=0)


def measure(session: Session) -> Outcome:
    """Measures all models."""
    outcome = Outcome()
    for model, config in configs(session.quick).items():
        for part in (FORWARD, STEP):
            found = session.measure_once(
                f"{__name__}: {model}, {part}", partial(measure_part, session, model, config, part)
            )
            show(session.console, found)
            outcome += found
    return outcome


def measure_part(session: Session, model: str, config: Any, part: str) -> Outcome:
    """Measures the first call of each contender, and once more if other processes ran."""
    outcome = Outcome()
    for name, contender in CONTENDERS.items():
        if not contender.solves(config, part):
            continue
        bursts: list[Burst] = []
        try:
            while len(bursts) < 2 and all(each.others > QUIET_LOAD for each in bursts):
                with Workers(session.workers.platform, session.workers.allocator) as new:
                    bursts.append(new.call(contender.framework, first_burst, name, config, part))
        except (ImportError, CannotSolve) as error:
            outcome.left_out[f"{name} ({model})"] = str(error)
            continue
        quietest = min(bursts, key=lambda each: each.others)
        outcome.rows.append(
            Row(
                model,
                part,
                name,
                contender.framework,
                1e3 * quietest.times[0],
                disturbed=quietest.others > QUIET_LOAD,
            )
        )
    target = {PLAIN: MAX_RATIO}
    outcome.checks = check_targets(outcome.rows, {OURS: target, NATIVE: target})
    return outcome
