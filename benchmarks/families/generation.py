"""A generated token, sampling included.

The time beyond that of the same steps in one compiled loop of 200 is overhead. Tokens are generated
right after a prompt of one token, and late in a long text.
"""

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.compare import Session, compare
from benchmarks.outcome import Check, Outcome
from benchmarks.problem import OURS, Call, Contenders, Problem
from jax_models import LanguageModel, stream
from jax_models.models.sampling import sample
from train.config import PRESETS

PART = "a token"
LOOP = f"{OURS}, one compiled loop"
MAX_OVERHEAD = 60
"""The largest allowed overhead, in microseconds per token."""


@dataclasses.dataclass(frozen=True)
class Generation(Problem):
    """The model of a preset with random weights, which continues one row."""

    preset: str
    late: int
    num_tokens: int = 200
    parts = (PART,)

    @property
    def name(self) -> str:
        """The name of the preset."""
        return self.preset

    def model(self) -> LanguageModel:
        """The model of the preset."""
        return PRESETS[self.preset].model.build(rngs=nnx.Rngs(0))

    def state_bytes(self) -> int:
        """The size of the model's state in bytes."""
        state = jax.eval_shape(lambda: self.model().init_state(1))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def problems(quick: bool) -> list[Generation]:
    """The recurrent presets."""
    if quick:
        return [Generation("lstm", late=1000)]
    return [Generation(name, late=10_000) for name in ("lstm", "hawk", "rwkv")]


contenders = Contenders()


def _tokens(problem: Generation, skip: int) -> Call:
    def tokens() -> Iterator[Any]:
        model, prompt = problem.model(), np.zeros((1, 1), np.int32)
        while True:
            yield from islice(stream(model, prompt, 100_000, key=jax.random.key(0)), skip, None)

    endless = tokens()

    def call():
        for _ in islice(endless, problem.num_tokens):
            pass

    return Call(call, lambda: call() or {}, parts=problem.num_tokens)


@contenders.jax(OURS)
def ours(problem: Generation) -> Call:
    """Our `stream`, token by token."""
    return _tokens(problem, 0)


@contenders.jax(f"{OURS}, later")
def ours_late(problem: Generation) -> Call:
    """Our `stream` from token 10,000 on, or from token 1,000 in a quick run."""
    return _tokens(problem, problem.late)


@contenders.jax(LOOP)
def loop(problem: Generation) -> Call:
    """Our steps and sampling in a `lax.scan`."""
    graphdef, params = nnx.split(problem.model())

    @jax.jit
    def run(params, token, key):
        model = nnx.merge(graphdef, params)

        def step(carry, key):
            token, state = carry
            logits, state = model.step(token, state)
            return (sample(logits, key).astype(token.dtype), state), None

        keys = jax.random.split(key, problem.num_tokens)
        return jax.lax.scan(step, (token, model.init_state(1)), keys)[0][0]

    def call():
        jax.block_until_ready(run(params, jnp.zeros(1, jnp.int32), jax.random.key(0)))

    return Call(call, lambda: call() or {}, parts=problem.num_tokens)


@contenders.torch("torch loop")
def torch_loop(problem: Generation) -> Call:
    """The torch twin, which carries its state from token to token."""
    import torch

    import torch_ref

    config = PRESETS[problem.preset].model
    twin = getattr(torch_ref, type(config).__name__.removesuffix("Config"))
    model = twin.from_config(config).eval()

    @torch.no_grad()
    def call():
        token, state = torch.zeros(1, 1, dtype=torch.long), None
        for _ in range(problem.num_tokens):
            logits, state = model(token, state)
            token = torch.multinomial(torch.softmax(logits[:, -1], dim=-1), num_samples=1)
        token.item()

    return Call(call, lambda: call() or {}, parts=problem.num_tokens)


def measure(session: Session) -> Outcome:
    """Measures all contenders, and checks the overhead."""
    outcome = compare(session, __name__, contenders, problems(session.quick))
    for problem in problems(session.quick):
        ours, alone = (outcome.row(problem.name, PART, name).ms for name in (OURS, LOOP))
        outcome.checks.append(
            Check(problem.name, PART, "overhead", 1e3 * (ours - alone), MAX_OVERHEAD, unit=" µs")
        )
        size = problem.state_bytes() / 1024
        outcome.notes.append(f"{problem.name}: a state of {size:.1f} KiB, however long the text.")
    return outcome
