"""The recurrent language model in plain PyTorch."""

__all__ = ["RNNLanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.layers.min_rnn import MinGRU, MinLSTM
from torch_ref.layers.rnn import RNNScratch
from torch_ref.layers.torch_nn import run_recurrence

State = tuple[Any, int]


class RNNLanguageModel(nn.Module):
    """Token and position embeddings → RNN → LayerNorm → Linear.

    tokens are (batch, time), and the logits are (batch, time, vocab_size). The state holds the
    state of `rnn` and the number of tokens so far. `rnn` may be any recurrent module over (batch,
    time, embedding_features), including torch.nn's. Without a `context_length`, there are no
    position embeddings and no limit.
    """

    def __init__(
        self,
        vocab_size: int = 20,
        embedding_features: int = 10,
        hidden_features: int = 20,
        context_length: int | None = 8,
        rnn: nn.Module | None = None,
    ):
        super().__init__()
        self.context_length = context_length
        self.embedding = nn.Embedding(vocab_size, embedding_features)
        if context_length is not None:
            self.pos_embedding = nn.Embedding(context_length, embedding_features)
        self.rnn = RNNScratch(embedding_features, hidden_features) if rnn is None else rnn
        self.layer_norm = nn.LayerNorm(hidden_features)
        self.proj = nn.Linear(hidden_features, vocab_size)

    @classmethod
    def from_config(cls, config: Any) -> "RNNLanguageModel":
        """Builds the twin of the model of a JAX config."""
        sizes = (config.embedding_features, config.hidden_features)
        if config.cell == "rnn" and config.num_layers == 1:
            rnn = RNNScratch(*sizes)
        elif config.cell in ("min_gru", "min_lstm"):
            recurrent = {"min_gru": MinGRU, "min_lstm": MinLSTM}[config.cell]
            options = {"num_layers": config.num_layers, "dropout_rate": config.dropout_rate}
            rnn = recurrent(*sizes, **options)
        else:
            recurrent = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
            dropout = config.dropout_rate if config.num_layers > 1 else 0.0
            options = {"num_layers": config.num_layers, "dropout": dropout, "batch_first": True}
            rnn = recurrent(*sizes, **options)
        return cls(config.vocab_size, *sizes, config.context_length, rnn)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        rnn_state, start = (None, 0) if state is None else state
        # Positions continue from those of the previous call.
        end = start + tokens.shape[1]
        x = self.embedding(tokens)
        if self.context_length is not None:
            if end > self.context_length:
                raise ValueError(
                    f"tokens: expected at most {self.context_length} in all, got {end}"
                )
            x = x + self.pos_embedding(torch.arange(start, end, device=tokens.device))
        x, rnn_state = run_recurrence(self.rnn, x, rnn_state)
        return self.proj(self.layer_norm(x)), (rnn_state, end)
