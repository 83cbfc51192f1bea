"""`python -m train.generate`: continue a prompt with a run's model."""

if __name__ == "__main__":
    from twinscan.command_line import run_module

    run_module("train.generate")

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jax_models import LanguageModel, stream
from jax_models.options import CheckedFields
from train.checks import NotNegative, Seed
from train.mesh import no_mesh
from train.pretrained import Numbers, read_model, tokens_of
from train.run import Run
from train.tokens import Tokens
from train.vocabulary import first_token
from twinscan.command_line import CommandLineError, NonFiniteError, parse

PROG = "python -m train.generate"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Continue a prompt with the model of a run, or with a published checkpoint."""

    run: Path | None = None
    """The folder of the run."""
    weights: Path | None = None
    """A published checkpoint instead of a run: a file or a folder that load_pretrained can read,
    such as RWKV's .pth or the folder of transformers' RecurrentGemma."""
    prompt: str | None = None
    """The text to continue. By default, a run's model continues its end-of-text token, or else the
    first token of its vocabulary."""
    prompt_tokens: str | None = None
    """The tokens to continue, as integers separated by spaces. The output is tokens, too."""
    num_tokens: int = 500
    """The largest number of tokens to write. An end-of-text token stops the output earlier."""
    temperature: NotNegative = 1.0
    """Divides the logits: above 1 flattens the distribution, below 1 sharpens it."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only."""
    greedy: bool = False
    """Always take the likeliest token."""
    seed: Seed = 0
    """The same seed gives the same text."""

    def __post_init__(self):
        """Checks each field, and fields that exclude each other."""
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


@no_mesh()
def main(args: Sequence[str], prog: str = PROG) -> None:
    """Prints the prompt and its continuation."""
    arguments = parse(Arguments, args, prog=prog)
    model, vocabulary, prompt, tokens = _opened(arguments)
    try:
        continuation = stream(
            model,
            tokens[None],
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


def _opened(arguments: Arguments) -> tuple[LanguageModel, Tokens, str, np.ndarray]:
    """The model, its vocabulary, and the prompt as text and as tokens."""
    prompt, numbers = arguments.prompt, arguments.prompt_tokens
    run = None if arguments.run is None else Run.open(arguments.run)
    if run is not None:
        model, vocabulary = run.model(), run.vocabulary
    else:
        assert arguments.weights is not None
        model = read_model(arguments.weights)
        vocabulary = Numbers() if prompt is None else tokens_of(model, arguments.weights)
    if numbers is not None:
        return model, Numbers(), numbers, Numbers().encode(numbers, "--prompt-tokens")
    if prompt is None:
        assert run is not None
        first = np.array([first_token(run.vocabulary)])
        return model, vocabulary, "".join(vocabulary.pieces(first)), first
    return model, vocabulary, prompt, vocabulary.encode(prompt, "--prompt")
