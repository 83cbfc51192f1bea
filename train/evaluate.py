"""`python -m train.evaluate`: the loss of a run's model on all of a text."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from train.command_line import one_line_errors, parse
from train.run import Run, build_trainer
from train.text import read_text, split

PROG = "python -m train.evaluate"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Mean loss, in nats per character, over both parts of a text cut into windows."""

    run: Path
    """The folder of the run."""
    text: Path | None = None
    """A UTF-8 file; by default the text that the run was trained on."""


def main(args: Sequence[str]) -> None:
    """Print the losses."""
    arguments = parse(Arguments, args, prog=PROG)
    run = Run.open(arguments.run)
    config = run.config
    trainer = build_trainer(config, jax.devices()[:1])
    params = run.restore(trainer).params
    tokens = run.vocabulary.encode(read_text(arguments.text or config.text))
    for name, part in split(tokens, config.window).items():
        count = (len(part) - 1) // config.window
        starts = config.window * np.arange(count)[:, None]
        windows = part[starts + np.arange(config.window + 1)[None, :]]
        whole = count - count % config.batch_size
        groups = [
            windows[:whole].reshape(-1, config.batch_size, config.window + 1),
            windows[whole:][None],
        ]
        total = sum(
            float(trainer.evaluate(params, group)) * group[..., 1:].size
            for group in groups
            if group.size
        )
        size = windows[:, 1:].size
        print(f"{name}: {total / size:.4f} nats per character over {size:,} characters")


if __name__ == "__main__":
    with one_line_errors(PROG):
        main(sys.argv[1:])
