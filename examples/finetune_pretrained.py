"""Fine-tune a pretrained RecurrentGemma on short documents that are packed into long rows.

    python examples/finetune_pretrained.py

In place of a download, this makes a small checkpoint with random weights in transformers' format.
The documents are sums such as "8+5=13". Packing fills each row with as many documents as fit, so
hardly any step is padding. `reset` marks the first token of each document: the recurrences and the
attention restart there, so a document gets the same logits as in a row of its own. Only the digits
after "=" and the end of the line count in the loss.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from safetensors.numpy import save_file

from jax_models import GriffinLanguageModelConfig, generate, load_pretrained, to_torch

ROWS, TIME = 16, 96


def make_checkpoint(folder: Path):
    """Writes a small RecurrentGemma as transformers' `save_pretrained` does."""
    config = {"model_type": "recurrent_gemma", "vocab_size": 128, "num_hidden_layers": 3}
    config |= {"hidden_size": 64, "lru_width": 64, "intermediate_size": 384}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_window_size": 32}
    model = GriffinLanguageModelConfig.from_hf(config).build(rngs=nnx.Rngs(0))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(to_torch(model, "hf-file"), folder / "model.safetensors")


def make_document(rng) -> np.ndarray:
    a, b = rng.integers(10, size=2)
    return np.frombuffer(f"{a}+{b}={a + b}\n".encode(), np.uint8)


def packed_rows(rng):
    """Returns tokens, where documents begin, and which tokens are answers, all (ROWS, TIME)."""
    tokens = np.zeros((ROWS, TIME), np.int32)
    reset, answer = np.zeros((2, ROWS, TIME), bool)
    for row in range(ROWS):
        start, document = 0, make_document(rng)
        while (end := start + len(document)) <= TIME:
            tokens[row, start:end], reset[row, start], answer[row, start + 4 : end] = document, 1, 1
            start, document = end, make_document(rng)
    return tokens, reset, answer


@nnx.jit
def train_step(model, optimizer, tokens, reset, answer):
    def loss_fn(model):
        logits, _ = model(tokens[:, :-1], reset=reset[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses, where=answer[:, 1:])

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 200, folder: Path = Path("recurrentgemma-tiny")):
    make_checkpoint(folder)
    model = load_pretrained(folder)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        tokens, reset, answer = packed_rows(rng)
        loss = train_step(model, optimizer, tokens, reset, answer)
        if step % (steps // 5) == 0:
            print(f"step {step:3}: loss {loss:.3f}")

    packed, (begin, end) = model(tokens, reset=reset)[0], np.flatnonzero(reset[0])[1:3]
    alone, _ = model(tokens[0, None, begin:end])
    difference = abs(packed[0, begin:end] - alone[0]).max()
    print(f"a packed document's logits differ from those of the document alone by {difference:.1e}")
    prompt = jnp.array([list(b"8+5=")])
    digits = generate(model, prompt, 2, key=jax.random.key(0), temperature=0.0)
    print(bytes(jnp.append(prompt, digits).tolist()).decode())
    save_file(to_torch(model, "hf-file"), folder / "model.safetensors")


if __name__ == "__main__":
    tyro.cli(main)
