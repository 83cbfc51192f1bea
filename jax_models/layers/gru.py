"""The GRU of torch.nn.GRU, with a further option."""

__all__ = ["GRU", "GRUState"]

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.recurrent import RecurrentStack
from jax_models.ops import GRUState, RecurrentMethod
from jax_models.ops.gated import RECURRENT_STACK
from jax_models.options import FloatingDtype, Initializer
from jax_models.weights import Layouts


class GRU(RecurrentStack[GRUState]):
    """The gated recurrent unit network.

        >>> layer = GRU(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        r = σ(x_t W_ir + b_ir + h_{t−1} W_hr + b_hr)
        z = σ(x_t W_iz + b_iz + h_{t−1} W_hz + b_hz)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    and without `reset_after`

        n = tanh(x_t W_in + b_in + (r ⊙ h_{t−1}) W_hn + b_hn)

    x is (batch, time, in_features), y (batch, time, directions · hidden_features), and the state
    `GRUState(h)` with h (num_layers · directions, batch, hidden_features).

    Args:
        in_features: size of x_t.
        hidden_features: size of h_t.
        num_layers: number of layers. Each reads the outputs of the one below.
        bidirectional: whether each layer runs in both directions. The next layer reads the outputs
            of both, as in torch.
        use_bias: whether to add the biases b_i and b_h.
        reset_after: whether r is applied after the product with W_hn, as in torch. False: before
            it, as in the paper and by default in ONNX.
        dropout_rate: rate of the dropout of the inputs of every layer but the first, in training.
        time_major: whether x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters. The state is carried in
            at least float32.
        param_dtype: the parameters' dtype.
        kernel_init: draws the W_i. None: uniform in ±1/√hidden_features, as in torch.
        recurrent_kernel_init: draws the W_h. None: like the default of `kernel_init`.
        bias_init: draws the b_i. None: like the default of `kernel_init`.
        recurrent_bias_init: draws the b_h. None: zero if `bias_init` is given, otherwise like the
            default of `kernel_init`.
        method: "native" is the package twinscan-native, which runs on CPUs in float32 or float64,
            with `reset_after`. "xla" runs anywhere with every option, and so does "definition", a
            plain `lax.scan`. "auto" uses native kernels as in `LSTM`, if the package is installed,
            and XLA otherwise.
        rngs: draws the parameters (`params`) and the dropout masks (`dropout`).

    Raises:
        ValueError: a size is not positive, a rate is not in [0, 1), or an initializer is given for
            a bias that the layer lacks.
        NotImplementedError: (at the call) the form that `method` names does not support the call.

    Layouts: with `reset_after`, `torch.nn` (torch.nn.GRU) and, for one layer in one direction,
    `torch.nn.cell` (torch.nn.GRUCell); `scratch` (torch_ref.GRUScratch). Source: Cho et al. 2014
    (arXiv 1406.1078), by default with the reset gate after the product, as in torch.nn.GRU.

    """

    state_type = GRUState
    gate_names = "rzn"

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        use_bias: bool = True,
        reset_after: bool = True,
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
        self.reset_after = reset_after
        self.method = RECURRENT_STACK.checked_method(method)

    def operator(self):
        recurrence = partial(ops.gru, reset_after=self.reset_after)
        return partial(ops.recurrent_stack, recurrence, method=self.method)

    def options_beyond_a_cell(self) -> list[str]:
        """The options of every stack, and `reset_after=False`."""
        return [
            *super().options_beyond_a_cell(),
            *([] if self.reset_after else ["reset_after=False"]),
        ]

    def torch_layouts(self) -> Layouts:
        """The layouts of every stack, except that `torch.nn` requires `reset_after`."""
        layouts = super().torch_layouts()
        if not self.reset_after:
            layouts.pop("torch.nn", None)
        return layouts
