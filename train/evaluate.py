"""`python -m train.evaluate`: how well a run's model predicts a text."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jax_models import tune_allocator
from jax_models.options import CheckedFields
from train.run import Run, build_trainer
from train.step import Trainer
from train.text import read_text, split
from twinscan.command_line import parse, run_command

PROG = "python -m train.evaluate"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Mean loss, and mean probability of the character that comes next, over both parts of a text.

    Each part is cut into rows of the run's window, and a prediction sees its own row alone.
    """

    run: Path
    """The folder of the run."""
    text: Path | None = None
    """A UTF-8 file; by default the text that the run was trained on."""
    num_tokens: int | None = None
    """How many characters of each part to predict, row by row from its first. None: all."""


def losses(trainer: Trainer, params: nnx.State, rows: np.ndarray, batch_size: int) -> np.ndarray:
    """The loss of each token that the rows predict, in order."""
    whole = len(rows) - len(rows) % batch_size
    groups = [rows[:whole].reshape(-1, batch_size, rows.shape[1]), rows[whole:][None]]
    return np.concatenate(
        [np.ravel(trainer.evaluate(params, group)) for group in groups if group.size]
    )


def main(args: Sequence[str], prog: str = PROG) -> None:
    """Print the losses and the probabilities."""
    arguments = parse(Arguments, args, prog=prog)
    num_tokens = arguments.num_tokens
    run = Run.open(arguments.run)
    config = run.config
    trainer = build_trainer(config, jax.devices()[:1])
    params = run.restore(trainer).averaged_params
    tokens = run.vocabulary.encode(read_text(arguments.text or config.text), "--text")
    for name, part in split(tokens, config.window, config.val_rows).items():
        num_rows = None if num_tokens is None else math.ceil(num_tokens / config.window)
        rows = part.rows[:num_rows]
        loss = losses(trainer, params, rows, config.batch_size)[:num_tokens].astype(np.float64)
        print(
            f"{name}: {loss.mean():.4f} nats per character, "
            f"mean probability {np.exp(-loss).mean():.4f}, over {loss.size:,} characters"
        )


if __name__ == "__main__":
    tune_allocator()
    run_command(main, sys.argv[1:], PROG)
