"""`python -m train.generate`: continue a prompt with a run's model."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jax_models import stream, tune_allocator
from jax_models.options import CheckedFields
from train.checks import NotNegative, Seed
from train.run import Run
from twinscan.command_line import CommandLineError, NonFiniteError, parse, run_command

PROG = "python -m train.generate"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Continue a prompt, character by character from the model's carried state."""

    run: Path
    """The folder of the run."""
    prompt: str | None = None
    """The text to continue; by default the vocabulary's first character."""
    num_tokens: int = 500
    """Characters to write."""
    temperature: NotNegative = 1.0
    """Flattens (> 1) or sharpens (< 1) the distribution."""
    top_k: int | None = None
    """Draw from the k likeliest characters only."""
    greedy: bool = False
    """Take the likeliest character each time."""
    seed: Seed = 0
    """The same seed gives the same text."""

    def __post_init__(self):
        """Refuse what the annotations do not allow, and options that exclude each other."""
        super().__post_init__()
        if self.prompt == "":
            raise ValueError("prompt: expected at least one character")
        if self.greedy and (self.temperature != 1.0 or self.top_k is not None):
            raise ValueError("greedy: expected without --temperature and --top-k")


def main(args: Sequence[str], prog: str = PROG) -> None:
    """Print the prompt and its continuation."""
    arguments = parse(Arguments, args, prog=prog)
    run = Run.open(arguments.run)
    prompt = run.vocabulary.characters[0] if arguments.prompt is None else arguments.prompt
    tokens = run.vocabulary.encode(prompt, "--prompt")[None]
    model = run.model()
    try:
        continuation = stream(
            model,
            tokens,
            arguments.num_tokens,
            key=jax.random.key(arguments.seed),
            temperature=0.0 if arguments.greedy else arguments.temperature,
            top_k=arguments.top_k,
        )
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    print(prompt, end="", flush=True)
    try:
        for token in continuation:
            print(run.vocabulary.decode(token), end="", flush=True)
    except ValueError as error:
        raise NonFiniteError(str(error)) from None
    finally:
        print()


if __name__ == "__main__":
    tune_allocator()
    run_command(main, sys.argv[1:], PROG)
