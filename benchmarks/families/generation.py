"""A generated token, sampling included.

The time beyond that of the same steps in one compiled loop of 200 is overhead. Tokens are generated
right after a prompt of one token, and late in a long text. The greedy tokens of larger models are
compared with those of the package `rwkv`, which accepts one row at a time, or with those of
transformers and its cache, and with our steps without `generate`.
"""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.compare import Session, compare
from benchmarks.models import large_configs
from benchmarks.outcome import Check, Outcome
from benchmarks.problem import OURS, Call, Contenders, Problem
from jax_models import LanguageModel, generate, stream
from jax_models.models.decoder import SHORTEST_CACHE, padded_length
from jax_models.models.sampling import sample
from train.run.config import PRESETS

PART, GREEDY_PART = "a token", "a step of all rows"
LOOP = f"{OURS}, one compiled loop"
LATER, TORCH_LOOP = f"{OURS}, later", "torch loop"
STEPS, PACKAGE, TRANSFORMERS = f"{OURS}, step by step", "rwkv", "transformers"
MAX_OVERHEAD = 60
"""The largest allowed overhead, in microseconds per token."""
MAX_STEPS_RATIO = 1.15
"""The largest allowed ratio of the time of `generate` to that of as many steps."""


@dataclasses.dataclass(frozen=True)
class Generation(Problem):
    """The model of a preset with random weights, which continues one row."""

    preset: str
    late: int
    num_tokens: int = 200
    parts = (PART,)
    solved_by = (OURS, LATER, LOOP, TORCH_LOOP)

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


@dataclasses.dataclass(frozen=True)
class Greedy(Problem):
    """A model with random weights, and the rows that it continues."""

    config: Any
    """The config of the model."""
    batch: int
    solved_by: tuple[str, ...] | None
    num_tokens: int = 32
    parts = (GREEDY_PART,)
    rounds = 3

    @property
    def name(self) -> str:
        """The architecture and the sizes, in a few words."""
        config = self.config
        sizes = f"{config.num_layers} layers of {config.features}, batch {self.batch}"
        return f"{config.family}, {sizes}"

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        is_large = self.config.features >= 768
        return {PACKAGE: 1.0, TRANSFORMERS: 1.05} if platform == "cpu" and is_large else {}


def presets(quick: bool) -> list[Generation]:
    """The recurrent presets."""
    if quick:
        return [Generation("lstm", late=1000)]
    return [Generation(name, late=10_000) for name in ("lstm", "hawk", "rwkv")]


def greedy(quick: bool) -> list[Greedy]:
    """Models with 12 layers of 768 and their peers, or two tiny models in a quick run."""
    sizes = {"num_layers": 1, "features": 192} if quick else {}
    rwkv, *others = large_configs(**sizes).values()
    return [
        *(Greedy(rwkv, batch, (OURS, STEPS, PACKAGE)) for batch in ((2,) if quick else (1, 8))),
        *(Greedy(config, 1, (OURS, STEPS, TRANSFORMERS)) for config in others[: 1 if quick else 4]),
    ]


def problems(quick: bool) -> list[Generation | Greedy]:
    """The presets, and the larger models."""
    return [*presets(quick), *greedy(quick)]


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

    return Call(call, parts=problem.num_tokens)


@contenders.jax(OURS)
def ours(problem: Generation | Greedy) -> Call:
    """Our `stream`, token by token, or our `generate`, several rows at once."""
    if isinstance(problem, Generation):
        return _tokens(problem, 0)
    model = problem.config.build(rngs=nnx.Rngs(0))
    prompt = jnp.ones((problem.batch, 1), jnp.int32)

    def call():
        tokens = generate(model, prompt, problem.num_tokens, key=jax.random.key(0), temperature=0)
        np.asarray(tokens)

    return Call(call, parts=problem.num_tokens)


@contenders.jax(STEPS)
def step_by_step(problem: Greedy) -> Call:
    """Our compiled step, called for one token after the other."""
    model = problem.config.build(rngs=nnx.Rngs(0))
    # Give the cache the size that it has in `generate`.
    size = padded_length(1 + problem.num_tokens, SHORTEST_CACHE, sys.maxsize)
    model = nnx.view(model, raise_if_not_found=False, max_length=size)
    graphdef, params = nnx.split(model)

    @partial(jax.jit, donate_argnums=2)
    def step(params, token, state):
        logits, state = nnx.merge(graphdef, params).step(token, state)
        return jnp.argmax(logits, axis=-1).astype(token.dtype), state

    def call():
        token, state = jnp.ones(problem.batch, jnp.int32), model.init_state(problem.batch)
        for _ in range(problem.num_tokens):
            token, state = step(params, token, state)
        np.asarray(token)

    return Call(call, parts=problem.num_tokens)


@contenders.jax(LATER)
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

    return Call(call, parts=problem.num_tokens)


@contenders.torch(TORCH_LOOP)
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

    return Call(call, parts=problem.num_tokens)


@contenders.torch(PACKAGE)
def rwkv_package(problem: Greedy) -> Call:
    """The `RWKV.forward` of the package, which compiles parts of it with `torch.jit`."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    import torch
    from rwkv.model import RWKV  # pyright: ignore[reportMissingImports]

    import torch_ref

    twin = torch_ref.RWKV7LanguageModel.from_config(problem.config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        torch.save(twin.state_dict(), f"{path}.pth")
        model = RWKV(model=str(path), strategy="cpu fp32")

    @torch.no_grad()
    def call():
        rows = [(1, None)] * problem.batch
        for _ in range(problem.num_tokens):
            for i, (token, state) in enumerate(rows):
                logits, state = model.forward([token], state)
                rows[i] = int(logits.argmax()), state

    return Call(call, parts=problem.num_tokens)


@contenders.torch(TRANSFORMERS)
def transformers_loop(problem: Greedy) -> Call:
    """The model of transformers, which carries its cache from token to token."""
    import torch
    from transformers.models.auto import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**problem.config.to_hf())
    model: Any = AutoModelForCausalLM.from_config(config).eval()

    @torch.no_grad()
    def call():
        token, cache = torch.ones(problem.batch, 1, dtype=torch.long), None
        for _ in range(problem.num_tokens):
            found = model(token, cache=cache, use_cache=True)
            token, cache = found.logits[:, -1:].argmax(-1), found.cache
        token.tolist()

    return Call(call, parts=problem.num_tokens)


def measure(session: Session) -> Outcome:
    """Measures all contenders, and checks the overheads."""
    outcome = compare(session, __name__, contenders, problems(session.quick))
    for problem in greedy(session.quick):
        ours, steps = (outcome.row(problem.name, GREEDY_PART, name).ms for name in (OURS, STEPS))
        what = f"{OURS} / {STEPS}"
        outcome.checks.append(Check(problem.name, GREEDY_PART, what, ours / steps, MAX_STEPS_RATIO))
    for problem in presets(session.quick):
        ours, alone = (outcome.row(problem.name, PART, name).ms for name in (OURS, LOOP))
        outcome.checks.append(
            Check(problem.name, PART, "overhead", 1e3 * (ours - alone), MAX_OVERHEAD, unit=" µs")
        )
        size = problem.state_bytes() / 1024
        outcome.notes.append(f"{problem.name}: a state of {size:.1f} KiB, however long the text.")
    return outcome
