"""Export a streaming model to a file, and run the file in a process without this package.

    python examples/export_model.py

The exported program takes any number of rows and steps. It also takes and returns the state, so it
can be fed with pieces of a sequence as they arrive. The process that serves it needs only jax,
numpy and flatbuffers.
"""

import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from jax_models import GRU

SERVER = """
import sys
import jax.export
import numpy as np

with open("model.jaxexport", "rb") as file:
    model = jax.export.deserialize(file.read())
x = np.load("x.npy")
state = np.zeros((2, len(x), 64), np.float32)
outputs = []
for piece in np.split(x, [1, 10, 37], axis=1):
    y, state = model.call(piece, state)
    outputs.append(y)
np.save("y.npy", np.concatenate(outputs, axis=1))
print("server: pieces of", [y.shape[1] for y in outputs], "steps")
print("server: imported jax_models or flax:", not {"jax_models", "flax"}.isdisjoint(sys.modules))
"""


class Detector(nnx.Module):
    """Maps 40 features of each frame of a recording to the logits of 10 words."""

    def __init__(self, rngs: nnx.Rngs):
        self.gru = GRU(40, 64, num_layers=2, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x, state=None):
        y, state = self.gru(x, state)
        return self.head(y), state


def export(model: Detector, path: str):
    """Writes the model, with its weights, as a program for CPUs and GPUs."""

    def run(x, h):  # arrays instead of GRUState, which only this package knows
        y, state = model(x, model.gru.init_state(x.shape[0])._replace(h=h))
        return y, state.h

    batch, time = jax.export.symbolic_shape("batch, time")
    x = jax.ShapeDtypeStruct((batch, time, 40), jnp.float32)
    h = jax.ShapeDtypeStruct((2, batch, 64), jnp.float32)
    program = jax.export.export(jax.jit(run), platforms=["cpu", "cuda"])(x, h)
    with open(path, "wb") as file:
        size = file.write(program.serialize())
    inputs = ", ".join(aval.str_short() for aval in program.in_avals)
    print(f"exported {size:,} bytes, a program of {inputs}")


def main(batch_size: int = 3):
    """Exports a model, serves it in another process, and compares the outputs."""
    model = Detector(nnx.Rngs(0))
    export(model, "model.jaxexport")
    x = np.random.default_rng(0).standard_normal((batch_size, 50, 40), np.float32)
    np.save("x.npy", x)
    subprocess.run([sys.executable, "-c", SERVER], check=True)
    y, _ = model(x)
    print(f"largest difference: {np.abs(np.load('y.npy') - y).max():.1e}")


if __name__ == "__main__":
    tyro.cli(main)
