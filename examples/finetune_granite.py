"""Fine-tune a Granite 4 with experts on prompts and answers, and give it back to transformers.

    python examples/finetune_granite.py

In place of a download, transformers saves a small model with random weights: a block with Mamba-2
and one with attention, each with eight experts, two of which are chosen for a token. The task is to
sort digits: the answer to "4132=" is "1234". Texts of different lengths are padded on the right,
and `lengths` says where they end. Only answers count in the loss. Weight decay applies to matrices
only, and not to the decays and step sizes of Mamba-2.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import tyro
from flax import nnx
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from jax_models import generate, load_pretrained, to_torch

BATCH, DIGITS, END = 32, 5, ord("\n")


def make_checkpoint(folder: Path):
    """Saves a small Granite 4 with random weights."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "eos_token_id": END, "pad_token_id": 0}
    sizes |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    sizes |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 64}
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.5}
    multipliers |= {"attention_multiplier": 0.25, "logits_scaling": 2.0}
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(**sizes, **multipliers)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_batch(rng):
    """Returns padded tokens, where each answer begins, and the length of each text."""
    tokens, counts = np.zeros((BATCH, 2 * DIGITS + 2), np.int32), rng.integers(2, DIGITS + 1, BATCH)
    for row, count in zip(tokens, counts, strict=True):
        digits = ord("0") + rng.choice(10, count, replace=False)
        row[: 2 * count + 2] = [*digits, ord("="), *sorted(digits), END]
    return tokens, counts + 1, 2 * counts + 2


@nnx.jit
def train_step(model, optimizer, tokens, starts, lengths):
    def loss_fn(model):
        logits, _ = model(tokens[:, :-1], lengths=lengths - 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        time = jnp.arange(1, tokens.shape[1])
        return jnp.mean(losses, where=(time >= starts[:, None]) & (time < lengths[:, None]))

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 400, folder: Path = Path("granite-tiny")):
    make_checkpoint(folder)
    model = load_pretrained(folder)
    adamw = optax.adamw(3e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        loss = train_step(model, optimizer, *make_batch(rng))
        if step % (steps // 5) == 0:
            print(f"step {step:3}: loss {loss:.3f}")

    save_file(to_torch(model, "hf-file"), folder / "model.safetensors", {"format": "pt"})
    prompts = b"4132=", b"72=", b"907="
    tokens = np.array([list(prompt.rjust(5, b"\0")) for prompt in prompts])
    ours = generate(model, tokens, 5, mask=tokens > 0, temperature=0, stop_tokens=END)
    given = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(tokens > 0)}
    tuned = AutoModelForCausalLM.from_pretrained(folder)
    theirs = tuned.generate(**given, max_new_tokens=5, do_sample=False)[:, 5:]
    for prompt, *answers in zip(prompts, np.asarray(ours), theirs.numpy(), strict=True):
        texts = [bytes(x.tolist()).partition(b"\n")[0].decode() for x in answers]
        print(f"{prompt.decode()}{texts[0]}, by transformers {texts[1]}")


if __name__ == "__main__":
    tyro.cli(main)
