"""Train in a loop of your own: optax, checkpoints with orbax, and a mesh of devices.

    python examples/own_training_loop.py --steps 100
    python examples/own_training_loop.py --steps 200

A Hawk learns to write this file, character by character. Each batch is divided over 4 virtual CPU
devices, and every 50 steps, the weights and the optimizer's state are saved in the folder
`checkpoints`. The second command resumes from the newest checkpoint. A batch depends only on its
step, so the resumed run sees the same batches as a run that was never interrupted.
"""

import os
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_models import HawkLanguageModelConfig

BATCH, WINDOW, SAVE_EVERY = 16, 65, 50


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits, _ = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def batch_of(step: int, text: np.ndarray) -> np.ndarray:
    """Returns random pieces of the text, (BATCH, WINDOW)."""
    starts = np.random.default_rng(step).integers(len(text) - WINDOW, size=(BATCH, 1))
    return text[starts + np.arange(WINDOW)]


def main(steps: int = 200, folder: Path = Path("checkpoints")):
    """Trains until `steps` steps are done, from the newest checkpoint in the folder, if any."""
    # Leave out these lines on real devices. Virtual ones wait for each other in a pool of threads,
    # which therefore needs several for each device.
    os.environ["NPROC"] = "16"
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    print(f"{mesh.size} devices, each with {BATCH // mesh.size} rows of a batch")
    by_rows, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)

    config = HawkLanguageModelConfig(features=64, num_layers=2, mlp_features=128)
    model = config.build(rngs=nnx.Rngs(0))
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-3))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    def current_state():
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder.absolute(), options=options) as checkpoints:
        state = jax.device_put(current_state(), replicated)
        first = checkpoints.latest_step() or 0
        if first:
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
            print(f"resumed from the checkpoint of step {first}")
        nnx.update(model, state["model"])
        nnx.update(optimizer, state["optimizer"])
        for step in range(first + 1, steps + 1):
            tokens = jax.device_put(batch_of(step, text), by_rows)
            loss = train_step(model, optimizer, tokens)
            if step % SAVE_EVERY == 0:
                print(f"step {step}: loss {loss:.2f}")
                checkpoints.save(step, args=ocp.args.StandardSave(current_state()))


if __name__ == "__main__":
    tyro.cli(main)
