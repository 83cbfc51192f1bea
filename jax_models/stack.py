"""Sequence layers one after the other."""

from collections.abc import Iterable

from flax import nnx

from jax_models.sequence import SequenceLayer, State
from jax_models.torch_weights import Layouts, nested


class Stack(SequenceLayer):
    """Layers of one size, each over the outputs of the one below.

    The state is the tuple of the layers' states, the lowest first.

    Args:
        layers: at least one; each returns as many features as the next one reads.

    Raises:
        ValueError: there is no layer.

    Layouts: those that all layers have, under `{i}`.

    """

    def __init__(self, layers: Iterable[SequenceLayer]):
        self.layers = nnx.List(layers)
        if not self.layers:
            raise ValueError("layers: expected at least one, got none")
        self.in_features = self.layers[0].in_features
        self.causal = all(layer.causal for layer in self.layers)
        self.resettable = all(layer.resettable for layer in self.layers)

    def init_state(self, batch_size: int) -> State:
        """The layers' initial states."""
        return tuple(layer.init_state(batch_size) for layer in self.layers)

    def start(self, batch_size: int) -> State:
        """What the layers start from."""
        return tuple(layer.start(batch_size) for layer in self.layers)

    def sequence(self, x, state, lengths, reset):
        """All layers, the lowest first."""
        last_states = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            x, last_state = layer.sequence(x, layer_state, lengths, reset)
            last_states.append(last_state)
        return x, tuple(last_states)

    def torch_layouts(self) -> Layouts:
        """The layouts that all layers have, numbered."""
        layouts = [layer.torch_layouts() for layer in self.layers]
        return {
            name: [
                row
                for i, layer in enumerate(layouts)
                for row in nested(layer[name], f"layers.{i}", str(i))
            ]
            for name in layouts[0]
            if all(name in layer for layer in layouts)
        }
