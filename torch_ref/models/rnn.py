"""The recurrent language model in plain PyTorch (seed 001)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.rnn import RNNScratch


class RNNLanguageModel(nn.Module):
    """Token and position embeddings → RNN → LayerNorm → Linear; the seed's sizes by default.

    index is (batch, time), the logits (batch, time, vocab_size) whether or not targets are given
    (the seed flattened them); the loss is the mean over all tokens. `generate` reads the window
    from the model (the seed read a global). `rnn` may be any recurrent module over (time, batch,
    emb_size), torch.nn's for one; without `window_size` there are no positions and no limit.
    """

    def __init__(
        self,
        vocab_size: int = 20,
        emb_size: int = 10,
        hidden_size: int = 20,
        window_size: int | None = 8,
        rnn: nn.Module | None = None,
    ):
        super().__init__()
        self.window_size = window_size
        self.embedding = nn.Embedding(vocab_size, emb_size)
        if window_size is not None:
            self.pos_embedding = nn.Embedding(window_size, emb_size)
        self.rnn = RNNScratch(emb_size, hidden_size) if rnn is None else rnn
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.proj = nn.Linear(hidden_size, vocab_size)

    @classmethod
    def from_config(cls, config: Any) -> "RNNLanguageModel":
        """The twin of the model that a config of the same fields describes."""
        sizes = (config.embedding_features, config.hidden_features)
        if config.cell == "rnn" and config.num_layers == 1:
            rnn = RNNScratch(*sizes)
        else:
            recurrent = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
            dropout = config.dropout_rate if config.num_layers > 1 else 0.0
            rnn = recurrent(*sizes, num_layers=config.num_layers, dropout=dropout)
        return cls(config.vocab_size, *sizes, config.context_length, rnn)

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(index)
        time = index.shape[1]
        if self.window_size is not None:
            if time > self.window_size:
                raise ValueError(f"index: expected at most {self.window_size} steps, got {time}")
            x = x + self.pos_embedding(torch.arange(time, device=index.device))
        x, _ = self.rnn(x.transpose(0, 1))
        logits = self.proj(self.layer_norm(x.transpose(0, 1)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, index: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            window = index if self.window_size is None else index[:, -self.window_size :]
            probs = F.softmax(self(window)[0][:, -1], dim=-1)
            index = torch.cat([index, torch.multinomial(probs, num_samples=1)], dim=1)
        return index
