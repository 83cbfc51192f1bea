"""The command `twinscan train`: trains a language model on a text."""

import contextlib
import dataclasses
import itertools
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console

from jax_models import LanguageModel, __version__, generate
from jax_models.entry_points import broken_packages
from jax_models.models.architecture import ENTRY_POINTS
from train.command.export import describe_errors, export
from train.command.initial_weights import (
    FLAG,
    files_to_keep,
    is_run,
    model_config_of,
    open_source,
    read_params,
)
from train.command.pretrained import faults_of_checkpoint, special_tokens, tokenizer_of
from train.data.text import Text
from train.data.vocabulary import NAMES, Vocabulary, first_token
from train.data.windows import Windows, split
from train.process.hosts import (
    HostsConfig,
    check_agreement,
    is_first,
    join,
    run_on_all,
    run_on_first,
)
from train.run.config import PRESETS, TrainConfig, changes, to_fields
from train.run.folder import EXPORTED, Run, build_trainer, check_content, locked
from train.run.loop import train
from train.run.monitor import check_tensorboard
from train.trainer.mesh import no_mesh, provide_devices
from train.trainer.optimizer import build_schedule
from train.trainer.step import Trainer, TrainState
from twinscan.command_line import CommandLineError, command_line_of_twinscan, parse, parse_known
from twinscan.heartbeat import doing, written_by

