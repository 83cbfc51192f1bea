"""A training step of the presets: what the allocator is worth.

`train.step.Trainer` runs with the preset's sizes and optimizer, on random tokens of a vocabulary of
65.
"""

import dataclasses

import jax
import numpy as np

from benchmarks.problem import OURS, Call, Contenders, Problem
from train.config import PRESETS
from train.run import build_trainer

VOCAB = 65


@dataclasses.dataclass(frozen=True)
class TrainingStep(Problem):
    """The training step of a preset."""

    preset: str
    parts = ("training step",)

    @property
    def name(self) -> str:
        """The preset and the batch size."""
        config = PRESETS[self.preset]
        return f"{self.preset}, {config.batch_size} × {config.window}"


def problems(quick: bool) -> list[TrainingStep]:
    """One preset of each architecture."""
    presets = ("lstm", "hawk", "rwkv", "annotated-hyena-small", "annotated-attention-small")
    return [TrainingStep(preset) for preset in (presets[:1] if quick else presets)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: TrainingStep) -> Call:
    """The step of `python -m train`."""
    config = PRESETS[problem.preset]
    model = dataclasses.replace(config.model, vocab_size=VOCAB)
    config = dataclasses.replace(config, model=model, num_steps=1000, num_epochs=None)
    trainer = build_trainer(config, devices=jax.devices()[:1])
    shape = (config.batch_size, config.window + 1)
    tokens = np.random.default_rng(0).integers(VOCAB, size=shape, dtype=np.int32)
    state, tokens = trainer.initial_state(), trainer.put(tokens)

    def call():
        nonlocal state
        state, measures = trainer.step(state, tokens)
        return jax.block_until_ready(measures.loss)

    return Call(call, lambda: {"y": np.asarray(call())})
