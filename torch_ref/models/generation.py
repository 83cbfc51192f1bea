"""Generates text with a language model, token by token from its state."""

__all__ = ["generate"]

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def generate(model: Any, prompt: Tensor, num_tokens: int, *, temperature: float = 1.0) -> Tensor:
    """Draws `num_tokens` tokens after a prompt (batch, time), without dropout.

    Each token costs one step from the state. If the model has a `context_length` and the text is
    longer, each token is computed from the last `context_length` tokens instead. A temperature of 0
    always chooses the likeliest token.
    """
    limit, training = model.context_length, model.training
    model.eval()
    text, unread, state = prompt, prompt, None
    for _ in range(num_tokens):
        # A text that is longer than the context is read again from its last `limit` tokens.
        if limit is not None and text.shape[1] > limit:
            unread, state = text[:, -limit:], None
        logits, state = model(unread, state)
        # The state holds the rest of the text, so the model next reads only the new token.
        if temperature == 0:
            unread = logits[:, -1:].argmax(dim=-1)
        else:
            probabilities = F.softmax(logits[:, -1] / temperature, dim=-1)
            unread = torch.multinomial(probabilities, num_samples=1)
        text = torch.cat([text, unread], dim=1)
    model.train(training)
    return text[:, prompt.shape[1] :]
