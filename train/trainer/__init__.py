"""The mathematics of a training step, on a mesh of devices. It reads and writes no files.

- `step`: the loss, the step and the evaluation; `accumulation`: gradients computed in parts.
- `initialization`: the initial parameters, computed in their shardings.
- `optimizer`: the optimizers; `freeze`: which parameters are trained.
- `mesh`: the devices, and the sharding of parameters over them.
"""
