"""The command `twinscan evaluate`: computes the loss of a run's model on a text."""

if __name__ == "__main__":
    from twinscan.command_line import run_module

    run_module("train.command.evaluate")

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from flax import nnx

from jax_models.options import CheckedFields
from train.checks import Paths
from train.data.text import Text
from train.data.windows import Windows, split
from train.run.folder import Run
from train.trainer.mesh import no_mesh
from train.trainer.step import Trainer
from twinscan.command_line import parse
from twinscan.heartbeat import doing, line_printed

PROG = "python -m train.command.evaluate"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Compute the mean loss and the mean probability of the next token over both parts of a text.

    Each part is cut into rows of the run's window, and a prediction sees only its own row.
    """

    run: Path
    """The folder of the run."""
    text: Paths = ()
    """UTF-8 files or folders; by default the text that the run was trained on."""
    num_tokens: int | None = None
    """How many tokens of each part to predict, from its beginning. None: all of them."""
    cache: Path | None = None
    """The folder that caches tokenized texts, as in `twinscan train`."""


BATCHES_AT_ONCE = 16
"""Number of batches that are read and evaluated in one call."""


def losses(
    trainer: Trainer, params: nnx.State, rows: Windows, batch_size: int
) -> Iterator[np.ndarray]:
    """The losses of all predicted tokens, in the order of the rows."""
    whole = len(rows) - len(rows) % batch_size
    for start in range(0, whole, BATCHES_AT_ONCE * batch_size):
        group = rows[start : min(start + BATCHES_AT_ONCE * batch_size, whole)]
        group = group.reshape(-1, batch_size, group.shape[1])
        yield np.ravel(trainer.evaluate(params, group))
    if whole < len(rows):
        yield np.ravel(trainer.evaluate(params, rows[whole:][None]))


def all_losses(
    trainer: Trainer, params: nnx.State, rows: Windows, batch_size: int, name: str
) -> np.ndarray:
    """The losses of a part, while `heartbeat` can say how many of its tokens are done."""
    found: list[np.ndarray] = []
    total = len(rows) * rows.window

    def describe() -> str:
        return f"evaluating the part {name}: {sum(map(len, found)):,} of {total:,} tokens"

    with doing(describe):
        found.extend(losses(trainer, params, rows, batch_size))
    return np.concatenate(found)


@no_mesh()
def main(args: Sequence[str], prog: str = PROG) -> None:
    """Prints the mean loss and probability of both parts of a text."""
    arguments = parse(Arguments, args, prog=prog)
    num_tokens = arguments.num_tokens
    run = Run.open(arguments.run)
    config, vocabulary = run.config, run.vocabulary
    trainer, params = run.restore_trainer()
    with doing("reading the text"):
        text = Text(arguments.text or config.text, config.separator)
        tokens = text.tokens(vocabulary, arguments.cache)
    for name, part in split(tokens, config.window, config.val_rows).items():
        num_rows = None if num_tokens is None else math.ceil(num_tokens / config.window)
        rows = dataclasses.replace(part, starts=part.rows.starts[:num_rows])
        loss = all_losses(trainer, params, rows, config.batch_size, name)[:num_tokens]
        print(
            f"{name}: {loss.mean(dtype=np.float64):.4f} nats per {vocabulary.unit}, "
            f"mean probability {np.exp(-loss).mean(dtype=np.float64):.4f}, "
            f"over {loss.size:,} {vocabulary.unit}s"
        )
        line_printed()
