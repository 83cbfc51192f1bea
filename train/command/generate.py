"""The command `twinscan generate`: continues a prompt with a run's model."""

if __name__ == "__main__":
    from twinscan.command_line import run_module

    run_module("train.command.generate")

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np
import tyro

from jax_models import LanguageModel, stream
from jax_models.options import CheckedFields
from train.checks import NotNegative, Positive, Probability, Seed, Texts
from train.command.chat import ChatTemplate
from train.command.generation_files import tokens_of_run
from train.command.pretrained import (
    Numbers,
    faults_of_checkpoint,
    plain_tokens,
    read_model,
    tokens_of,
)
from train.data.tokens import Tokens, until_end
from train.data.vocabulary import first_token
from train.run.folder import Run
from train.trainer.mesh import no_mesh
from twinscan.command_line import CommandLineError, NonFiniteError, parse
from twinscan.heartbeat import doing

PROG = "python -m train.command.generate"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Continue a prompt with the model of a run, or with a published checkpoint."""

    run: Path | None = None
    """The folder of the run."""
    weights: Path | None = None
    """A published checkpoint instead of a run: a file or a folder that load_pretrained can read,
    such as RWKV's .pth or the folder of transformers' RecurrentGemma."""
    prompt: Annotated[Texts, tyro.conf.UseAppendAction] = ()
    """The text to continue. Several prompts, each after a --prompt, are continued together. By
    default, a run's model continues its end-of-text token, or else the first token of its
    vocabulary."""
    prompt_tokens: str | None = None
    """The tokens to continue, as integers separated by spaces. The output is tokens, too."""
    chat: bool = False
    """Treat each prompt as a message to a chat model, and print its answer. The checkpoint's folder
    has the chat template."""
    system: str | None = None
    """The system message that precedes each prompt of a --chat."""
    num_tokens: int = 500
    """The largest number of tokens to write. An end-of-text token stops the output earlier."""
    stop: Annotated[Texts, tyro.conf.UseAppendAction] = ()
    """A token that ends the output, such as "<|im_end|>", in addition to the model's end-of-text
    tokens. Several can be given, each after a --stop."""
    temperature: NotNegative = 1.0
    """Divides the logits: above 1 flattens the distribution, below 1 sharpens it."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only."""
    top_p: Probability | None = None
    """Sample only from the fewest tokens whose probabilities sum to this number or more."""
    repetition_penalty: Positive = 1.0
    """Above 1 makes tokens less likely that occur in the prompt or have been written already."""
    greedy: bool = False
    """Always take the likeliest token."""
    seed: Seed = 0
    """The same seed gives the same text."""

    def __post_init__(self):
        """Checks each field, and fields that exclude each other."""
        super().__post_init__()
        if (self.run is None) == (self.weights is None):
            raise ValueError("expected exactly one of --run and --weights")
        if "" in self.prompt:
            raise ValueError("prompt: expected at least one character")
        if self.prompt_tokens is not None and not self.prompt_tokens.strip():
            raise ValueError("prompt_tokens: expected at least one token")
        if self.prompt and self.prompt_tokens is not None:
            raise ValueError("expected at most one of --prompt and --prompt-tokens")
        if self.weights is not None and not self.prompt and self.prompt_tokens is None:
            raise ValueError("weights: expected with --prompt or --prompt-tokens")
        if self.chat and (self.weights is None or not self.prompt):
            raise ValueError("chat: expected with --weights and --prompt")
        if self.system is not None and not self.chat:
            raise ValueError("system: expected with --chat")
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            raise ValueError("greedy: expected without --temperature, --top-k and --top-p")


class PromptedModel(NamedTuple):
    """A model and the prompts that it continues."""

    model: LanguageModel
    vocabulary: Tokens
    prompts: list[np.ndarray]
    shown_prompts: list[str]
    """The text that is printed before each continuation."""


