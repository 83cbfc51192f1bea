"""Dropout, which at rate 0 is nothing at all."""

from flax import nnx


class Dropout(nnx.Dropout):
    """`nnx.Dropout` that keeps no random state where the rate is 0.

    Raises:
        ValueError: the rate is not in [0, 1).

    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        if not 0 <= rate < 1:
            raise ValueError(f"dropout_rate: expected 0 ≤ rate < 1, got {rate}")
        super().__init__(rate, rngs=rngs if rate else None)
