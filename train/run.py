"""A run's folder: config, vocabulary, metrics, checkpoints. It is enough to go on from."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import LanguageModel
from jax_models.options import checked_options
from train.checkpoints import Checkpoints
from train.config import TrainConfig, from_json, to_json
from train.optimizer import build_optimizer
from train.step import Trainer, TrainState
from train.text import Vocabulary
from twinscan.command_line import CommandLineError

CHECKPOINTS = "checkpoints"


class Run:
    """A run, open in its folder."""

    @checked_options
    def __init__(self, folder: Path, config: TrainConfig, vocabulary: Vocabulary):
        self.folder = folder
        self.config = config
        self.vocabulary = vocabulary
        self.checkpoints = Checkpoints(folder / CHECKPOINTS)

    @classmethod
    @checked_options
    def create(cls, folder: Path, config: TrainConfig, vocabulary: Vocabulary) -> "Run":
        """A new run in a folder that is empty or does not exist.

        Raises:
            CommandLineError: the folder has something in it, or cannot be made.

        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise CommandLineError(f"{folder}: the folder is not empty (go on with --resume?)")
        except OSError as error:
            raise CommandLineError(f"{folder}: {error.strerror}") from None
        run = cls(folder, config, vocabulary)
        (folder / CHECKPOINTS).mkdir()
        _write(folder / "vocabulary.json", json.dumps(vocabulary.characters) + "\n")
        run.write_config()
        return run

    @classmethod
    @checked_options
    def open(cls, folder: Path) -> "Run":
        """The run that a folder holds.

        Raises:
            CommandLineError: it holds none, or files of it are missing or damaged.

        """
        for name in ("config.json", "vocabulary.json"):
            if not (folder / name).is_file():
                raise CommandLineError(f"{folder}: not the folder of a run, it has no {name}")
        try:
            config = from_json((folder / "config.json").read_text(encoding="utf-8"))
            vocabulary = Vocabulary(json.loads((folder / "vocabulary.json").read_text("utf-8")))
            if len(vocabulary) != config.model.vocab_size:
                raise ValueError(
                    f"{len(vocabulary)} characters for a model of {config.model.vocab_size}"
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CommandLineError(f"{folder}: damaged config or vocabulary: {error}") from None
        return cls(folder, config, vocabulary)

    def write_config(self) -> None:
        """Write the config, whole or not at all."""
        _write(self.folder / "config.json", to_json(self.config))

    def restore(self, trainer: Trainer) -> TrainState:
        """The state of the newest checkpoint.

        Raises:
            CommandLineError: there is none, or it does not fit the config or cannot be read.

        """
        try:
            return self.checkpoints.restore(trainer.initial_state())
        except FileNotFoundError:
            raise CommandLineError(f"{self.folder}: the run has no complete checkpoint") from None
        except (KeyError, TypeError, ValueError, OSError) as error:
            line = str(error).strip().splitlines()[0]
            raise CommandLineError(
                f"{self.folder}: the checkpoint cannot be read: {line}"
            ) from None

    def model(self) -> LanguageModel:
        """The trained model, on one device."""
        trainer = build_trainer(self.config, jax.devices()[:1])
        return trainer.model(self.restore(trainer).params)

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`, after ending one that a killed run left."""
        with (self.folder / "metrics.jsonl").open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(metrics).encode() + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of `metrics.jsonl`; of two for one step, the later."""
        by_step = {}
        for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # half a line
                record = json.loads(line)
                by_step[record["step"]] = record
        return [by_step[step] for step in sorted(by_step)]


@checked_options
def build_trainer(config: TrainConfig, devices: Sequence[Any] | None = None) -> Trainer:
    """The model and the optimiser of a config.

    By default on all devices, or as many as the batch divides over.

    Raises:
        CommandLineError: the config cannot be built.

    """
    if devices is None:
        n = len(jax.devices())
        n = max(count for count in range(1, n + 1) if config.batch_size % count == 0)
        devices = jax.devices()[:n]
    try:
        model = config.model.build(dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed))
        optimizer = build_optimizer(config.optimizer, config.num_steps)
        return Trainer(
            model, optimizer, batch_size=config.batch_size, seed=config.seed, devices=devices
        )
    except (TypeError, ValueError) as error:
        raise CommandLineError(str(error)) from None


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
