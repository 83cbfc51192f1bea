"""`python -m train`: train a language model by character on a text."""

import argparse
import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from jax.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_models import LanguageModel, generate, tune_allocator
from train.config import PRESETS, TrainConfig
from train.curve import draw_curve
from train.export import describe_errors, export
from train.loop import Trainer, TrainState
from train.run import Run, build_trainer
from train.text import Vocabulary, Windows, batches, read_text, split
from twinscan.command_line import CommandLineError, NonFiniteError, command, parse, run_command

PROG = "python -m train"

STEPS_PER_CALL = 10
"""So many steps of the optimiser cost one dispatch, unless an evaluation comes first."""


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


RESUME_MAY_CHANGE = {"text", "num_steps", "num_epochs", "eval_every", "eval_batches"}


def parse_arguments(args: Sequence[str], prog: str = PROG) -> tuple[Arguments, TrainConfig]:
    """The arguments, and the config from which the command line started."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--num-steps", "--num_steps", nargs="?")
    first.add_argument("--preset", nargs="?", default="all-work")
    first.add_argument("--resume", nargs="?", type=Path)
    start, _ = first.parse_known_args(args)
    if start.resume is not None:
        default = Arguments(Run.open(start.resume).config, resume=start.resume)
    else:
        preset = start.preset if start.preset in PRESETS else "all-work"
        default = Arguments(PRESETS[preset], preset=preset)
    if start.num_steps is not None:  # in the place of a preset's epochs
        config = dataclasses.replace(default.config, num_epochs=None)
        default = dataclasses.replace(default, config=config)
    arguments = parse(Arguments, args, prog=prog, default=default)
    if start.num_steps is not None and arguments.config.num_epochs is not None:
        raise CommandLineError("--num-epochs: expected without --num-steps")
    if arguments.resume is not None and arguments.out is not None:
        raise CommandLineError("--out: a run is resumed in its own folder")
    if arguments.resume is not None and arguments.preset != default.preset:
        raise CommandLineError("--preset: a run is resumed with its own config")
    if arguments.resume is not None:
        refuse_changes(default.config, arguments.config)
    elif arguments.preset != "all-work" and arguments.config.text is None:
        raise CommandLineError(f"--text: the preset {arguments.preset} needs a text file")
    return arguments, default.config


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


def train(run: Run, trainer: Trainer, parts: dict[str, Windows], console: Console) -> TrainState:
    """Train to the config's last step, from the newest checkpoint if there is one.

    Raises:
        NonFiniteError: a loss or a weight is not finite. The newest checkpoint is from before.

    """
    config = run.config
    resuming = run.checkpoints.latest_step is not None
    state = run.restore(trainer) if resuming else trainer.initial_state()
    sampler = partial(batches, batch_size=config.batch_size)
    training = sampler(parts["train"], seed=config.seed)
    evaluation = {
        name: np.stack([sampler(part, seed=config.seed + 1)[i] for i in range(config.eval_batches)])
        for name, part in parts.items()
    }
    start_step, start_time = int(state.step), time.perf_counter()
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    console.print(f"{'step':>7}  {'train loss':>10}  {'val loss':>8}  {'seconds':>7}")
    with progress:
        bar = progress.add_task("", total=config.num_steps, completed=start_step)
        step = start_step
        called = (step, np.zeros(0))
        while True:
            if step % config.eval_every == 0 or step == config.num_steps:
                check_losses(run, *called)
                losses = {
                    name: float(trainer.evaluate(state.params, batches).mean())
                    for name, batches in evaluation.items()
                }
                if not np.isfinite([*losses.values()]).all() or not trainer.is_finite(state):
                    raise not_finite(run, step, "the weights or their losses are")
                seconds = time.perf_counter() - start_time
                run.log({"step": step, **losses, "seconds": round(seconds, 2)})
                console.print(
                    f"{step:7d}  {losses['train']:10.4f}  {losses['val']:8.4f}  {seconds:7.1f}"
                )
                run.checkpoints.save(step, state)
            if step == config.num_steps:
                break
            next_evaluation = step - step % config.eval_every + config.eval_every
            stop = min(step + STEPS_PER_CALL, next_evaluation, config.num_steps)
            chunk = [training[i] for i in range(step, stop)]
            chunk += chunk[-1:] * (STEPS_PER_CALL - len(chunk))  # one program for every call
            state, losses = trainer.steps(state, trainer.put(np.stack(chunk)), stop - step)
            before, called = called, (step, losses)
            check_losses(run, *before)  # while the device works on this call
            step = stop
            progress.update(bar, completed=step)
    run.checkpoints.close()
    return state


def check_losses(run: Run, start: int, losses: ArrayLike) -> None:
    """Raise where a loss of the steps from `start` on is not finite."""
    for step, loss in enumerate(np.asarray(losses), start):
        if not np.isfinite(loss):
            raise not_finite(run, step, "the loss is")


def not_finite(run: Run, step: int, what: str) -> NonFiniteError:
    """The end of a run, with the checkpoint that is left."""
    run.checkpoints.close()
    return NonFiniteError(
        f"step {step}: {what} not finite; the last finite checkpoint is of step "
        f"{run.checkpoints.latest_step}, in {run.folder} (a new run may need a lower "
        "--optimizer.learning-rate, or --optimizer.clip-norm)"
    )


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
    line = f"{command('train.generate')} --run {shlex.quote(str(run.folder))}"
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
