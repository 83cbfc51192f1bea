"""Training of the language models: `python -m train`.

Where to read what:

- `step`: the loss and the training step, on a mesh of devices; `loop`: the steps of a run.
- `__main__`: the command; `config`: its options and presets; `run`: the folder of a run.
- `text`, `vocabulary`, `windows`: from files to tokens, and to batches.
- `optimizer`, `accumulation`: what a step does beside the gradient.
- `mesh`, `hosts`: several devices and processes.
- `checkpoints`, `digest`, `files`, `interruption`: what survives a kill, a full disk and a flipped
  bit.
- `monitor`, `curve`: what is shown and logged.
- `evaluate`, `generate`, `export`, `initial`, `pretrained`: what else is done with weights.
"""
