"""The weights with which a new run begins, of another run or of a checkpoint."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jax_models import LanguageModel, LanguageModelConfig, from_torch
from jax_models.models.load import config_of
from jax_models.weights.checkpoint import open_checkpoint
from train.digest import described
from train.run import VOCABULARY, Run
from train.step import Trainer
from twinscan.command_line import CommandLineError, in_one_line


def initialise(trainer: Trainer, path: Path) -> None:
    """Give a trainer's model the weights of a run's folder, or of a checkpoint.

    Raises:
        CommandLineError: they are not those of such a model; all differences are listed.

    """
    model = trainer.model(trainer.initial_params)
    if is_run(path):
        params = nnx.state(Run.open(path).model(), nnx.Param)
        found, expected = described(params), described(trainer.initial_params)
        differences = [
            f"{name.removesuffix('.value')}: expected {expected.get(name, 'none')}, "
            f"got {found.get(name, 'none')}"
            for name in sorted({*found, *expected})
            if found.get(name) != expected.get(name)
        ]
        if differences:
            raise CommandLineError(f"--init: {path}: {'; '.join(differences)}")
    else:
        params = nnx.state(_loaded(model, path), nnx.Param)
    trainer.initial_params = jax.tree.map(np.asarray, params)  # on no device yet


def is_run(path: Path) -> bool:
    """Is it the folder of a run, rather than a checkpoint?"""
    return (path / VOCABULARY).exists()


def model_of(path: Path) -> LanguageModelConfig | None:
    """The config of a checkpoint's language model; None if its keys do not tell it.

    Raises:
        CommandLineError: there is no whole checkpoint.

    """
    with _faults_of(path):
        checkpoint = open_checkpoint(path)
    try:
        config = config_of(*checkpoint)
    except ValueError:
        return None  # with the options' model, what differs is listed
    return config if isinstance(config, LanguageModelConfig) else None


def _loaded(model: LanguageModel, path: Path) -> LanguageModel:
    with _faults_of(path):
        return from_torch(model, open_checkpoint(path).weights)


@contextlib.contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandLineError(f"--init: {error.filename or path}: {error.strerror}") from None
    except (ImportError, TypeError, ValueError) as error:
        raise CommandLineError(f"--init: {path}: {in_one_line(error)}") from None
