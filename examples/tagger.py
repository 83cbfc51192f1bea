"""Tag each bracket of a text as matched or unmatched with a bidirectional LSTM.

    python examples/tagger.py

Whether a "(" has a partner depends on the characters after it, and whether a ")" has one depends on
those before it, so a tagger must read the text in both directions. The texts of a batch have
different lengths, which are passed as `lengths`: the padding changes no output, and the backward
direction starts at the end of each text. For comparison, the same tagger is trained to read only
forward.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from jax_models import LSTM

CHARACTERS = "ab()"
NO_BRACKET, MATCHED, UNMATCHED = range(3)


def make_batch(rng: np.random.Generator, batch_size: int = 64, longest: int = 20):
    """Returns random characters and their tags, both (batch, time), and the length of each row."""
    characters = rng.integers(len(CHARACTERS), size=(batch_size, longest))
    lengths = rng.integers(1, longest + 1, batch_size)
    tags = np.where(characters < 2, NO_BRACKET, UNMATCHED)
    for row, length in enumerate(lengths):
        unmatched = []  # the positions of "(" that wait for their ")"
        for t in range(length):
            if CHARACTERS[characters[row, t]] == "(":
                unmatched.append(t)
            elif CHARACTERS[characters[row, t]] == ")" and unmatched:
                tags[row, [unmatched.pop(), t]] = MATCHED
    return characters, tags, lengths


class Tagger(nnx.Module):
    """Maps characters (batch, time) to the logits of their tags (batch, time, 3)."""

    def __init__(self, features: int, *, bidirectional: bool, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(len(CHARACTERS), features, rngs=rngs)
        self.lstm = LSTM(features, features, bidirectional=bidirectional, rngs=rngs)
        self.head = nnx.Linear(features * (2 if bidirectional else 1), 3, rngs=rngs)

    def __call__(self, characters, lengths):
        y, _ = self.lstm(self.embedding(characters), lengths=lengths)
        return self.head(y)


@nnx.jit
def train_step(model: Tagger, optimizer: nnx.Optimizer, characters, tags, lengths):
    """Updates the model once, and returns the loss and the accuracy."""
    real = jnp.arange(characters.shape[1]) < lengths[:, None]  # False in the padding

    def loss_fn(model):
        logits = model(characters, lengths)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tags)
        return jnp.mean(losses, where=real), jnp.mean(logits.argmax(-1) == tags, where=real)

    (loss, accuracy), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss, accuracy


def train(steps: int, *, bidirectional: bool) -> Tagger:
    print("reads in both directions:" if bidirectional else "reads only forward:")
    rng = np.random.default_rng(0)
    model = Tagger(64, bidirectional=bidirectional, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    for step in range(1, steps + 1):
        loss, accuracy = train_step(model, optimizer, *make_batch(rng))
        if step % (steps // 4) == 0:
            print(f"step {step:4}: loss {loss:.3f}, {accuracy:.1%} of the tags are right")
    return model


def main(steps: int = 300):
    """Trains both taggers, and tags a text with the second one."""
    train(steps, bidirectional=False)
    model = train(steps, bidirectional=True)
    text = "(a)b)((ab)"
    logits = model(jnp.array([[CHARACTERS.index(c) for c in text]]), jnp.array([len(text)]))
    print(text, "".join(".mu"[tag] for tag in jax.device_get(logits[0].argmax(-1))), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
