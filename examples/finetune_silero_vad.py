"""Fine-tune silero-VAD, the detector of speech, on recordings with labels of your own.

    python examples/finetune_silero_vad.py
    python examples/finetune_silero_vad.py --recordings recordings.npz --tuned tuned.jit

Without a file, the recordings are made here: they are noise with beeps in it, and the beeps are
labeled. A file holds `audio`, (recordings, samples) in float32 between −1 and 1 at 16 kHz, and
`labels`, (recordings, frames): 1 if the 512 samples of a frame contain what is to be detected, else
0. The result is a `.jit` file that the package silero-vad loads in place of its own.
"""

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import optax
import torch
import tyro
from flax import nnx

from jax_models import SileroVAD, from_torch, to_torch

FRAME = 512


def make_recordings(num_recordings: int = 16, num_frames: int = 64):
    """Returns two seconds of noise for each recording, with beeps, and the labels."""
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.integers(0, 2, (num_recordings, num_frames // 8)), 8, axis=1)
    time = np.arange(num_frames * FRAME) / 16000
    beeps = 0.2 * np.sin(2 * np.pi * 880 * time) * np.repeat(labels, FRAME, axis=1)
    audio = beeps + 0.02 * rng.standard_normal(beeps.shape)
    return audio.astype(np.float32), labels.astype(np.float32)


@nnx.jit
def train_step(model: SileroVAD, optimizer: nnx.Optimizer, audio, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model.logits(audio)[0], labels).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def accuracy(script, audio, labels) -> float:
    """The share of frames that the package's own model gets right."""
    script.eval()
    with torch.no_grad():
        probabilities = script.audio_forward(torch.from_numpy(audio), 16000).numpy()
    script.reset_states()  # otherwise, `save` writes the last state of these recordings, too
    return np.mean((probabilities > 0.5) == labels)


def main(recordings: Path | None = None, tuned: Path = Path("tuned.jit"), epochs: int = 20):
    """Loads the weights of the package, trains them, and writes a file for the package."""
    if recordings is None:
        audio, labels = make_recordings()
    else:
        audio, labels = (np.load(recordings)[k].astype(np.float32) for k in ("audio", "labels"))
    path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
    script = torch.jit.load(str(path))
    print(f"before: {accuracy(script, audio, labels):.0%} of the frames are right")

    model = from_torch(SileroVAD(dropout_rate=0.1, rngs=nnx.Rngs(0)), script._model.state_dict())
    optimizer = nnx.Optimizer(model, optax.adam(3e-4), wrt=nnx.Param)
    for epoch in range(1, epochs + 1):
        order = np.random.default_rng(epoch).permutation(len(audio))
        batches = (order[i : i + 8] for i in range(0, len(order), 8))
        losses = [train_step(model, optimizer, audio[rows], labels[rows]) for rows in batches]
        if epoch % 5 == 0:
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}")

    script._model.load_state_dict({k: torch.from_numpy(v) for k, v in to_torch(model).items()})
    script.save(str(tuned))
    print(f"after: {accuracy(torch.jit.load(str(tuned)), audio, labels):.0%} of them are right")


if __name__ == "__main__":
    tyro.cli(main)