@no_mesh()
def main(args: Sequence[str], prog: str = PROG) -> None:
    """Prints the prompt and its continuation."""
    arguments = parse(Arguments, args, prog=prog)
    with doing("opening the model and the prompts"):
        opened = _open_model_and_prompts(arguments)
    vocabulary = opened.vocabulary
    extra = [_token(vocabulary, text) for text in arguments.stop]
    vocab_size = opened.model.config.vocab_size
    ends = [end for end in vocabulary.ends if 0 <= end < vocab_size]
    tokens, mask = padded_left(opened.prompts)
    try:
        continuation = stream(
            opened.model,
            tokens,
            arguments.num_tokens,
            key=jax.random.key(arguments.seed),
            mask=mask,
            temperature=0.0 if arguments.greedy else arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            repetition_penalty=arguments.repetition_penalty,
            stop_tokens=[*ends, *extra],
        )
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    # A single text is printed as it is drawn, several are printed one after the other.
    try:
        with doing("compiling, and reading the prompt"):
            drawn = [*itertools.islice(continuation, 1)]
        if len(tokens) > 1:
            with doing(lambda: f"drawing token {len(drawn)} of at most {arguments.num_tokens}"):
                drawn.extend(continuation)
            rows = np.stack(drawn, axis=1)
        else:
            rows = [(token[0] for token in itertools.chain(drawn, continuation))]
        for prompt, row in zip(opened.shown_prompts, rows, strict=True):
            print(prompt, end="", flush=True)
            try:
                for piece in vocabulary.pieces(until_end(row, *extra)):
                    print(piece, end="", flush=True)
            finally:
                print()
    except ValueError as error:
        raise NonFiniteError(str(error)) from None


def padded_left(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as rows of one length, padded with zeros on the left, and their mask.

    Raises:
        CommandLineError: a prompt has no tokens.

    """
    if not all(map(len, prompts)):
        raise CommandLineError("--prompt: expected at least one token")
    time = max(map(len, prompts))
    rows = [np.pad(prompt, (time - len(prompt), 0)) for prompt in prompts]
    masks = [np.arange(time) >= time - len(prompt) for prompt in prompts]
    return np.stack(rows), np.stack(masks)


def _token(vocabulary: Tokens, text: str) -> int:
    """The token that a --stop names."""
    tokens = plain_tokens(vocabulary, text, "--stop")
    if len(tokens) != 1:
        raise CommandLineError(
            f"--stop: expected a single token, got {text!r}, which has {len(tokens)}"
        )
    return int(tokens[0])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _open_model_and_prompts(arguments: Arguments) -> PromptedModel:
    """The model, its vocabulary, and the prompts as tokens and as text."""
    prompts, numbers = arguments.prompt, arguments.prompt_tokens
    run = None if arguments.run is None else Run.open(arguments.run)
    if run is not None:
        model, vocabulary = run.model(), tokens_of_run(run)
    else:
        assert arguments.weights is not None
        model = read_model(arguments.weights)
        vocabulary = tokens_of(model, arguments.weights) if prompts else Numbers()
    if numbers is not None:
        return PromptedModel(
            model, Numbers(), [Numbers().encode(numbers, "--prompt-tokens")], [numbers]
        )
    if not prompts:
        assert run is not None
        first = np.array([first_token(run.vocabulary)])
        return PromptedModel(model, vocabulary, [first], ["".join(vocabulary.pieces(first))])
    if not arguments.chat:
        encoded = [vocabulary.encode(prompt, "--prompt") for prompt in prompts]
        return PromptedModel(model, vocabulary, encoded, [*prompts])
    # The template writes all special tokens, so the tokenizer must add none.
    assert arguments.weights is not None
    with faults_of_checkpoint(arguments.weights, "--chat: "):
        template = ChatTemplate(arguments.weights)
        before = [] if arguments.system is None else [_message("system", arguments.system)]
        texts = [template.render([*before, _message("user", prompt)]) for prompt in prompts]
    encoded = [plain_tokens(vocabulary, text, "--prompt") for text in texts]
    return PromptedModel(model, vocabulary, encoded, [""] * len(texts))
