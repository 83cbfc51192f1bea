"""Two whole stacks, one of which runs backward in time."""

__all__ = ["Bidirectional", "BidirectionalState"]

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_models.layers.reversed import run_reversed
from jax_models.sequence import SequenceLayer, refuse_time_major
from jax_models.weights import Layouts, nested


class BidirectionalState(NamedTuple):
    """The states of the two stacks."""

    forward: Any
    backward: Any


class Bidirectional(SequenceLayer[BidirectionalState]):
    """`y = [forward(x), reverse(backward(reverse(x)))]`, joined along the features.

        >>> rngs = nnx.Rngs(0)
        >>> layer = Bidirectional(LSTM(64, 256, rngs=rngs), GRU(64, 128, rngs=rngs))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

    Only the outputs of the two stacks are joined. If each stack has one layer, this is the same
    network as `bidirectional=True`. With more layers, each layer reads only its own direction of
    the layer below, whereas with `bidirectional=True` it reads both. The `dtype` and `param_dtype`
    are those of the forward stack.

    Args:
        forward: the layer that runs from the first step to the last.
        backward: the layer that runs from the last step to the first, in each row from its
            `lengths` to its `starts`. With `reset`, its last state is that of the row's first
            document, even if that document is padding.

    Raises:
        TypeError: one of the two is not a `SequenceLayer`.
        ValueError: the two differ in `in_features`, or one has no `step` or has `time_major`.

    Layouts: those that both layers have, with keys that begin with `rnn_f.` and `rnn_b.`. `deep`
    has the keys of torch_ref.RNNBidirectional.

    """

    causal = False
    noncausal_reason = "the backward stack needs the whole sequence: call the layer itself"

    def __init__(self, forward: SequenceLayer, backward: SequenceLayer):
        if forward.in_features != backward.in_features:
            raise ValueError(
                f"backward: expected in_features={forward.in_features} as forward has, "
                f"got {backward.in_features}"
            )
        for name, layer in (("forward", forward), ("backward", backward)):
            refuse_time_major(name, layer)
            if not layer.causal:
                raise ValueError(f"{name}: expected a layer of one direction, got two")
        self.forward = forward
        self.backward = backward
        self.in_features = forward.in_features
        self.dtype, self.param_dtype = forward.dtype, forward.param_dtype
        self.resettable = forward.resettable and backward.resettable

    def init_state(self, batch_size: int) -> BidirectionalState:
        return BidirectionalState(
            self.forward.init_state(batch_size), self.backward.init_state(batch_size)
        )

    def sequence(self, x, state, rows):
        y_forward, forward = self.forward.joined_sequence(x, state.forward, rows)
        y_backward, backward = run_reversed(self.backward, x, state.backward, rows)
        y = jnp.concatenate([y_forward, y_backward], axis=-1)
        return y, BidirectionalState(forward, backward)

    def torch_layouts(self) -> Layouts:
        """The layouts that both stacks have, side by side."""
        forward, backward = self.forward.torch_layouts(), self.backward.torch_layouts()
        return {
            name: nested(forward[name], "forward", "rnn_f")
            + nested(backward[name], "backward", "rnn_b")
            for name in forward
            if name in backward
        }
