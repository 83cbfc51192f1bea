"""The folder of a run: config, vocabulary, metrics and checkpoints."""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
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
from train.checks import Contents
from train.data.vocabulary import Vocabulary
from train.data.vocabulary import from_fields as vocabulary_from_fields
from train.process.digest import bytes_digest
from train.process.files import errors_naming, whole
from train.process.hosts import is_first
from train.run.checkpoints import Checkpoints
from train.run.config import TrainConfig, UnknownModelError, from_fields, to_fields
from train.trainer.mesh import MeshConfig, build_mesh
from train.trainer.optimizer import build_optimizer, convert_state, state_layouts
from train.trainer.step import Trainer, TrainState
from twinscan.command_line import CommandLineError, with_flag
from twinscan.heartbeat import doing

T = TypeVar("T")
Kind = Literal["evaluation", "training", "skipped", "finished"]

CONFIG, VOCABULARY, METRICS = "config.json", "vocabulary.json", "metrics.jsonl"
CURVE = "curve.png"
CHECKPOINTS, PRETRAINED = "checkpoints", "pretrained"
EXPORTED, LOCK = "twin.safetensors", "lock"
FILES_BEFORE_CONFIG = {LOCK, CHECKPOINTS} | {
    f"{name}{suffix}" for name in (CONFIG, VOCABULARY, PRETRAINED) for suffix in ("", ".partial")
}
"""The files of a run that has not begun: the config is written last."""
GLOB_CHARACTERS = "*?[\\"
"""Characters that must not occur in a path, because orbax would lose the arrays."""


