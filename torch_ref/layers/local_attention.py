"""Attention over a window in plain PyTorch, as in RecurrentGemma (arXiv 2402.19427).

The keys are those of transformers' RecurrentGemma.
"""

__all__ = ["LocalAttention"]

from torch_ref.layers.attention import Attention


class LocalAttention(Attention):
    """Each head is `softmax(q kᵀ / √d) v` over the current step and the window − 1 before it."""

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        window: int = 2048,
        rotary_fraction: float = 0.5,
        rope_theta: float = 10_000.0,
        use_bias: bool = False,
    ):
        super().__init__(
            features,
            num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
            rotary_features=int(features // num_heads * rotary_fraction),
            rope_theta=rope_theta,
            use_bias=use_bias,
            out_bias=True,
        )
