"""Text from a language model, token by token from its state."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def generate(model: Any, tokens: Tensor, num_tokens: int, *, temperature: float = 1.0) -> Tensor:
    """The tokens (batch, time) and `num_tokens` more.

    Each costs one step from the state. Where the model has a `context_length` and the text has
    filled it, each is drawn from the last `context_length` tokens alone (the seeds went on reading
    the first).
    """
    limit = model.context_length
    logits, state = model(tokens if limit is None else tokens[:, -limit:])
    for _ in range(num_tokens):
        probabilities = F.softmax(logits[:, -1] / temperature, dim=-1)
        token = torch.multinomial(probabilities, num_samples=1)
        tokens = torch.cat([tokens, token], dim=1)
        if limit is not None and tokens.shape[1] > limit:
            logits, state = model(tokens[:, -limit:])
        else:
            logits, state = model(token, state)
    return tokens