class Run:
    """A run of `twinscan train`, and the files in its folder.

        from pathlib import Path

        from twinscan import Run

        run = Run.open(Path("runs/lstm"))
        model, tokens = run.model(), run.vocabulary.encode("ROMEO:")

    `Run.create` begins a run in a new folder, and `Run.open` opens one.
    """

    @checked_options
    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        vocabulary: Vocabulary,
        text_digest: str,
        identity: str,
    ):
        self.folder = folder
        self.config = config
        self.vocabulary = vocabulary
        self.text_digest = text_digest
        self.identity = identity
        """Distinguishes the checkpoints of this run from those of other runs."""
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, identity)

    @classmethod
    @checked_options
    def create(
        cls,
        folder: Path,
        config: TrainConfig,
        vocabulary: Vocabulary,
        text_digest: str,
        pretrained: Contents | None = None,
    ) -> "Run":
        """Creates a run in a folder that is `locked` or does not exist.

        Args:
            folder: the folder.
            config: the options of the run.
            vocabulary: the vocabulary of the text.
            text_digest: identifies the text.
            pretrained: the contents, by name, of the files that the run keeps of the checkpoint
                whose weights and tokenizer it begins with. None: there is no such checkpoint.

        Raises:
            CommandLineError: the folder cannot be created or written.

        """
        with errors_naming(folder):
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            run = cls(folder, config, vocabulary, text_digest, secrets.token_hex(8))
            if pretrained is not None:
                shutil.rmtree(folder / PRETRAINED, ignore_errors=True)  # left by a killed process
                with whole(folder / PRETRAINED) as partial:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir()
                    for name, content in pretrained.items():
                        (partial / name).write_bytes(content)
            run.write()
        return run

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a run has begun in the folder."""
        return (folder / CONFIG).exists()

    @classmethod
    @checked_options
    def open(cls, folder: Path) -> "Run":
        """Opens the run in a folder.

        Raises:
            CommandLineError: the folder holds no run, or files are missing or damaged.

        """
        check_path(folder)
        config = _read(folder, CONFIG, from_fields)
        vocabulary, *identity = _read(folder, VOCABULARY, _vocabulary)
        if len(vocabulary) > config.model.vocab_size:
            raise CommandLineError(
                f"{folder / VOCABULARY}: {len(vocabulary)} {vocabulary.unit}s for a model of "
                f"{config.model.vocab_size}"
            )
        if not (folder / CHECKPOINTS).is_dir():
            raise CommandLineError(f"{folder}: not the folder of a run: it has no {CHECKPOINTS}")
        return cls(folder, config, vocabulary, *identity)

    @property
    def pretrained(self) -> Path | None:
        """The folder with the files that the run keeps of the checkpoint that it began from.

        None if there is no such checkpoint, if the run has another tokenizer, or if an earlier
        version began the run.
        """
        folder = self.folder / PRETRAINED
        return folder if folder.is_dir() else None

    @property
    def is_finished(self) -> bool:
        """Whether the run has done its last step and its report."""
        last = self.config.num_steps
        return (
            any(line["step"] == last for line in self.metrics("finished"))
            and (self.folder / EXPORTED).exists()
            and self.checkpoints.latest_step == last
        )

    def write(self) -> None:
        """Writes the vocabulary and then the config, each completely or not at all."""
        identity = {"text_digest": self.text_digest, "run": self.identity}
        _write(self.folder / VOCABULARY, self.vocabulary.fields() | identity)
        _write(self.folder / CONFIG, to_fields(self.config))

    def restore(self, trainer: Trainer) -> TrainState:
        """The state of the newest intact checkpoint. Damaged newer ones are reported.

        The options of the optimizer may have changed since it was written.

        Raises:
            CommandLineError: no checkpoint is intact.

        """
        state = self._read_checkpoint(trainer, lambda state: state)
        trained, _ = trainer.trainable.split(state.params)
        like = trainer.abstract_state.optimizer_state
        return state._replace(optimizer_state=convert_state(state.optimizer_state, trained, like))

    def restore_params(self, trainer: Trainer) -> nnx.State:
        """The parameters to evaluate and export, from the newest intact checkpoint.

        Nothing else is read. Damaged newer checkpoints are reported, and the optimizer's options
        may have changed, as in `restore`.

        Raises:
            CommandLineError: no checkpoint is intact.

        """
        return self._read_checkpoint(trainer, lambda state: state.averaged_params)

    def _read_checkpoint(self, trainer: Trainer, part: Callable[[TrainState], T]) -> T:
        """A part of the state in the newest intact checkpoint."""
        # A checkpoint may have another form of the optimizer's state.
        like = trainer.abstract_state
        likes = [like]
        trained, _ = trainer.trainable.split(like.params)
        for form in state_layouts(like.optimizer_state, trained):
            likes.append(like._replace(optimizer_state=form))
        state = None
        with contextlib.suppress(FileNotFoundError), doing("reading the newest checkpoint"):
            state = self.checkpoints.restore(*likes, part=part)
        # Say which checkpoints are damaged, even if an older one is intact.
        faults = [
            f"{self.checkpoints.folder / str(step)}: the checkpoint is damaged: {fault}"
            for step, fault in sorted(self.checkpoints.damaged.items(), reverse=True)
        ]
        if state is None and faults:
            raise CommandLineError(f"{faults[0]}; no other checkpoint is intact")
        if state is None:
            raise CommandLineError(f"{self.folder}: the run has no checkpoint yet")
        for fault in faults:
            step = self.checkpoints.latest_step
            print(f"{fault}; using the checkpoint of step {step} instead", file=sys.stderr)
        return state

    def model(self) -> LanguageModel:
        """The trained model, on one device."""
        trainer, params = self.restore_trainer()
        return trainer.model(params)

    def restore_trainer(self) -> tuple[Trainer, nnx.State]:
        """A trainer on one device, and the trained parameters."""
        config = dataclasses.replace(self.config, mesh=MeshConfig())
        with doing("building the model"):
            trainer = build_trainer(config, self.vocabulary, jax.local_devices()[:1])
        return trainer, self.restore_params(trainer)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends a line to `metrics.jsonl`, in the first process only.

        If a killed process left an incomplete line, the new line starts after it.
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
        """The lines of one kind in `metrics.jsonl`, sorted by step.

        Of several lines for one step, the last counts. If a process resumed the run from an earlier
        step, the lines beyond that step that were written before it do not count.
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
    def last_num_devices(self) -> int | None:
        """The number of devices of the last process; None if there was none."""
        return next(
            (record["devices"] for record in reversed(self._records()) if "devices" in record), None
        )

    def _records(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, without incomplete ones."""
        path, records = self.folder / METRICS, []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with contextlib.suppress(RecursionError, ValueError):  # half a line
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records

    def draw_curve(self) -> Path:
        """Draws the losses so far, and returns the path of the picture."""
        from train.run.curve import draw_curve

        path = self.folder / CURVE
        if is_first():
            config, unit = self.config, self.vocabulary.unit
            caption = (
                f"{config.model.family}, {config.num_steps:,} steps of {config.batch_size} × "
                f"{config.window} {unit}s. Training steps: mean loss of all steps since the point "
                f"before. Parts: mean loss of {config.eval_batches} batches of each part of the "
                "text, with the weights of that step."
            )
            draw_curve(self.metrics("training"), self.metrics(), path, caption)
        return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in the folder, which is created if necessary.

    Raises:
        CommandLineError: another process trains in the folder, or the folder holds something else
            or cannot be written.

    """
    check_path(folder)
    check_content(folder)
    lock = filelock.FileLock(folder / LOCK)
    with errors_naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            raise CommandLineError(f"{folder}: another process is training in it") from None
    with lock:
        yield


def check_path(folder: Path) -> None:
    """Raises an error if orbax cannot use the path."""
    path = str(folder.absolute())
    if found := [character for character in GLOB_CHARACTERS if character in path]:
        raise CommandLineError(
            f"{folder}: run paths must not contain {', '.join(GLOB_CHARACTERS[:-1])} or "
            f"{GLOB_CHARACTERS[-1]}, got {found[0]}"
        )
    if path.encode(errors="ignore").decode() != path:
        raise CommandLineError(f"{folder}: expected a path in UTF-8")


def check_content(folder: Path) -> None:
    """Raises an error if the folder holds something other than a run."""
    if not folder.exists():
        return
    with errors_naming(folder):
        names = {path.name for path in folder.iterdir()}
        if CONFIG not in names and names - FILES_BEFORE_CONFIG:
            raise CommandLineError(f"{folder}: the folder is not empty and holds no run")


@checked_options
def build_trainer(
    config: TrainConfig,
    vocabulary: Vocabulary | None = None,
    devices: Sequence[Any] | None = None,
) -> Trainer:
    """The trainer of a config, on a mesh of the given devices or of all.

    If the vocabulary has a token that ends a document, the state is reset there.

    Raises:
        CommandLineError: the config cannot be built.

    """

    # Errors name the option: those of the model begin with --model.
    def build() -> LanguageModel:
        try:
            return config.model.build(dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed))
        except jax.errors.JAXTypeError:
            raise CommandLineError(
                "the constructor of the model cannot be traced, because it converts an array to "
                "NumPy or branches on one: compute with jax.numpy instead"
            ) from None
        except (TypeError, ValueError) as error:
            raise CommandLineError(with_flag(str(error), "model")) from None

    # The other errors name an option of the run, its mesh or its optimizer.
    try:
        mesh = build_mesh(
            config.mesh,
            rows=config.batch_size // config.accumulate,
            window=config.window,
            devices=devices or jax.devices(),
        )
        optimizer = build_optimizer(config.optimizer, config.num_steps)
        return Trainer(
            build,
            optimizer,
            mesh=mesh,
            fully_sharded=config.mesh.fully_sharded,
            accumulate=config.accumulate,
            seed=config.seed,
            end_of_text=None if vocabulary is None else vocabulary.end_of_text,
            freeze=config.freeze,
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CommandLineError(with_flag(str(error))) from None


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Writes fields and their digest, completely or not at all."""
    text = json.dumps(fields | {"digest": _digest(fields)}, indent=2)
    with whole(path) as partial:
        partial.write_text(text + "\n")


def _digest(fields: dict[str, Any]) -> str:
    return bytes_digest(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _read(folder: Path, name: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Reads and parses a file that `_write` wrote."""
    fields, digest = {}, None
    try:
        fields = json.loads((folder / name).read_bytes())
        if not isinstance(fields, dict):
            raise TypeError("expected a JSON object")
        digest = fields.pop("digest", None)
        parsed = parse(fields)
        if digest is None:
            raise ValueError("it has no digest, or an early version of twinscan wrote it")
        if digest != _digest(fields):
            raise ValueError("its digest does not match its content")
        return parsed
    except FileNotFoundError:
        raise CommandLineError(f"{folder}: not the folder of a run: it has no {name}") from None
    except OSError as error:
        raise CommandLineError(f"{folder / name}: {error.strerror}") from None
    except UnknownModelError as error:
        # If the file is intact, its model is missing; otherwise, its model's name may be damaged.
        fault = "" if digest == _digest(fields) else " is damaged"
        raise CommandLineError(f"{folder / name}{fault}: {error}") from None
    except KeyError as error:
        raise CommandLineError(f"{folder / name} is damaged: it has no {error}") from None
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise CommandLineError(f"{folder / name} is damaged: {error}") from None


def _kind(record: dict[str, Any]) -> Kind:
    """The kind of a line of the metrics."""
    for kind in ("skipped", "finished"):
        if kind in record:
            return kind
    return "training" if "loss" in record else "evaluation"


def _vocabulary(fields: dict[str, Any]) -> tuple[Vocabulary, str, str]:
    return vocabulary_from_fields(fields), fields["text_digest"], fields["run"]