PROG = "python -m train"
DEFAULT_PRESET = "all-work"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a language model on a text, or resume a run.

    The options --model.… depend on the preset: --preset hawk --help lists Hawk's.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()
    preset: Literal[tuple(PRESETS)] | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Sets the defaults of the other options. The default preset, all-work, is a small RNN that
    learns one sentence by heart; the other presets need --text FILE."""
    out: Path | None = None
    """The run's folder, new or empty; by default runs/PRESET, with a number if that exists. If it
    holds a run with the same options, the command resumes that run."""
    resume: Path | None = None
    """The folder of a run to resume. Its config gives the defaults of all options."""
    allow_changed_text: bool = False
    """Resume a run even if its text has changed."""
    cache: Path | None = None
    """The folder that caches tokenized texts for all runs. None: twinscan in $XDG_CACHE_HOME, or in
    ~/.cache."""
    hosts: HostsConfig = HostsConfig()
    keep_warmup: Annotated[bool, tyro.conf.Suppress] = False
    """Keep a warm-up that is too long for the run, because the command line sets it or the run
    began with it. Otherwise, the warm-up is shortened."""


@dataclasses.dataclass(frozen=True)
class EarlyArguments:
    """The arguments that determine the defaults of the others."""

    preset: Literal[tuple(PRESETS)] | None = None  # pyright: ignore[reportInvalidTypeForm]
    resume: Path | None = None
    init: Path | None = None
    tokenizer: str | None = None
    num_steps: str | None = None  # `Arguments` checks that it is a number
    warmup_steps: Annotated[str | None, tyro.conf.arg(name="optimizer.warmup-steps")] = None


RESUME_MAY_CHANGE = {
    "num_steps": "a schedule is stretched over the new length",
    "num_epochs": "likewise",
    "optimizer": "the moments stay; a newly enabled average starts here",
    "accumulate": "the same gradients up to rounding, except for a loss that balances experts",
    "mesh": "the same results up to rounding",
    "text": "the same text at another path, or any text with --allow-changed-text",
    "eval_every": "",
    "eval_batches": "",
    "log_every": "",
    "tensorboard": "",
    "max_skipped": "",
}
"""The options that --resume may change, and the effect. Any other change needs a new run."""


def parse_arguments(args: Sequence[str], prog: str = PROG) -> Arguments:
    """Parses the command line, with the defaults of a preset or of an earlier run."""
    try:
        start = parse_known(EarlyArguments, args, prog=prog)
    except CommandLineError as error:
        broken = broken_packages(ENTRY_POINTS) if "--preset" in str(error) else ""
        raise CommandLineError(f"{error}{broken}") from None
    if start.resume is not None and start.preset is not None:
        raise CommandLineError("--preset: a run is resumed with its own config")
    if start.resume is not None and start.init is not None:
        raise CommandLineError("--init: a run is resumed with its own weights")
    default = Arguments(
        config_to_start_from(start),
        start.preset,
        resume=start.resume,
        keep_warmup=start.warmup_steps is not None or start.resume is not None,
    )
    arguments = parse(Arguments, args, prog=prog, default=default)
    if start.num_steps is not None and arguments.config.num_epochs is not None:
        raise CommandLineError("--num-epochs: cannot be combined with --num-steps")
    if arguments.hosts != HostsConfig() and arguments.resume is None and arguments.out is None:
        raise CommandLineError("--out: required if several processes train one run")
    if arguments.resume is not None and arguments.out is not None:
        raise CommandLineError("--out: a run is resumed in its own folder")
    if start.preset not in (None, DEFAULT_PRESET) and not arguments.config.text:
        raise CommandLineError(f"--text: the preset {start.preset} needs a text file")
    return arguments


def config_to_start_from(start: EarlyArguments) -> TrainConfig:
    """The config that gives all options their defaults.

    It is that of the run to resume, or else that of the preset. A run given as --init provides the
    model and, without --preset, all other options, too. A checkpoint given as --init provides the
    model and the tokenizer, unless there is a --preset.
    """
    config = PRESETS[start.preset or DEFAULT_PRESET]
    if start.resume is not None:
        config = Run.open(start.resume).config
    elif start.init is not None and is_run(start.init):
        source = open_source(start.init).config
        try:
            config = dataclasses.replace(config, model=source.model) if start.preset else source
        except ValueError as error:
            raise CommandLineError(
                f"--preset: does not fit the model of {start.init}: {error}"
            ) from None
    elif start.init is not None and start.preset is None:
        config = config_of_checkpoint(config, start.init, start.tokenizer)
    if start.num_steps is not None:  # replaces the epochs
        config = dataclasses.replace(config, num_epochs=None)
    return config


def config_of_checkpoint(config: TrainConfig, path: Path, chosen: str | None) -> TrainConfig:
    """The config with the model of a checkpoint, and with its vocabulary if that is known.

    If the user has `chosen` another tokenizer, the checkpoint's end-of-text token is not used.
    """
    model = model_config_of(path)
    limit = getattr(model, "context_length", None) or config.window
    config = dataclasses.replace(config, model=model, window=min(config.window, limit))
    if (tokenizer := tokenizer_of(config.model, path)) is None:
        return config
    config = dataclasses.replace(config, tokenizer=tokenizer)
    if chosen is not None and absolute_tokenizer(chosen) != absolute_tokenizer(tokenizer):
        return config
    with faults_of_checkpoint(path, FLAG):
        end = special_tokens(path).get("eos_token")
    return dataclasses.replace(config, end_of_text=end)


def default_folder(folder: Path, config: TrainConfig) -> Path:
    """The default folder for a run: the folder itself, or the same name with a number.

    If the last existing folder holds an unfinished run of this config, or a run that never began,
    it is used again.
    """
    names = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    taken = list(itertools.takewhile(Path.exists, itertools.chain([folder], names)))
    with contextlib.suppress(CommandLineError):
        if taken and not Run.is_in(taken[-1]):
            check_content(taken[-1])
            return taken[-1]
        if taken and (run := Run.open(taken[-1])).config == config and not run.is_finished:
            return run.folder
    return folder.with_name(f"{folder.name}-{len(taken) + 1}") if taken else folder


def report(run: Run, model: LanguageModel, console: Console) -> None:
    """Draws the loss curve, writes a sample, exports the weights and compares with the twin."""
    curve, weights = run.draw_curve(), run.folder / EXPORTED
    export(model, weights)
    prompt = np.array([first_token(run.vocabulary)])
    with doing("sampling a text"):
        tokens = generate(model, prompt[None], 300, key=jax.random.key(run.config.seed))
    console.rule("a sample")
    sample = itertools.chain(*map(run.vocabulary.pieces, (prompt, np.asarray(tokens)[0])))
    console.print("".join(sample))
    console.rule()
    print(describe_errors(model, weights))
    print(f"loss curve: {curve}", f"torch weights: {weights}", sep="\n")
    line = f"{command_line_of_twinscan()} generate --run {shlex.quote(str(run.folder))}"
    print(f"generate more text: {line}")
    run.log({"step": run.config.num_steps, "finished": True})


def config_of_new_run(
    config: TrainConfig, default_size: int | None, vocabulary: Vocabulary
) -> TrainConfig:
    """Sets the model's `vocab_size` to the vocabulary's if it is the default.

    Raises:
        CommandLineError: another `vocab_size` is smaller than the vocabulary.

    """
    size = config.model.vocab_size
    if size == default_size:
        size = len(vocabulary)
    if size < len(vocabulary):
        raise CommandLineError(
            f"--model.vocab-size: expected at least {len(vocabulary)}, the vocabulary's "
            f"{vocabulary.unit}s, got {size}"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def change_config(run: Run, config: TrainConfig, *, is_resumed: bool) -> None:
    """Gives the run another config to continue with, and prints the changes in one line.

    Raises:
        CommandLineError: the change would need a new run.

    """
    found = changes(run.config, config)
    if found and not is_resumed:
        raise CommandLineError(
            f"--out: {run.folder} has a run with another {', '.join(sorted(found))} "
            "(use --resume to continue it)"
        )
    if others := {name for name in found if name.split(".")[0] not in RESUME_MAY_CHANGE}:
        raise CommandLineError(
            f"--resume: cannot change {', '.join(sorted(others))} of a run, "
            f"only {', '.join(sorted(RESUME_MAY_CHANGE))}"
        )
    step = run.checkpoints.latest_step or 0
    if config.num_steps < step:
        raise CommandLineError(f"--num-steps: the run has already done {step} steps")
    if not found:
        return
    configs = (run.config, config)
    before, after = (
        np.asarray(build_schedule(each.optimizer, each.num_steps)(step)) for each in configs
    )
    if before != after:
        found[f"the rate of step {step}"] = f"{before:.3g} → {after:.3g}"
    print(f"changed: {', '.join(f'{name} {how}' for name, how in found.items())}")
    run.config = config
    run.write()


def absolute_tokenizer(tokenizer: str) -> str:
    """The tokenizer, with an absolute path if it is a file."""
    return tokenizer if tokenizer in NAMES else str(Path(tokenizer).absolute())


class Plan(NamedTuple):
    """A run before it starts: its config, its data and its folder."""

    config: TrainConfig
    vocabulary: Vocabulary
    parts: dict[str, Windows]
    text_digest: str
    folder: Path


def make_plan(arguments: Arguments) -> Plan:
    """The run that the arguments describe, with its text tokenized.

    Raises:
        CommandLineError: a file cannot be used, or an option is wrong.

    """
    config = arguments.config
    check_tensorboard(config)
    # A run that is resumed, or that provides the initial weights, also provides the vocabulary.
    text = Text(config.text, config.separator)
    if arguments.resume is not None:
        vocabulary = Run.open(arguments.resume).vocabulary
    elif config.init is not None and is_run(config.init):
        vocabulary = open_source(config.init).vocabulary
    else:
        vocabulary = text.build_vocabulary(config.tokenizer, config.end_of_text)
    parts = split(text.tokens(vocabulary, arguments.cache), config.window, config.val_rows)
    # Write down what later commands need: steps instead of epochs, and absolute paths.
    config = config.with_steps(len(parts["train"].rows))
    config = dataclasses.replace(
        config,
        text=tuple(path.absolute() for path in config.text),
        init=config.init and config.init.absolute(),
        tokenizer=absolute_tokenizer(config.tokenizer),
    )
    # Fill in the options that depend on the text or on the length of the run, and the folder.
    if not arguments.keep_warmup:
        config = with_short_warmup(config)
    if arguments.resume is None:
        has_own_size = config.init is not None and arguments.preset is None
        preset = PRESETS[arguments.preset or DEFAULT_PRESET]
        default_size = None if has_own_size else preset.model.vocab_size
        config = config_of_new_run(config, default_size, vocabulary)
        name = arguments.preset or (config.init and config.init.stem) or DEFAULT_PRESET
        folder = arguments.out or default_folder(Path("runs") / name, config)
    else:
        folder = arguments.resume
    return Plan(config, vocabulary, parts, text.digest, folder)


def with_short_warmup(config: TrainConfig) -> TrainConfig:
    """Shortens a warm-up that is at least as long as the run to a tenth of the run."""
    if config.optimizer.warmup_steps < config.num_steps:
        return config
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=config.num_steps // 10)
    return dataclasses.replace(config, optimizer=optimizer)


def build_trainer_of_plan(plan: Plan) -> tuple[Trainer, TrainState | None]:
    """Builds the trainer of a plan, and with --init the state before the first step.

    The state is None without --init, and if the run has checkpoints, from which it resumes.
    """
    config, folder = plan.config, plan.folder
    trainer = build_trainer(config, plan.vocabulary)
    if config.init is None or (Run.is_in(folder) and Run.open(folder).checkpoints.steps):
        return trainer, None
    return trainer, trainer.initial_state(read_params(trainer, config, config.init))


def prepare_run(plan: Plan, arguments: Arguments) -> None:
    """Creates the run of a plan in its folder, or prepares the run in the folder to continue.

    Raises:
        CommandLineError: the folder holds a different run.

    """
    folder = plan.folder
    if not Run.is_in(folder):
        kept = files_to_keep(plan.config.init, plan.vocabulary)
        Run.create(folder, plan.config, plan.vocabulary, plan.text_digest, kept)
        return
    run = Run.open(folder)
    is_changed = run.text_digest != plan.text_digest
    if is_changed:
        if not arguments.allow_changed_text:
            raise CommandLineError(
                f"--text: the run in {folder} began with another text (--allow-changed-text "
                "continues with this one, --out starts a new run)"
            )
        run.text_digest = plan.text_digest
    change_config(run, plan.config, is_resumed=arguments.resume is not None)
    if run.vocabulary != plan.vocabulary:
        raise CommandLineError(
            f"--tokenizer: the run in {folder} has another vocabulary (use --resume to continue it)"
        )
    if is_changed:
        run.write()
    run.checkpoints.clean()


@no_mesh()
def main(args: Sequence[str], prog: str = PROG) -> None:
    """Trains a model, or resumes a run."""
    with doing("reading the options"):
        arguments = parse_arguments(args, prog)
    console = Console(emoji=False, highlight=False, markup=False)
    with written_by(partial(console.print, soft_wrap=True)), doing("preparing the run"):
        run_until_end(arguments, console)


def run_until_end(arguments: Arguments, console: Console) -> None:
    """Trains the run of the arguments to its last step, and writes the report."""
    # JAX must know its devices and the other processes before the first computation.
    if arguments.hosts == HostsConfig():
        provide_devices(arguments.config.mesh)
    join(arguments.hosts)
    console.quiet = not is_first()
    # All processes must agree before any of them writes.
    with doing("reading the text"):
        plan = run_on_all(lambda: make_plan(arguments))
    config = plan.config
    fields = json.dumps(to_fields(config))
    check_agreement({"version": __version__, "config": fields, "text": plan.text_digest})
    with doing("building the model"):
        trainer, state = run_on_all(lambda: build_trainer_of_plan(plan))
    with contextlib.ExitStack() as stack:
        # Only the first process locks and writes the folder; the others open it afterwards.
        def enter() -> None:
            stack.enter_context(locked(plan.folder))
            prepare_run(plan, arguments)

        run_on_first(enter)
        run = run_on_all(lambda: Run.open(plan.folder))
        if run.is_finished:
            line = f"{run.folder}: the run has finished its {config.num_steps} steps"
            console.print(line, soft_wrap=True)
            return
        # Tell the user which choices were made automatically.
        chosen, warmup = arguments.config.optimizer.warmup_steps, config.optimizer.warmup_steps
        if warmup != chosen:
            console.print(
                f"the warm-up is shortened from {chosen} to {warmup} steps, because the run has "
                f"only {config.num_steps}",
                soft_wrap=True,
            )
        if unused := jax.device_count() - trainer.mesh.size:
            console.print(
                f"the {config.batch_size} rows of a batch are divided over {trainer.mesh.size} of "
                f"{jax.device_count()} devices; {unused} devices are not used"
            )
        state = train(run, trainer, plan.parts, console, state)
        with doing("writing the report"):
            params = trainer.addressable(state.averaged_params)
            if is_first():
                report(run, trainer.model(params), console)
