"""`python -m train`: train a language model by character on a text."""

import contextlib
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
from train.export import describe_errors, export
from train.loop import train
from train.monitor import check_tensorboard
from train.run import EXPORTED, Run, build_trainer, locked
from train.text import Vocabulary, digest_of, read_text, split
from twinscan.command_line import CommandLineError, command, parse, parse_known, run_command

PROG = "python -m train"
DEFAULT_PRESET = "all-work"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a language model by character on a text, or go on with a run."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()
    preset: Literal[tuple(PRESETS)] | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Where the options start from: by default all-work, the seed's experiment; with the others
    --text FILE."""
    out: Path | None = None
    """The run's folder, new or empty; by default runs/PRESET, numbered if that is taken. Where it
    has a run of the same options, the command goes on with it."""
    resume: Path | None = None
    """The folder of a run to go on with; its own config is where the options start from."""
    allow_changed_text: bool = False
    """Go on with a run although its text has changed since."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The arguments that decide where the others start from."""

    preset: Literal[tuple(PRESETS)] | None = None  # pyright: ignore[reportInvalidTypeForm]
    resume: Path | None = None
    num_steps: str | None = None  # `Arguments` checks the number


RESUME_MAY_CHANGE = {"text", "num_steps", "num_epochs", "eval_every", "eval_batches"} | {
    "log_every",
    "tensorboard",
    "max_skipped",
}


def parse_arguments(args: Sequence[str], prog: str = PROG) -> tuple[Arguments, TrainConfig]:
    """The arguments, and the config from which the command line started."""
    start = parse_known(Start, args, prog=prog)
    preset = start.preset or DEFAULT_PRESET
    before = PRESETS[preset] if start.resume is None else Run.open(start.resume).config
    if start.num_steps is not None:  # in the place of a preset's epochs
        before = dataclasses.replace(before, num_epochs=None)
    default = Arguments(before, start.preset, resume=start.resume)
    arguments = parse(Arguments, args, prog=prog, default=default)
    if start.num_steps is not None and arguments.config.num_epochs is not None:
        raise CommandLineError("--num-epochs: expected without --num-steps")
    if arguments.resume is not None and arguments.out is not None:
        raise CommandLineError("--out: a run is resumed in its own folder")
    if arguments.resume is not None and arguments.preset is not None:
        raise CommandLineError("--preset: a run is resumed with its own config")
    if arguments.resume is not None:
        refuse_changes(before, arguments.config)
    elif preset != DEFAULT_PRESET and arguments.config.text is None:
        raise CommandLineError(f"--text: the preset {preset} needs a text file")
    return arguments, before


def changed(before: TrainConfig, config: TrainConfig) -> set[str]:
    """The names of the fields in which two configs differ."""
    fields = dataclasses.fields(config)
    return {f.name for f in fields if getattr(config, f.name) != getattr(before, f.name)}


def refuse_changes(before: TrainConfig, config: TrainConfig) -> None:
    """Raise where a run that is resumed would become another."""
    if others := changed(before, config) - RESUME_MAY_CHANGE:
        raise CommandLineError(
            f"--resume: cannot change {', '.join(sorted(others))} of a run, "
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


def default_folder(folder: Path, config: TrainConfig) -> Path:
    """The folder, or one with a number behind: of the unfinished run of this config, or a new one.

    Of all that are there, the last is looked at.
    """
    names = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    taken = list(itertools.takewhile(Path.exists, itertools.chain([folder], names)))
    with contextlib.suppress(CommandLineError):
        if taken and (run := Run.open(taken[-1])).config == config and not run.is_finished:
            return run.folder
    return folder.with_name(f"{folder.name}-{len(taken) + 1}") if taken else folder


def report(run: Run, model: LanguageModel, console: Console) -> None:
    """Draw the curve, write a sample, export to the twin and compare."""
    curve, weights = run.draw_curve(), run.folder / EXPORTED
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


def config_of_new_run(
    config: TrainConfig, preset: TrainConfig, vocabulary: Vocabulary
) -> TrainConfig:
    """The config with a model of the vocabulary's size."""
    if config.model.vocab_size not in (preset.model.vocab_size, len(vocabulary)):
        raise CommandLineError(
            f"--model.vocab-size: the text has {len(vocabulary)} distinct characters, "
            f"got {config.model.vocab_size}"
        )
    model = dataclasses.replace(config.model, vocab_size=len(vocabulary))
    return dataclasses.replace(config, model=model)


def entered(folder: Path, arguments: Arguments, config: TrainConfig, text: str) -> Run:
    """The run in the folder, which goes on with the config; a new one if there is none."""
    if not Run.is_in(folder):
        return Run.create(folder, config, text)
    run = Run.open(folder)
    is_changed = run.text_digest != digest_of(text)
    if is_changed:
        if not arguments.allow_changed_text:
            raise CommandLineError(
                f"--text: it is not the text that the run in {folder} began with "
                "(--allow-changed-text goes on with this one, --out begins another run)"
            )
        run.text_digest = digest_of(text)
    others = changed(run.config, config)
    if others and arguments.resume is None:
        raise CommandLineError(
            f"--out: {folder} has a run with another {', '.join(sorted(others))} "
            "(--resume goes on with it)"
        )
    extend(run, config)
    if is_changed or others:
        run.write()
    run.checkpoints.clean()
    return run


def main(args: Sequence[str], prog: str = PROG) -> None:
    """Train as the arguments say."""
    arguments, preset = parse_arguments(args, prog)
    config = arguments.config
    check_tensorboard(config)
    text = read_text(config.text)
    resumed = None if arguments.resume is None else Run.open(arguments.resume)
    vocabulary = Vocabulary.of(text) if resumed is None else resumed.vocabulary
    parts = split(vocabulary.encode(text), config.window, config.val_rows)
    config = config.with_steps(len(parts["train"].rows))
    if config.text is not None:
        config = dataclasses.replace(config, text=config.text.absolute())
    if resumed is None:
        config = config_of_new_run(config, preset, vocabulary)
        default = Path("runs") / (arguments.preset or DEFAULT_PRESET)
        folder = arguments.out or default_folder(default, config)
    else:
        folder = resumed.folder
    trainer = build_trainer(config)
    with locked(folder):
        run = entered(folder, arguments, config, text)
        if run.is_finished:
            print(f"{folder}: the run has made its {config.num_steps} steps")
            return
        console = Console()
        if unused := jax.device_count() - trainer.mesh.size:
            console.print(
                f"the batch of {config.batch_size} rows divides over {trainer.mesh.size} of "
                f"{jax.device_count()} devices: {unused} are not used"
            )
        state = train(run, trainer, parts, console)
        params = jax.device_put(state.averaged_params, jax.devices()[0])
        report(run, trainer.model(params), console)


if __name__ == "__main__":
    tune_allocator()
    run_command(main, sys.argv[1:], PROG)
