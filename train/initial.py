"""The weights with which a new run begins, of another run or of a file."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jax_models import LanguageModel, from_torch
from train.digest import described
from train.run import Run
from train.step import Trainer
from twinscan.command_line import CommandLineError, in_one_line


def initialise(trainer: Trainer, path: Path) -> None:
    """Give a trainer's model the weights of a run's folder, or of a file that `export` wrote.

    Raises:
        CommandLineError: they are not those of such a model; all differences are listed.

    """
    model = trainer.model(trainer.initial_params)
    if path.is_dir():
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


def _loaded(model: LanguageModel, path: Path) -> LanguageModel:
    try:
        path.stat()  # safetensors has words of its own for a missing file
        return from_torch(model, load_file(path))
    except OSError as error:
        raise CommandLineError(f"--init: {path}: {error.strerror or error}") from None
    except (SafetensorError, TypeError, ValueError) as error:
        raise CommandLineError(f"--init: {path}: {in_one_line(error)}") from None
