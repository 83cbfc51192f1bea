"""Greedy tokens of an RWKV-7, one or sixteen rows at once.

The peer is the package `rwkv`, which accepts one row at a time.
"""

import dataclasses
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.problem import OURS, Call, Contenders, Problem
from jax_models import RWKV7LanguageModelConfig, generate

PART = "a step of all rows"


@dataclasses.dataclass(frozen=True)
class Decoding(Problem):
    """A model with random weights, and the rows that it continues."""

    config: RWKV7LanguageModelConfig
    batch: int
    num_tokens: int = 64
    parts = (PART,)
    rounds = 5

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        layers, features = self.config.num_layers, self.config.features
        return f"{layers} layers of {features}, batch {self.batch}"

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        return {"rwkv": 1.0} if platform == "cpu" and self.config.features >= 768 else {}


def problems(quick: bool) -> list[Decoding]:
    """Models with the sizes of RWKV-7 World 0.1B, or a tiny one in a quick run."""
    if quick:
        return [Decoding(RWKV7LanguageModelConfig(300, features=64, num_layers=2), 2)]
    world = RWKV7LanguageModelConfig(65_536, features=768, num_layers=12)
    return [Decoding(world, batch) for batch in (1, 16)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Decoding) -> Call:
    """Our `generate`."""
    model = problem.config.build(rngs=nnx.Rngs(0))
    prompt = jnp.ones((problem.batch, 1), jnp.int32)

    def call():
        tokens = generate(model, prompt, problem.num_tokens, key=jax.random.key(0), temperature=0)
        np.asarray(tokens)

    return Call(call, parts=problem.num_tokens)


@contenders.torch("rwkv")
def rwkv_package(problem: Decoding) -> Call:
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
