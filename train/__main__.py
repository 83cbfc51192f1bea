"""`python -m train`: train a language model by character on a text."""

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

from jax_models import LanguageModel, generate, tune_allocator
from train.config import PRESETS, TrainConfig
from train.curve import draw_curve
from train.export import describe_errors, export
from train.loop import train
from train.run import Run, build_trainer
from train.text import Vocabulary, read_text, split
from twinscan.command_line import CommandLineError, command, parse, parse_known, run_command

PROG = "python -m train"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a language model by character on a text, or go on with a run."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()
    preset: Literal[tuple(PRESETS)] = "all-work"  # pyright: ignore[reportInvalidTypeForm]
    """Where the options start from: the seed's experiment, or a model for --text FILE."""
    out: Path | None = None
    """The run's folder, new or empty; by default runs/PRESET, numbered if that is taken."""
    resume: Path | None = None
    """The folder of a run to go on with; its own config is where the options start from."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The arguments that decide where the others start from."""

    preset: Literal[tuple(PRESETS)] = "all-work"  # pyright: ignore[reportInvalidTypeForm]
    resume: Path | None = None
    num_steps: str | None = None  # `Arguments` checks the number


RESUME_MAY_CHANGE = {"text", "num_steps", "num_epochs", "eval_every", "eval_batches"}


def parse_arguments(args: Sequence[str], prog: str = PROG) -> tuple[Arguments, TrainConfig]:
    """The arguments, and the config from which the command line started."""
    start = parse_known(Start, args, prog=prog)
    before = PRESETS[start.preset] if start.resume is None else Run.open(start.resume).config
    if start.num_steps is not None:  # in the place of a preset's epochs
        before = dataclasses.replace(before, num_epochs=None)
    default = Arguments(before, start.preset, resume=start.resume)
    arguments = parse(Arguments, args, prog=prog, default=default)
    if start.num_steps is not None and arguments.config.num_epochs is not None:
        raise CommandLineError("--num-epochs: expected without --num-steps")
    if arguments.resume is not None and arguments.out is not None:
        raise CommandLineError("--out: a run is resumed in its own folder")
    if arguments.resume is not None and arguments.preset != "all-work":
        raise CommandLineError("--preset: a run is resumed with its own config")
    if arguments.resume is not None:
        refuse_changes(before, arguments.config)
    elif arguments.preset != "all-work" and arguments.config.text is None:
        raise CommandLineError(f"--text: the preset {arguments.preset} needs a text file")
    return arguments, before


def refuse_changes(before: TrainConfig, config: TrainConfig) -> None:
    """Raise where a run that is resumed would become another."""
    changed = {
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(before, field.name)
    }
    if changed - RESUME_MAY_CHANGE:
        raise CommandLineError(
            f"--resume: cannot change {', '.join(sorted(changed - RESUME_MAY_CHANGE))} of a run, "
            f"only {', '.join(sorted(RESUME_MAY_CHANGE))}"
        )


def extend(run: Run, config: TrainConfig) -> None:
    """Let the run go on with the config, to its last step."""
    before, latest = run.config, run.checkpoints.latest_step or 0
    if config.num_steps < latest:
        raise CommandLineError(f"--num-steps: the run has done {latest} steps already")
    if config.num_steps != before.num_steps and config.optimizer.schedule != "constant":
        raise CommandLineError(
            f"--num-steps: the run's {config.optimizer.schedule} schedule ends at step "
            f"{before.num_steps}; only a constant rate can go on"
        )
    run.config = config


def free_folder(folder: Path) -> Path:
    """The folder, or the first with a number behind that does not exist."""
    names = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([folder], names) if not path.exists())


def report(run: Run, model: LanguageModel, console: Console) -> None:
    """Draw the curve, write a sample, export to the twin and compare."""
    curve, weights = run.folder / "curve.png", run.folder / "twin.safetensors"
    draw_curve(run.metrics(), curve)
    export(model, weights)
    prompt = run.vocabulary.characters[0]
    tokens = generate(
        model,
        run.vocabulary.encode(prompt)[None],
        300,
        key=jax.random.key(run.config.seed),
    )
    console.rule("a sample")
    console.print(prompt + run.vocabulary.decode(tokens), markup=False, highlight=False)
    console.rule()
    console.print(describe_errors(model, weights), highlight=False, soft_wrap=True)
    console.print(f"loss curve: {curve}", f"torch weights: {weights}", sep="\n", highlight=False)
    line = f"{command('twinscan')} generate --run {shlex.quote(str(run.folder))}"
    console.print(f"go on writing: {line}", highlight=False, markup=False, soft_wrap=True)


def main(args: Sequence[str], prog: str = PROG) -> None:
    """Train as the arguments say."""
    arguments, before = parse_arguments(args, prog)
    config = arguments.config
    text = read_text(config.text)
    run = None if arguments.resume is None else Run.open(arguments.resume)
    vocabulary = Vocabulary.of(text) if run is None else run.vocabulary
    parts = split(vocabulary.encode(text), config.window, config.val_rows)
    config = config.with_steps(len(parts["train"].rows))
    if run is not None:
        extend(run, config)
    else:
        if config.model.vocab_size not in (before.model.vocab_size, len(vocabulary)):
            raise CommandLineError(
                f"--model.vocab-size: the text has {len(vocabulary)} distinct characters, "
                f"got {config.model.vocab_size}"
            )
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, vocab_size=len(vocabulary)),
            text=None if config.text is None else config.text.absolute(),
        )
    trainer = build_trainer(config)
    if run is None:
        folder = arguments.out or free_folder(Path("runs") / arguments.preset)
        run = Run.create(folder, config, vocabulary)
    run.write_config()
    console = Console()
    state = train(run, trainer, parts, console)
    params = jax.device_put(state.params, jax.devices()[0])
    report(run, trainer.model(params), console)


if __name__ == "__main__":
    tune_allocator()
    run_command(main, sys.argv[1:], PROG)
