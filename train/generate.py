"""`python -m train.generate`: continue a prompt with a run's model."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jax_models import stream, tune_allocator
from train.command_line import CommandLineError, NonFiniteError, one_line_errors, parse, seed_faults
from train.run import Run

PROG = "python -m train.generate"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Continue a prompt, character by character from the model's carried state."""

    run: Path
    """The folder of the run."""
    prompt: str | None = None
    """The text to continue; by default the vocabulary's first character."""
    num_tokens: int = 500
    """Characters to write."""
    temperature: float = 1.0
    """Flattens (> 1) or sharpens (< 1) the distribution."""
    top_k: int | None = None
    """Draw from the k likeliest characters only."""
    greedy: bool = False
    """Take the likeliest character each time."""
    seed: int = 0
    """The same seed gives the same text."""


def main(args: Sequence[str]) -> None:
    """Print the prompt and its continuation."""
    arguments = parse(Arguments, args, prog=PROG)
    run = Run.open(arguments.run)
    prompt = run.vocabulary.characters[0] if arguments.prompt is None else arguments.prompt
    if not prompt:
        raise CommandLineError("--prompt: expected at least one character")
    for fault in seed_faults(arguments.seed):
        raise CommandLineError(fault)
    tokens = run.vocabulary.encode(prompt)[None]
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
    with one_line_errors(PROG):
        main(sys.argv[1:])
