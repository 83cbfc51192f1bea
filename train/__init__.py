"""Training of the language models: `python -m train`.

The modules:

- `step`: the loss and the training step, on a mesh of devices; `loop`: the steps of a run.
- `__main__`: the command; `config`: its options and presets; `run`: the folder of a run.
- `text`, `tokens`, `vocabulary`, `published_vocabulary`: from files to tokens; `windows`: from
  tokens to batches.
- `optimizer`, `accumulation`: the optimizer, and gradients that are computed in parts.
- `mesh`, `hosts`: several devices and processes.
- `checkpoints`, `digest`, `files`, `interruption`: protection against kills, full disks and
  flipped bits.
- `monitor`, `curve`, `heartbeat`: progress, metrics and the loss curve.
- `evaluate`, `generate`, `export`, `convert`: the other commands; `initial_weights`, `pretrained`:
  weights that a run or a command reads; `generation_files`: what a folder says about tokens and
  stops.
"""

import sys
from importlib import import_module
from pathlib import Path

# The folder of a user may have modules of the same names as the packages that this one imports.
sys.path.insert(0, str(Path(__file__).parents[1]))
import_module("twinscan.own_packages").pin("twinscan", "jax_models", "torch_ref")
del sys.path[0]
