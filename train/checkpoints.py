"""Checkpoints of a training state, by orbax."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The last two checkpoints of a run, each complete or absent."""

    def __init__(self, folder: Path):
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2, create=False)
        )

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state) -> None:
        """Write a checkpoint, in the background, unless that step has one."""
        if step != self.latest_step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: Any) -> Any:
        """The newest checkpoint, with the structure, shapes, dtypes and shardings of `like`.

        Raises:
            ValueError: the checkpoint is of another structure or other shapes.
            FileNotFoundError: there is none.

        """
        if self.latest_step is None:
            raise FileNotFoundError("no complete checkpoint")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(self.latest_step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()
