"""Checkpoints of a training state: orbax writes them, and digests verify their files."""

import errno
import functools
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.process.digest import bytes_digest, dtypes_and_shapes
from train.process.files import file_digest, whole
from train.process.hosts import gather_all, is_first, run_on_first
from twinscan.command_line import CommandLineError
from twinscan.files import to_disk

MANIFEST = "manifest.json"
STATE = "state"
PARTIAL = ".partial"
"""The suffix of a checkpoint that is being written or removed."""
NUM_NEWEST = 2
"""The number of newest checkpoints that are kept, besides the best one."""
SPACE_BESIDE_ARRAYS = 2**20
SECONDS_PER_SAVE = 30.0
"""Longest time between two checkpoints, unless saving would take more than `SAVING_SHARE` of it."""
SAVING_SHARE = 0.05
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
"""Errors that orbax reports in many lines."""


class DamagedError(Exception):
    """A checkpoint whose content differs from what was written."""


class Checkpoints:
    """The newest checkpoints of a run, and the one with the lowest loss.

    orbax writes `{step}/state`, and `{step}/manifest.json` has the digests of its files. A
    checkpoint gets its name once all of it is on the disk, so it is complete or does not exist.
    """

    def __init__(self, folder: Path, run: str = ""):
        self.folder = folder.absolute()
        self.run = run
        """The identity of the run that the checkpoints belong to."""
        self.damaged: dict[int, str] = {}
        """Why a checkpoint cannot be read, by its step."""
        self._manifests: dict[int, dict[str, Any]] = {}
        """The manifests of intact checkpoints, by step."""
        for name in ("absl", "asyncio"):  # orbax also raises the errors that they log
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._last_save, self._save_seconds = time.monotonic(), 0.0

    @functools.cached_property
    def _orbax(self) -> ocp.StandardCheckpointer:
        """Orbax's checkpointer.

        It is created on first use, because it starts JAX's devices, and their number must be set
        before that.
        """
        sys.unraisablehook = functools.partial(_ignore_late_errors, sys.unraisablehook)
        return ocp.StandardCheckpointer()

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged ones included."""
        names = [path.name for path in self.folder.iterdir()]
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint whose files are intact."""
        for step in reversed(self.steps):
            if self._is_intact(step):
                return step
            if step not in self.damaged:  # another process replaced it by newer ones
                return self.latest_step
        return None

    @property
    def is_late(self) -> bool:
        """Whether so much time has passed since the last save that the state should be saved."""
        longest = max(SECONDS_PER_SAVE, self._save_seconds / SAVING_SHARE)
        return time.monotonic() - self._last_save > longest

    def unlogged(self, step: int) -> list[float]:
        """The losses that were not yet logged when the checkpoint of this step was written."""
        return [*self._manifests.get(step, {}).get("unlogged", [])]

    def save(
        self, step: int, state: Any, loss: float | None, unlogged: Sequence[float] = ()
    ) -> None:
        """Writes a checkpoint in the background, unless the step has an intact one.

        If the intact one has no loss yet, it gets this loss.

        Raises:
            CommandLineError: this checkpoint or the one before it cannot be written.

        """
        start = time.monotonic()
        self.wait()
        if step in self._manifests:
            self._add_loss(step, loss)
            return
        manifest = {
            "run": self.run,
            "step": step,
            "loss": loss,
            "unlogged": [*unlogged],
            "arrays": dtypes_and_shapes(state),
        }
        partial = self.folder / f"{step}{PARTIAL}"

        def begin() -> None:
            try:
                self._remove(step)
                partial.mkdir()
                _check_space(partial, sum(x.nbytes for x in jax.tree.leaves(state)))
            except OSError as error:
                raise self._write_error(step, error) from None

        run_on_first(begin)
        try:
            self._orbax.save(partial / STATE, state)
        except (OSError, ValueError) as error:
            raise self._write_error(step, error) from None
        self._writing = self._thread.submit(self._finish, manifest)
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start

    def restore(self, *likes: Any, part: Callable[[Any], Any] = lambda state: state) -> Any:
        """Reads the newest intact checkpoint, with the structure and shardings of one of `likes`.

        Only the arrays that `part` selects from the state are read and returned.

        Raises:
            FileNotFoundError: no checkpoint is intact; `damaged` says why.
            CommandLineError: the checkpoint has other arrays than each of `likes`.

        """
        while (step := self._agreed_step) is not None:
            state, fault = None, ""
            try:
                state = self._read(step, likes, part)
            except DamagedError as error:
                fault = str(error)
            if not gather_all([bool(fault)]).any():
                return state
            self._manifests.pop(step, None)
            if self._exists(step):
                self.damaged[step] = fault or "another process cannot read it"
        raise FileNotFoundError("no intact checkpoint")

    @property
    def _agreed_step(self) -> int | None:
        """The latest step that the first process sees, so that all processes read the same one."""
        step = self.latest_step
        step = int(gather_all([-1 if step is None else step])[0, 0])
        return None if step < 0 else step

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            CommandLineError: a checkpoint cannot be written.

        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits until everything is written, and ends the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def clean(self) -> None:
        """Removes checkpoints that a killed process was writing or removing, and reports them."""
        for path in sorted(self.folder.glob(f"*{PARTIAL}")):
            _erase(path)
            name = path.name.removesuffix(PARTIAL)
            print(
                f"{path}: removed; a process was killed while it wrote or removed the checkpoint "
                f"of step {name}",
                file=sys.stderr,
            )

    def _finish(self, manifest: dict[str, Any]) -> None:
        """Gives the checkpoint its digests and its name, and removes those that it replaces."""
        step = manifest["step"]
        partial = self.folder / f"{step}{PARTIAL}"
        try:
            self._orbax.wait_until_finished()
            if is_first():
                manifest["files"] = _file_digests(partial / STATE)
                _write_manifest(partial / MANIFEST, manifest)
                partial.rename(self.folder / str(step))
                to_disk(self.folder)
        except (OSError, ValueError) as error:
            raise self._write_error(step, error) from None
        self._manifests[step] = manifest
        self.damaged.pop(step, None)
        if is_first():
            self._prune()

    def _add_loss(self, step: int, loss: float | None) -> None:
        """Adds a loss to a checkpoint that was written before its evaluation."""
        manifest = self._manifests[step]
        if manifest["loss"] is None and loss is not None:
            manifest["loss"] = loss
            if is_first():
                with whole(self.folder / str(step) / MANIFEST) as partial:
                    _write_manifest(partial, manifest)

    def _write_error(self, step: int, error: Exception) -> CommandLineError:
        known = (reason for reason in map(os.strerror, DISK_FAULTS) if reason in str(error))
        reason = next(known, str(error).strip().splitlines()[0])
        return CommandLineError(
            f"{self.folder}: cannot write the checkpoint of step {step}: {reason}"
        )

    def _prune(self) -> None:
        intact = [step for step in self.steps if self._is_intact(step)]
        losses = {step: self._manifests[step]["loss"] for step in intact}
        evaluated = [step for step in intact if losses[step] is not None]
        best = sorted(evaluated, key=losses.__getitem__)[:1]
        for step in {*self.steps} - {*best, *intact[-NUM_NEWEST:]}:
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Removes the name of a checkpoint, then its files."""
        partial = self.folder / f"{step}{PARTIAL}"
        _erase(partial)
        if self._exists(step):
            (self.folder / str(step)).rename(partial)
            _erase(partial)
        self._manifests.pop(step, None)

    def _is_intact(self, step: int) -> bool:
        if step not in self._manifests and step not in self.damaged:
            folder = self.folder / str(step)
            try:
                manifest = _read_manifest(folder / MANIFEST)
                expected = {"run": self.run, "step": step}
                fault = _difference(
                    {name: manifest.get(name) for name in expected}, expected
                ) or _difference(_file_digests(folder / STATE), manifest["files"])
                if fault is not None:
                    raise DamagedError(fault)
                self._manifests[step] = manifest
            except DamagedError as error:
                if self._exists(step):
                    self.damaged[step] = str(error)
        return step in self._manifests

    def _exists(self, step: int) -> bool:
        return os.path.lexists(self.folder / str(step))

    def _read(self, step: int, likes: Sequence[Any], part: Callable[[Any], Any]) -> Any:
        if not self._is_intact(step):
            raise DamagedError(self.damaged.get(step, "it is not there"))
        manifest = self._manifests[step]
        fitting = (like for like in likes if dtypes_and_shapes(like) == manifest["arrays"])
        like = next(fitting, likes[0])
        difference = _difference(manifest["arrays"], dtypes_and_shapes(like))
        if difference is not None:
            raise CommandLineError(
                f"{self.folder / str(step)}: the checkpoint is intact, but has other arrays than "
                f"this version's model and optimizer: {difference} (an earlier version of twinscan "
                "may have begun the run; use that version)"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        selected = {id(leaf) for leaf in jax.tree.leaves(part(abstract))}
        wanted = jax.tree.map(lambda x: x if id(x) in selected else ocp.PLACEHOLDER, abstract)
        args = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted))
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                return part(checkpointer.restore(self.folder / str(step) / STATE, args=args))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise DamagedError(str(error).strip().splitlines()[0]) from None


def _ignore_late_errors(hook: Callable[[Any], object], fault: Any) -> None:
    """Passes an unraisable exception to the hook, unless orbax has already raised its cause.

    On a full disk, orbax raises the error of one array and closes its event loop. The writes of the
    other arrays end later, and each of them would print a traceback.
    """
    if str(fault.exc_value) != "Event loop is closed":
        hook(fault)


def _erase(path: Path) -> None:
    """Removes a folder, or a file or link of that name, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_space(folder: Path, size: int) -> None:
    if shutil.disk_usage(folder).free < size + SPACE_BESIDE_ARRAYS:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Describes the first difference, or returns None."""
    for name in sorted({*found, *expected}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} does not belong to it"
        if found[name] != expected[name]:
            return f"{name}: expected {expected[name]}, got {found[name]}"
    return None


def _file_digests(folder: Path) -> dict[str, str]:
    """The digest of each file in the folder, by its path relative to the folder's parent."""
    try:
        return {
            path.relative_to(folder.parent).as_posix(): file_digest(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    except OSError as error:
        raise DamagedError(f"{Path(error.filename or folder).name}: {error.strerror}") from None


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes two lines: the digest of the second line, and the manifest."""
    line = json.dumps(manifest).encode()
    path.write_bytes(bytes_digest(line).hexdigest().encode() + b"\n" + line + b"\n")
    to_disk(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        digest, line, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError):
        raise DamagedError(f"{MANIFEST} is not a manifest") from None
    if rest or bytes_digest(line).hexdigest().encode() != digest:
        raise DamagedError(f"the digest of {MANIFEST} does not match its content")
    return json.loads(line)
