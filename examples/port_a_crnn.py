"""Port a CRNN from PyTorch, and let `compare` find the mistake in the port.

    python examples/port_a_crnn.py

The CRNN reads a line of text in an image: convolutions, then a bidirectional LSTM over the columns.
The first port has a mistake: the epsilon of its second batch norm is 1e-3, the default of Keras.
`compare` runs both models on the same images, and names the first submodule whose output is wrong.
The second port is right and passes, forward and backward, in float64 and in float32.
"""

import numpy as np
import torch
import tyro
from flax import nnx

from jax_models import LSTM
from jax_models.weights import batch_norm, conv, linear, nested
from parity_tests import compare


class CRNN(torch.nn.Module):
    """Maps images (batch, 1, 16, width) to logits of each column, (batch, width / 2, classes)."""

    def __init__(self, classes: int):
        super().__init__()
        self.cnn = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d((2, 1)),
        )
        self.rnn = torch.nn.LSTM(64, 32, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(64, classes)

    def forward(self, images):
        x = self.cnn(images).permute(0, 3, 1, 2).flatten(2)  # (batch, columns, channels × rows)
        return self.head(self.rnn(x)[0])


class Port(nnx.Module):
    """The same in Flax, whose images have the channels last."""

    def __init__(self, classes: int, epsilon: float, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, momentum=0.9, epsilon=epsilon, rngs=rngs)
        self.lstm = LSTM(64, 32, bidirectional=True, rngs=rngs)
        self.head = nnx.Linear(64, classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, (2, 1), (2, 1))
        x = x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1)  # as in torch
        return self.head(self.lstm(x)[0])


def main(classes: int = 10):
    """Compares both ports with the original."""
    torch.manual_seed(0)
    images = np.random.default_rng(0).standard_normal((2, 1, 16, 24))
    for epsilon in (1e-3, 1e-5):
        port = Port(classes, epsilon, nnx.Rngs(0))
        table = [
            *conv("conv1", "cnn.0"),
            *batch_norm("norm1", "cnn.1"),
            *conv("conv2", "cnn.4"),
            *batch_norm("norm2", "cnn.5"),
            *nested(port.lstm.torch_layouts()["torch.nn"], "lstm", "rnn"),
            *linear("head", "head"),
        ]
        report = compare(
            CRNN(classes),
            port,
            images,
            weights=table,
            call=lambda port, images: port(images.transpose(0, 2, 3, 1)),
            locate=True,
        )
        print(f"epsilon={epsilon}:\n{report}\n")


if __name__ == "__main__":
    tyro.cli(main)
