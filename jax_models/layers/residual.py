"""The residual block: a mixer over time and an MLP, each after a norm and added to its input."""

__all__ = ["ResidualBlock"]

from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array, Float

from jax_models.ops import Rows
from jax_models.sequence import SequenceLayer, State

Map = Callable[[Array], Array]
"""A norm or an MLP, which treats each step separately."""


class ResidualBlock(SequenceLayer[State]):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer.

        >>> class Block(ResidualBlock):
        ...     parts = ("norm1", "lstm", "norm2", "mlp")
        ...     def __init__(self, features, *, rngs):
        ...         super().__init__(features)
        ...         self.norm1 = RMSNorm(features, rngs=rngs)
        ...         self.lstm = LSTM(features, features, rngs=rngs)
        ...         self.norm2 = RMSNorm(features, rngs=rngs)
        ...         self.mlp = GatedMLP(features, 3 * features, rngs=rngs)
        >>> y, state = Block(64, rngs=nnx.Rngs(0))(jnp.ones((8, 100, 64)))

    A subclass builds the four parts and lists the names of their attributes in `parts`.
    """

    divides_time = True

    parts: ClassVar[tuple[str, str, str, str]]
    """The names of the attributes that hold the mixer's norm, the mixer, the MLP's norm and the
    MLP.
    """
    norms_outputs: bool = False
    """Whether each norm follows the mixer or the MLP: `x ← x + norm(mixer(x))`."""
    residual_scale: float = 1.0
    """The factor by which the outputs of the mixer and the MLP are multiplied before they are added
    to x.
    """

    @property
    def _mixer(self) -> SequenceLayer[State]:
        """The mixer, whose restrictions also apply to the block."""
        return getattr(self, self.parts[1])

    causal: Any = property(lambda self: self._mixer.causal)
    noncausal_reason: Any = property(lambda self: self._mixer.noncausal_reason)
    resettable: Any = property(lambda self: self._mixer.resettable)
    unresettable_reason: Any = property(lambda self: self._mixer.unresettable_reason)

    def mlp_of(self, rows: Rows) -> Map:
        """The MLP as a function of its input alone."""
        return getattr(self, self.parts[3])

    def init_state(self, batch_size: int) -> State:
        return self._mixer.init_state(batch_size)

    def start(self, batch_size: int) -> State | None:
        return self._mixer.start(batch_size)

    def sequence(self, x, state, rows):
        """Runs the mixer, then the MLP, each with its norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        norm, mixer, mlp_norm = (getattr(self, part) for part in self.parts[:3])
        mlp, scale = self.mlp_of(rows), self.residual_scale
        # Pre-norm: each norm comes before the mixer or the MLP.
        if not self.norms_outputs:
            return run_residual_block(x, state, rows, norm, mixer, mlp_norm, mlp, scale)
        # Post-norm: each norm comes after the mixer or the MLP.
        y, state = mixer.sequence(x, state, rows)
        x = x + scale * norm(y)
        return x + scale * mlp_norm(mlp(x)), state


def run_residual_block(
    x: Float[Array, "batch time features"],
    state: Any,
    rows: Rows,
    norm: Map,
    mixer: SequenceLayer,
    mlp_norm: Map,
    mlp: Map,
    scale: float = 1.0,
) -> tuple[Float[Array, "batch time features"], Any]:
    """Runs a residual block, given its parts and the factor `residual_scale`."""
    y, state = mixer.sequence(norm(x), state, rows)
    x = x + scale * y
    return x + scale * mlp(mlp_norm(x)), state
