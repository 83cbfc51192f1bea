"""Loads the initial weights of a new run, from another run or from a checkpoint."""

from pathlib import Path

import jax
import numpy as np
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
from train.run.folder import PRETRAINED, VOCABULARY, Run
from train.trainer.step import Trainer
from twinscan.command_line import CommandLineError
from twinscan.heartbeat import doing

FLAG = "--init: "
OPTIONS = "the --preset and --model.… options"


def initialize(trainer: Trainer, path: Path) -> None:
    """Sets the initial parameters of a trainer to the weights of a run or of a checkpoint.

    Raises:
        CommandLineError: the weights are those of another model; all differences are listed.

    """
    model = trainer.model(trainer.initial_params)
    if is_run(path):
        params = nnx.state(Run.open(path).model(), nnx.Param)
    else:
        with faults_of_checkpoint(path, FLAG), doing(f"reading {path}"):
            weights = without_other_parts(model.config, open_checkpoint(path).weights)
            try:
                params = nnx.state(from_torch(model, weights), nnx.Param)
            except ValueError as error:
                broken = broken_packages(ENTRY_POINTS)
                hint = f"; if the model of the checkpoint has other sizes, give {OPTIONS}"
                raise ValueError(f"{error}{broken}{hint}") from None
    # A run may be that of another model. A checkpoint may have another parameter than the model.
    found, expected = dtypes_and_shapes(params), dtypes_and_shapes(trainer.initial_params)
    differences = [
        f"{name.removesuffix('.value')}: expected {expected.get(name, 'none')}, "
        f"got {found.get(name, 'none')}"
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]
    if differences:
        raise CommandLineError(f"{FLAG}{path}: {'; '.join(differences)}")
    trainer.initial_params = jax.tree.map(np.asarray, params)  # not on a device yet


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
