"""Dropout, which at rate 0 is nothing at all."""

from flax import nnx

from jax_models.ops.checks import checked_rate


class Dropout(nnx.Dropout):
    """`nnx.Dropout` that keeps no random state where the rate is 0.

    Raises:
        ValueError: the rate is not in [0, 1).

    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        super().__init__(checked_rate("dropout_rate", rate), rngs=rngs if rate else None)
