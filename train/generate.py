"""`python -m train.generate`: continue a prompt with a run's model."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jax_models import LanguageModel, stream, tune_allocator
from jax_models.options import CheckedFields
from train.checks import NotNegative, Seed
from train.pretrained import Numbers, Tokens, read_model, tokens_of
from train.run import Run
from twinscan.command_line import CommandLineError, NonFiniteError, parse, run_command

PROG = "python -m train.generate"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Continue a prompt from the model's carried state, with a run's model or another's weights."""

    run: Path | None = None
    """The folder of the run."""
    weights: Path | None = None
    """A checkpoint of RWKV-4, 6 or 7, .pth or .safetensors, in the place of a run."""
    prompt: str | None = None
    """The text to continue; of a run by default the vocabulary's first character."""
    prompt_tokens: str | None = None
    """The tokens to continue, integers between spaces; the continuation is tokens, too."""
    num_tokens: int = 500
    """Tokens to write: of a run, characters."""
    temperature: NotNegative = 1.0
    """Flattens (> 1) or sharpens (< 1) the distribution."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    greedy: bool = False
    """Take the likeliest token each time."""
    seed: Seed = 0
    """The same seed gives the same text."""

    def __post_init__(self):
        """Refuse what the annotations do not allow, and options that exclude each other."""
        super().__post_init__()
        if (self.run is None) == (self.weights is None):
            raise ValueError("expected exactly one of --run and --weights")
        if self.prompt == "":
            raise ValueError("prompt: expected at least one character")
        if self.prompt_tokens is not None and not self.prompt_tokens.strip():
            raise ValueError("prompt_tokens: expected at least one token")
        if self.prompt is not None and self.prompt_tokens is not None:
            raise ValueError("expected at most one of --prompt and --prompt-tokens")
        if self.weights is not None and self.prompt is self.prompt_tokens is None:
            raise ValueError("weights: expected with --prompt or --prompt-tokens")
        if self.greedy and (self.temperature != 1.0 or self.top_k is not None):
            raise ValueError("greedy: expected without --temperature and --top-k")


def main(args: Sequence[str], prog: str = PROG) -> None:
    """Print the prompt and its continuation."""
    arguments = parse(Arguments, args, prog=prog)
    model, vocabulary, prompt = _opened(arguments)
    option = "--prompt" if arguments.prompt_tokens is None else "--prompt-tokens"
    try:
        continuation = stream(
            model,
            vocabulary.encode(prompt, option)[None],
            arguments.num_tokens,
            key=jax.random.key(arguments.seed),
            temperature=0.0 if arguments.greedy else arguments.temperature,
            top_k=arguments.top_k,
        )
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    print(prompt, end="", flush=True)
    try:
        for piece in vocabulary.pieces(continuation):
            print(piece, end="", flush=True)
    except ValueError as error:
        raise NonFiniteError(str(error)) from None
    finally:
        print()


def _opened(arguments: Arguments) -> tuple[LanguageModel, Tokens, str]:
    """The model, what its tokens stand for, and the prompt."""
    if arguments.run is not None:
        run = Run.open(arguments.run)
        model, vocabulary, prompt = run.model(), run.vocabulary, run.vocabulary.characters[0]
    else:
        assert arguments.weights is not None
        model, vocabulary, prompt = read_model(arguments.weights), None, ""
    if arguments.prompt_tokens is not None:
        return model, Numbers(), arguments.prompt_tokens
    return model, vocabulary or tokens_of(model), arguments.prompt or prompt


if __name__ == "__main__":
    tune_allocator()
    run_command(main, sys.argv[1:], PROG)
