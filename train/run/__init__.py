"""A run: its options, its folder, and its steps from the first to the last.

- `config`: the options and presets; `folder`: the folder, which `Run` opens; `checkpoints`: the
  states in it, which digests verify.
- `loop`: the steps, evaluations and checkpoints; `monitor`: progress and metrics; `curve`: the loss
  curve.
"""

__all__ = ["Run"]

from train.run.folder import Run
