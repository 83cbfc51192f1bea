"""The LSTM with layer norm of labml.ai's LSTMCell."""

__all__ = ["LayerNormLSTM"]

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.linear import torch_uniform
from jax_models.layers.lstm import LSTM
from jax_models.ops import LSTMNorms, LSTMState
from jax_models.options import Initializer, LayerOptions, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, gates, layouts_of, same, summed, transposed


class LayerNormLSTM(SequenceLayer[LSTMState]):
    """A long short-term memory network with normalized gates and a normalized cell.

        >>> layer = LayerNormLSTM(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        i, f, g, o = LN(x_t W_ih + h_{t−1} W_hh + b)     each gate with its own layer norm
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(LN(c_t))

    x is (batch, time, in_features), y = h (batch, time, hidden_features), and the state
    `LSTMState(h, c)`, both (batch, hidden_features). LN divides by √(var + 1e-5).

    Args:
        in_features: size of x_t.
        hidden_features: size of h_t and c_t.
        recurrent_kernel_init: draws W_hh. None: uniform in ±1/√hidden_features.
        **options: as in `LayerOptions`. Like torch's Linear, W_ih is initialized uniformly in
            ±1/√in_features, and b in ±1/√hidden_features. Layer norms start with scale 1 and bias
            0.

    Raises:
        ValueError: a size is not positive.

    Layouts: `labml` (labml's LSTMCell with layer_norm). Source: Ba et al. 2016 (arXiv 1607.06450).

    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        recurrent_kernel_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(in_features, **options)
        self.hidden_features = hidden_features
        width, param_dtype = 4 * hidden_features, self.param_dtype
        from_hidden = torch_uniform(hidden_features)
        inits = with_inits(options, torch_uniform(in_features), from_hidden)

        def param(init: Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(init(options["rngs"].params(), shape, param_dtype))

        self.kernel_ih = param(inits["kernel_init"], in_features, width)
        self.kernel_hh = param(recurrent_kernel_init or from_hidden, hidden_features, width)
        self.bias = param(inits["bias_init"], width)
        self.norms = CellNorms(hidden_features, param_dtype=param_dtype)

    def arrays(self) -> dict:
        """The weights as arguments of `ops.layer_norm_lstm`."""
        return {
            "kernel_ih": self.kernel_ih[...],
            "kernel_hh": self.kernel_hh[...],
            "bias": self.bias[...],
            "norms": self.norms.arrays(),
        }

    def init_state(self, batch_size: int) -> LSTMState:
        """Zeros, (batch, hidden_features), in at least float32."""
        shape = (batch_size, self.hidden_features)
        return LSTMState(*(jnp.zeros(shape, self.state_dtype) for _ in LSTMState._fields))

    def sequence(self, x, state, rows):
        dtype = self.computation_dtype(x)
        y, state = ops.layer_norm_lstm(
            x.astype(dtype),
            state,
            **jax.tree.map(lambda w: w.astype(dtype), self.arrays()),
            rows=rows,
        )
        return y.astype(dtype), state

    def torch_layouts(self) -> Layouts:
        """`labml`: the keys of labml's LSTMCell."""
        return {
            "labml": [
                transposed("kernel_ih", "input_lin.weight"),
                transposed("kernel_hh", "hidden_lin.weight"),
                same("bias", "hidden_lin.bias"),
                *cell_norms("norms"),
            ]
        }


class CellNorms(nnx.Module):
    """The layer norms of one LSTM: the gates' norms, side by side, and the cell's norm."""

    def __init__(self, hidden_features: int, *, param_dtype):
        self.gate_scale = nnx.Param(jnp.ones(4 * hidden_features, param_dtype))
        self.gate_bias = nnx.Param(jnp.zeros(4 * hidden_features, param_dtype))
        self.cell_scale = nnx.Param(jnp.ones(hidden_features, param_dtype))
        self.cell_bias = nnx.Param(jnp.zeros(hidden_features, param_dtype))

    def arrays(self) -> LSTMNorms:
        """The weights as an argument of the operators."""
        return LSTMNorms(*(getattr(self, name)[...] for name in LSTMNorms._fields))


def cell_norms(param: str) -> Table:
    """The weight table of a `CellNorms`, which labml calls `layer_norm` and `layer_norm_c`."""
    return [
        gates(f"{param}.gate_scale", [f"layer_norm.{k}.weight" for k in range(4)]),
        gates(f"{param}.gate_bias", [f"layer_norm.{k}.bias" for k in range(4)]),
        same(f"{param}.cell_scale", "layer_norm_c.weight"),
        same(f"{param}.cell_bias", "layer_norm_c.bias"),
    ]


@layouts_of(LSTM)
def lstm_layouts(lstm: LSTM) -> Layouts:
    """`labml`: the keys of labml's LSTM, which has one bias in each layer."""
    weights = lstm.cells[0].arrays().keys()
    if not lstm.causal or weights - {"bias_hh"} != {"kernel_ih", "kernel_hh", "bias_ih"}:
        return {}
    rows = []
    for cell in (f"cells.{index}" for index in range(lstm.num_layers)):
        bias = f"{cell}.hidden_lin.bias"
        rows += [
            transposed(f"{cell}.kernel_ih", f"{cell}.input_lin.weight"),
            transposed(f"{cell}.kernel_hh", f"{cell}.hidden_lin.weight"),
            summed((f"{cell}.bias_ih", f"{cell}.bias_hh"), bias)
            if "bias_hh" in weights
            else same(f"{cell}.bias_ih", bias),
        ]
    return {"labml": rows}
