"""Fine-tune silero-VAD: python finetune_silero_vad.py recordings.npz tuned.jit

recordings.npz has `audio`, (recordings, samples) in float32 between −1 and 1 at 16 kHz, and
`labels`, (recordings, frames): 1 where somebody speaks in the 512 samples of a frame, else 0.
"""

import sys
from importlib.metadata import distribution

import numpy as np
import optax
import torch
from flax import nnx

from jax_models import SileroVAD, from_torch, to_torch

audio, labels = (np.load(sys.argv[1])[name].astype(np.float32) for name in ("audio", "labels"))
path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
script = torch.jit.load(str(path))
model = from_torch(SileroVAD(dropout_rate=0.1, rngs=nnx.Rngs(0)), script._model.state_dict())
optimizer = nnx.Optimizer(model, optax.adam(3e-4), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, audio, labels):
    def loss(model):
        return optax.sigmoid_binary_cross_entropy(model.logits(audio)[0], labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


for epoch in range(20):
    order = np.random.default_rng(epoch).permutation(len(audio))
    batches = (order[i : i + 8] for i in range(0, len(order), 8))
    losses = [train_step(model, optimizer, audio[rows], labels[rows]) for rows in batches]
    print(f"epoch {epoch}: loss {np.mean(losses):.4f}")
script._model.load_state_dict({k: torch.from_numpy(v) for k, v in to_torch(model).items()})
script.save(sys.argv[2])
