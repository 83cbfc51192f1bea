"""minGRU and minLSTM (Feng et al. 2024)."""

__all__ = ["MinGRU", "MinLSTM", "MinRNNState"]

from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.dropout import dropout_between
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.mesh_axes import last_axis
from jax_models.ops import LinearRecurrenceMethod, MinRNNState
from jax_models.ops.linear import LINEAR_RECURRENCE
from jax_models.options import LayerOptions, refuse_unused, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, gates


class MinRNN(SequenceLayer[MinRNNState]):
    """Layers of a minimal gated recurrence. Subclasses set `gate_names` and `operator`."""

    divides_time = True

    gate_names: ClassVar[str]
    operator: ClassVar[Callable[..., Any]]
    """The recurrence of one layer: `ops.min_gru` or `ops.min_lstm`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int = 1,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        method: LinearRecurrenceMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(in_features, **options)
        self.hidden_features = hidden_features
        self.method = LINEAR_RECURRENCE.checked_method(method)
        bias_init = options.get("bias_init")
        refuse_unused("bias_init", bias_init, unless=use_bias, because="with use_bias=False")
        self.dropout = dropout_between(num_layers, dropout_rate, rngs=options["rngs"])
        sizes = [in_features] + [hidden_features] * (num_layers - 1)
        self.gates = nnx.List(
            Linear(
                size,
                len(self.gate_names) * hidden_features,
                use_bias=use_bias,
                **with_inits(options, torch_uniform(size), torch_uniform(size)),
            )
            for size in sizes
        )

    def init_state(self, batch_size: int) -> MinRNNState:
        """Zeros, (num_layers, batch, hidden_features), in at least float32."""
        shape = (len(self.gates), batch_size, self.hidden_features)
        return MinRNNState(jnp.zeros(shape, self.state_dtype))

    def sequence(self, x, state, rows):
        """Runs the layers, the lowest first, with dropout between them."""
        x = x.astype(self.computation_dtype(x))
        last = []
        for layer, linear in enumerate(self.gates):
            # The gates depend on the input alone, so the operator computes them for all steps at
            # once, and runs a linear recurrence.
            weights = {"kernel": linear.kernel, "bias": linear.bias}
            weights = {k: w[...].astype(x.dtype) for k, w in weights.items() if w is not None}
            y, h = self.operator(
                self.dropout(x) if layer else x,
                MinRNNState(state.h[layer]),
                **weights,
                method=self.method,
                rows=rows,
            )
            x = y.astype(x.dtype)
            last.append(h)
        return x, jax.tree.map(lambda *h: jnp.stack(h), *last)

    mesh_axes = last_axis("gates", "gates")

    def torch_layouts(self) -> Layouts:
        """`minimal`: one Linear for each gate of each layer, as in the paper's listings."""
        table = []
        for i, linear in enumerate(self.gates):
            keys = [f"layers.{i}.linear_{gate}" for gate in self.gate_names]
            table.append(gates(f"gates.{i}.kernel", [f"{key}.weight" for key in keys]))
            if linear.bias is not None:
                table.append(gates(f"gates.{i}.bias", [f"{key}.bias" for key in keys]))
        return {"minimal": table}


class MinGRU(MinRNN):
    """The minimal gated recurrent unit network.

        >>> layer = MinGRU(4, 8, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((2, 5, 4)))

        z_t = σ(x_t W_z + b_z)
        h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ (x_t W_h + b_h)

    x is (batch, time, in_features), y (batch, time, hidden_features), and the state
    `MinRNNState(h)` with h (num_layers, batch, hidden_features). The gates do not depend on the
    state, so a whole sequence is one linear recurrence, which accelerators compute in parallel.

    Args:
        in_features: size of x_t.
        hidden_features: size of h_t.
        num_layers: number of layers. Each reads the outputs of the one below.
        use_bias: whether to add b_z and b_h.
        dropout_rate: rate of the dropout of the inputs of every layer but the first, in training.
        method: the method of `ops.linear_recurrence`.
        **options: as in `LayerOptions`. Matrices and biases are initialized uniformly in
            ±1/√in_features, as in torch.nn.Linear.

    Raises:
        ValueError: a size is not positive, a rate is not in [0, 1), there is no such method, or
            `bias_init` is given without biases.

    Layouts: `minimal` (torch_ref.MinGRU). Source: "Were RNNs All We Needed?", Feng et al. 2024
    (arXiv 2410.01201), section 3.1; its log-space variant, whose candidate passes through a further
    function, is another model.

    """

    gate_names = "zh"
    operator = staticmethod(ops.min_gru)


class MinLSTM(MinRNN):
    """The minimal long short-term memory network.

        >>> layer = MinLSTM(4, 8, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((2, 5, 4)))

        f_t = σ(x_t W_f + b_f),   i_t = σ(x_t W_i + b_i)
        h_t = f_t / (f_t + i_t) ⊙ h_{t−1} + i_t / (f_t + i_t) ⊙ (x_t W_h + b_h)

    Shapes, arguments, errors and layouts are those of `MinGRU`. Source: section 3.2 of the paper.
    """

    gate_names = "fih"
    operator = staticmethod(ops.min_lstm)
