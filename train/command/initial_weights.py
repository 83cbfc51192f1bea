"""Loads the initial weights of a new run, from another run or from a checkpoint."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from flax import nnx

from jax_models import LanguageModelConfig, from_torch
from jax_models.entry_points import broken_packages
from jax_models.models.architecture import ENTRY_POINTS
from jax_models.models.load import config_of, without_other_parts
from jax_models.weights.checkpoint import CONFIG, open_checkpoint
from train.command.generation_files import files_of_checkpoint
from train.command.pretrained import TOKENIZER, faults_of_checkpoint
from train.data.vocabulary import Subwords, Vocabulary
from train.process.digest import dtypes_and_shapes
from train.run.config import TrainConfig
from train.run.folder import PRETRAINED, VOCABULARY, Run, build_trainer
from train.trainer.step import Trainer
from twinscan.command_line import CommandLineError
from twinscan.heartbeat import doing

FLAG = "--init: "
OPTIONS = "the --preset and --model.… options"


def read_params(trainer: Trainer, config: TrainConfig, path: Path) -> nnx.State:
    """Reads the parameters of a run or of a checkpoint in the shardings of a new run's trainer.

    Raises:
        CommandLineError: the weights are those of another model; all differences are listed.

    """
    if is_run(path):
        # Compare the models before the weights are read. The source has its own kind of optimizer.
        source = open_source(path)
        model = nnx.eval_shape(lambda: source.config.model.build(rngs=nnx.Rngs(0)))
        check_params(nnx.state(model, nnx.Param), trainer, path)
        config = dataclasses.replace(
            config,
            optimizer=source.config.optimizer,
            num_steps=source.config.num_steps,
            freeze=source.config.freeze,
        )
        with faults_of_run():
            return source.restore_params(build_trainer(config, source.vocabulary))
    with faults_of_checkpoint(path, FLAG), doing(f"reading {path}"):
        model = trainer.model(trainer.abstract_params)
        weights = without_other_parts(model.config, open_checkpoint(path).weights)
        try:
            params = nnx.state(from_torch(model, weights), nnx.Param)
        except ValueError as error:
            broken = broken_packages(ENTRY_POINTS)
            hint = f"; if the model of the checkpoint has other sizes, give {OPTIONS}"
            raise ValueError(f"{error}{broken}{hint}") from None
    check_params(params, trainer, path)  # loading may replace `a_param` of an RGLRU by `a`
    return params


@contextlib.contextmanager
def faults_of_run() -> Iterator[None]:
    """Puts `--init: ` before errors about the run that provides the initial weights."""
    try:
        yield
    except CommandLineError as error:
        raise CommandLineError(f"{FLAG}{error}") from None


def open_source(path: Path) -> Run:
    """Opens the run whose weights are the initial ones."""
    with faults_of_run():
        return Run.open(path)


def check_params(params: nnx.State, trainer: Trainer, path: Path) -> None:
    """Raises an error unless the parameters have the names, shapes and dtypes of the trainer's."""
    found, expected = dtypes_and_shapes(params), dtypes_and_shapes(trainer.abstract_params)
    differences = [
        f"{name.removesuffix('.value')}: expected {expected.get(name, 'none')}, "
        f"got {found.get(name, 'none')}"
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]
    if differences:
        raise CommandLineError(f"{FLAG}{path}: {'; '.join(differences)}")


def files_to_keep(path: Path | None, vocabulary: Vocabulary) -> dict[str, bytes] | None:
    """The files of a checkpoint that a run keeps in its folder, by name.

    None if the run does not begin from a checkpoint, or if it does not have its tokenizer.
    """
    if path is None or not isinstance(vocabulary, Subwords):
        return None
    folder = path / PRETRAINED if is_run(path) else path
    with faults_of_checkpoint(path, FLAG):
        if not (folder / TOKENIZER).is_file():
            return None
        if (folder / TOKENIZER).read_text(encoding="utf-8") != vocabulary.definition:
            return None
        config = {CONFIG: (folder / CONFIG).read_bytes()} if (folder / CONFIG).is_file() else {}
        return files_of_checkpoint(folder) | config


def is_run(path: Path) -> bool:
    """Whether the path is the folder of a run, rather than a checkpoint."""
    return (path / VOCABULARY).exists()


def model_config_of(path: Path) -> LanguageModelConfig:
    """The config of a checkpoint's language model.

    Raises:
        CommandLineError: the checkpoint is missing, damaged, or that of a model that is not
            supported, or the weights do not determine the config.

    """
    with faults_of_checkpoint(path, FLAG):
        checkpoint = open_checkpoint(path)
        try:
            config = config_of(*checkpoint)
        except (NotImplementedError, ValueError) as error:
            hint = f"; if twinscan train wrote this file, give {OPTIONS} of its run"
            raise ValueError(f"{error}{'' if checkpoint.config else hint}") from None
        if not isinstance(config, LanguageModelConfig):
            raise ValueError(f"expected a language model, got a {config.family}")
        return config
