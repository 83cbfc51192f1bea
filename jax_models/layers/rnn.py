"""The simple RNN of torch.nn.RNN, with a further option."""

__all__ = ["RNN", "RNNState"]

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.recurrent import RecurrentStack
from jax_models.ops import Nonlinearity, RecurrentMethod, RNNState
from jax_models.ops.gated import RECURRENT_STACK
from jax_models.options import FloatingDtype, Initializer
from jax_models.weights import Layouts, same, summed


class RNN(RecurrentStack[RNNState]):
    """The simple (Elman) recurrent network.

        >>> layer = RNN(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        h_t = φ(x_t W_ih + b_ih + h_{t−1} W_hh + b_hh),   φ = tanh or relu

    x is (batch, time, in_features), y (batch, time, directions · hidden_features), and the state
    `RNNState(h)` with h (num_layers · directions, batch, hidden_features).

    Args:
        in_features: size of x_t.
        hidden_features: size of h_t.
        num_layers: number of layers. Each reads the outputs of the one below.
        bidirectional: whether each layer runs in both directions. The next layer reads the outputs
            of both, as in torch. For two whole stacks of which only the outputs are joined, see
            `Bidirectional`.
        nonlinearity: φ, "tanh" or "relu".
        use_bias: whether to add b_ih and b_hh.
        recurrent_bias: whether to add b_hh. If False, there is one bias: `h_t = φ(x U + h W + b)`.
        dropout_rate: rate of the dropout of the inputs of every layer but the first, in training.
        time_major: whether x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters. The state is carried in
            at least float32.
        param_dtype: the parameters' dtype.
        kernel_init: draws W_ih. None: uniform in ±1/√hidden_features, as in torch.
        recurrent_kernel_init: draws W_hh. None: like the default of `kernel_init`.
        bias_init: draws b_ih. None: like the default of `kernel_init`.
        recurrent_bias_init: draws b_hh. None: zero if `bias_init` is given, otherwise like the
            default of `kernel_init`.
        method: "native" is the package twinscan-native, which runs on CPUs, in float32 or float64.
            "xla" runs anywhere in every dtype, and so does "definition", a plain `lax.scan`. "auto"
            uses native kernels as in `LSTM`, if the package is installed, and XLA otherwise.
        rngs: draws the parameters (`params`) and the dropout masks (`dropout`).

    Raises:
        ValueError: a size is not positive, a rate is not in [0, 1), φ is unknown, or an initializer
            is given for a bias that the layer lacks.
        NotImplementedError: (at the call) the form that `method` names does not support the call.

    Layouts: `torch.nn` (torch.nn.RNN), `torch.nn.cell` (torch.nn.RNNCell, for one layer in one
    direction), `scratch` (RNNScratch), `deep` (RNNDeep), `cell` (a single tanh cell with parameters
    U, W and one bias b). To continue training such a cell, build the layer with
    `recurrent_bias=False`. Otherwise each of the two biases would receive the full gradient of b.
    Source: Elman 1990; torch.nn.RNN.

    """

    state_type = RNNState
    gate_names = "h"

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        nonlinearity: Nonlinearity = "tanh",
        use_bias: bool = True,
        recurrent_bias: bool = True,
        dropout_rate: float = 0.0,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        method: RecurrentMethod = "auto",
        kernel_init: Initializer | None = None,
        recurrent_kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        recurrent_bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            hidden_features,
            num_layers=num_layers,
            bidirectional=bidirectional,
            use_bias=use_bias,
            recurrent_bias=recurrent_bias,
            dropout_rate=dropout_rate,
            time_major=time_major,
            recurrent_kernel_init=recurrent_kernel_init,
            recurrent_bias_init=recurrent_bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.nonlinearity: Nonlinearity = nonlinearity
        self.method = RECURRENT_STACK.checked_method(method)

    def operator(self):
        recurrence = partial(ops.rnn, nonlinearity=self.nonlinearity)
        return partial(ops.recurrent_stack, recurrence, method=self.method)

    def torch_layouts(self) -> Layouts:
        """The layouts of every stack, `deep`: RNNDeep, `cell`: a cell with U, W and one bias."""
        layouts = super().torch_layouts()
        has_bias, has_recurrent_bias = (
            bias is not None for bias in (self.cells[0].bias_ih, self.cells[0].bias_hh)
        )
        if self.causal and has_bias == has_recurrent_bias:
            layouts["deep"] = [
                row._replace(keys=tuple(f"rnns.{index}.{key}" for key in row.keys))
                for index in range(self.num_layers)
                for row in self.scratch_table(index)
            ]
        if self.causal and self.num_layers == 1 and has_bias and self.nonlinearity == "tanh":
            layouts["cell"] = [
                same("cells.0.kernel_ih", "U"),
                same("cells.0.kernel_hh", "W"),
                summed(("cells.0.bias_ih", "cells.0.bias_hh"), "b")
                if has_recurrent_bias
                else same("cells.0.bias_ih", "b"),
            ]
        return layouts
