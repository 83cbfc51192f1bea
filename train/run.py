"""A run's folder: config, vocabulary, metrics, checkpoints. It is enough to go on from."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import filelock
import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import LanguageModel
from jax_models.options import checked_options
from train.checkpoints import Checkpoints
from train.config import TrainConfig, from_json, to_json
from train.files import faults_of
from train.hosts import is_first
from train.mesh import MeshConfig, build_mesh
from train.optimizer import build_optimizer, forms, reformed
from train.step import Trainer, TrainState
from train.vocabulary import Vocabulary, from_fields
from twinscan.command_line import CommandLineError
from twinscan.files import write_whole

T = TypeVar("T")
Kind = Literal["evaluation", "training", "skipped"]

CONFIG, VOCABULARY, METRICS = "config.json", "vocabulary.json", "metrics.jsonl"
CURVE = "curve.png"
CHECKPOINTS, EXPORTED, LOCK = "checkpoints", "twin.safetensors", "lock"
BEFORE_CONFIG = {LOCK, VOCABULARY, CHECKPOINTS, f"{VOCABULARY}.partial", f"{CONFIG}.partial"}
"""What a folder has until its run has begun: the config is written last."""
GLOBS = "*?["
"""Characters of a path that orbax reads as patterns: it would lose the arrays."""


class Run:
    """A run, open in its folder."""

    @checked_options
    def __init__(self, folder: Path, config: TrainConfig, vocabulary: Vocabulary, text_digest: str):
        self.folder = folder
        self.config = config
        self.vocabulary = vocabulary
        self.text_digest = text_digest
        self.checkpoints = Checkpoints(folder / CHECKPOINTS)

    @classmethod
    @checked_options
    def create(
        cls, folder: Path, config: TrainConfig, vocabulary: Vocabulary, text_digest: str
    ) -> "Run":
        """A new run in a folder that is empty, does not exist, or has a run that never began.

        Raises:
            CommandLineError: the folder has something in it, or cannot be made.

        """
        check_path(folder)
        check_content(folder)
        with faults_of(folder):
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            run = cls(folder, config, vocabulary, text_digest)
            run.write()
        return run

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Has a run begun in the folder?"""
        return (folder / CONFIG).exists()

    @classmethod
    @checked_options
    def open(cls, folder: Path) -> "Run":
        """The run that a folder holds.

        Raises:
            CommandLineError: it holds none, or files of it are missing or damaged.

        """
        check_path(folder)
        config = _read(folder, CONFIG, from_json)
        vocabulary, digest = _read(folder, VOCABULARY, _vocabulary)
        if len(vocabulary) != config.model.vocab_size:
            raise CommandLineError(
                f"{folder / VOCABULARY}: {len(vocabulary)} {vocabulary.unit}s for a model of "
                f"{config.model.vocab_size}"
            )
        if not (folder / CHECKPOINTS).is_dir():
            raise CommandLineError(f"{folder}: not the folder of a run, it has no {CHECKPOINTS}")
        return cls(folder, config, vocabulary, digest)

    @property
    def is_finished(self) -> bool:
        """Has the run made its last step, and its report?"""
        is_trained = self.checkpoints.latest_step == self.config.num_steps
        return is_trained and (self.folder / EXPORTED).exists()

    def write(self) -> None:
        """Write what the run is: the vocabulary, then the config, each whole or not at all."""
        vocabulary = self.vocabulary.fields() | {"text_digest": self.text_digest}
        write_whole(self.folder / VOCABULARY, json.dumps(vocabulary) + "\n")
        write_whole(self.folder / CONFIG, to_json(self.config))

    def restore(self, trainer: Trainer) -> TrainState:
        """The state of the newest checkpoint that is intact; what is wrong with newer ones is said.

        The optimiser may have got other options since.

        Raises:
            CommandLineError: there is none.

        """
        like = trainer.initial_state()
        others = [
            like._replace(optimizer_state=form) for form in forms(like.optimizer_state, like.params)
        ]
        try:
            state = self.checkpoints.restore(like, *others)
        except FileNotFoundError:
            state = None
        faults = [
            f"{self.checkpoints.folder / str(step)}: the checkpoint is damaged: {fault}"
            for step, fault in sorted(self.checkpoints.damaged.items(), reverse=True)
        ]
        if state is None and faults:
            raise CommandLineError(f"{faults[0]}; no other one is intact")
        if state is None:
            raise CommandLineError(f"{self.folder}: the run has no checkpoint yet")
        for fault in faults:
            print(f"{fault}; that of step {int(state.step)} is used", file=sys.stderr)
        optimizer_state = reformed(state.optimizer_state, state.params, like.optimizer_state)
        return state._replace(optimizer_state=optimizer_state)

    def model(self) -> LanguageModel:
        """The trained model, on one device."""
        trainer = build_trainer(self.config, self.vocabulary, jax.devices()[:1])
        return trainer.model(self.restore(trainer).averaged_params)

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`, after ending one that a killed run left.

        Of several processes, the first does.
        """
        if not is_first():
            return
        with (self.folder / METRICS).open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(metrics, allow_nan=False).encode() + b"\n")

    def metrics(self, kind: Kind = "evaluation") -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` of a kind; of two for one step, the later.

        What a process logged beyond the step that the next one started from does not count.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for record in self._records():
            if type(start := record.get("start")) is int:
                kept = start if kind == "skipped" else start + 1
                by_step = {step: by_step[step] for step in by_step if step < kept}
            elif type(step := record.get("step")) is int and _kind(record) == kind:
                by_step[step] = record
        return [by_step[step] for step in sorted(by_step)]

    @property
    def devices_before(self) -> int | None:
        """On how many devices the run was last."""
        return next(
            (record["devices"] for record in reversed(self._records()) if "devices" in record), None
        )

    def _records(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, but for those that no logger wrote whole."""
        path, records = self.folder / METRICS, []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # half a line
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records

    def draw_curve(self) -> Path:
        """Draw the losses so far into the folder."""
        from train.curve import draw_curve

        path = self.folder / CURVE
        if not is_first():
            return path
        with faults_of(path):
            draw_curve(self.metrics("training"), self.metrics(), path)
        return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder, which is made if it is not there.

    Raises:
        CommandLineError: another process trains in it, it has something else in it, or it cannot be
            written.

    """
    check_path(folder)
    check_content(folder)
    lock = filelock.FileLock(folder / LOCK)
    with faults_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            raise CommandLineError(f"{folder}: another process is training in it") from None
    with lock:
        yield


def check_path(folder: Path) -> None:
    """Refuse a path that orbax does not take as it is."""
    if found := [character for character in GLOBS if character in str(folder.absolute())]:
        raise CommandLineError(
            f"{folder}: the path of a run has none of {' '.join(GLOBS)}, this one has {found[0]}"
        )


def check_content(folder: Path) -> None:
    """Refuse a folder with something else than a run."""
    if not folder.exists() or Run.is_in(folder):
        return
    with faults_of(folder):
        if {path.name for path in folder.iterdir()} - BEFORE_CONFIG:
            raise CommandLineError(f"{folder}: the folder is not empty, and has no run")


@checked_options
def build_trainer(
    config: TrainConfig,
    vocabulary: Vocabulary | None = None,
    devices: Sequence[Any] | None = None,
) -> Trainer:
    """The model and the optimiser of a config, over documents that end as the vocabulary says.

    By default on the config's mesh; on given devices, with the batch's rows divided over them.

    Raises:
        CommandLineError: the config cannot be built.

    """
    mesh_config = config.mesh if devices is None else MeshConfig()
    try:
        mesh = build_mesh(
            mesh_config,
            rows=config.batch_size // config.accumulate,
            window=config.window,
            devices=devices or jax.devices(),
        )
        model = config.model.build(dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed))
        optimizer = build_optimizer(config.optimizer, config.num_steps)
        return Trainer(
            model,
            optimizer,
            mesh=mesh,
            fully_sharded=mesh_config.fully_sharded,
            accumulate=config.accumulate,
            seed=config.seed,
            end_of_text=None if vocabulary is None else vocabulary.end_of_text,
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CommandLineError(str(error)) from None


def _read(folder: Path, name: str, parse: Callable[[str], T]) -> T:
    try:
        return parse((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandLineError(f"{folder}: not the folder of a run, it has no {name}") from None
    except OSError as error:
        raise CommandLineError(f"{folder / name}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CommandLineError(f"{folder / name} is damaged: {error}") from None


def _kind(record: dict[str, Any]) -> Kind:
    """What a line of the metrics tells."""
    if "skipped" in record:
        return "skipped"
    return "training" if "loss" in record else "evaluation"


def _vocabulary(text: str) -> tuple[Vocabulary, str]:
    fields = json.loads(text)
    if not isinstance(fields, dict) or "text_digest" not in fields:
        raise ValueError("expected a vocabulary and text_digest")
    return from_fields(fields), fields["text_digest"]
