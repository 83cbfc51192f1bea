"""A layer that runs from the last step to the first."""

__all__ = ["Reversed"]

from jaxtyping import Array, Float

from jax_models.ops.rows import Rows, reverse_time
from jax_models.sequence import SequenceLayer, State
from jax_models.weights import Layouts, nested


class Reversed(SequenceLayer[State]):
    """`y = reverse(layer(reverse(x)))`: each step sees itself and the steps after it.

        >>> layer = Reversed(LSTM(64, 256, rngs=nnx.Rngs(0)))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

    The given state is the one before the last step, and the returned state is the one after the
    first. With `lengths` and `starts`, each row runs from its own last step to its own first step.

    Args:
        layer: a layer that runs from the first step to the last and has a `step`.

    Raises:
        TypeError: `layer` is not a `SequenceLayer`.
        ValueError: `layer` has no `step`.

    Layouts: those of the layer, with keys that begin with `layer.`.

    """

    causal = False
    noncausal_reason = "it starts at the last step: call the layer itself"

    def __init__(self, layer: SequenceLayer):
        if not layer.causal:
            raise ValueError("layer: expected a layer that has a `step`, got one without")
        super().__init__(layer.in_features, dtype=layer.dtype, param_dtype=layer.param_dtype)
        self.layer, self.time_major = layer, layer.time_major
        self.resettable = layer.resettable

    def init_state(self, batch_size: int) -> State:
        return self.layer.init_state(batch_size)

    def start(self, batch_size: int) -> State | None:
        return self.layer.start(batch_size)

    def sequence(self, x, state, rows):
        return run_reversed(self.layer, x, state, rows)

    def torch_layouts(self) -> Layouts:
        """The layouts of the layer, with keys that begin with `layer.`."""
        layouts = self.layer.torch_layouts().items()
        return {name: nested(table, "layer", "layer") for name, table in layouts}


def run_reversed(
    layer: SequenceLayer[State],
    x: Float[Array, "batch time in"],
    state: State,
    rows: Rows,
) -> tuple[Float[Array, "batch time out"], State]:
    """Runs a layer from the last step of each row to the first."""
    y, last = layer.joined_sequence(reverse_time(x, rows.lengths), state, rows.reversed())
    return reverse_time(y, rows.lengths), last
