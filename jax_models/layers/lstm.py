"""The LSTM of torch.nn.LSTM, with further options."""

__all__ = ["LSTM", "LSTMState"]

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.recurrent import RecurrentStack
from jax_models.ops import LSTMMethod, LSTMState
from jax_models.ops.gated import RECURRENT_STACK
from jax_models.options import FloatingDtype, Initializer
from jax_models.weights import Layouts, SharedLayer


class LSTM(SharedLayer, RecurrentStack[LSTMState]):
    """The long short-term memory network.

        >>> layer = LSTM(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        i, f, g, o = x_t W_ih + b_ih + h_{t−1} W_hh + b_hh
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(c_t)                  then, with `proj_features`, h_t W_hr + b_hr

    and with `use_peepholes`, p_i ⊙ c_{t−1} is added to i, p_f ⊙ c_{t−1} to f, and p_o ⊙ c_t to o.

    x is (batch, time, in_features), and y is (batch, time, directions · out). The state is
    `LSTMState(h, c)` with h (num_layers · directions, batch, out) and c (num_layers · directions,
    batch, hidden_features). out is proj_features if given, otherwise hidden_features.

    Args:
        in_features: size of x_t.
        hidden_features: size of c_t.
        num_layers: number of layers. Each reads the outputs of the one below.
        bidirectional: whether each layer runs in both directions. The next layer reads the outputs
            of both, as in torch.
        proj_features: size of h_t, less than hidden_features. None: no projection.
        proj_bias: whether to add b_hr, as torch_ref.LSTMProj does. torch.nn.LSTM has no b_hr.
        use_bias: whether to add b_ih and b_hh.
        recurrent_bias: whether to add b_hh. If False, b_ih is the only bias.
        use_peepholes: whether the gates also read the cell. torch.nn.LSTM has no peepholes.
        dropout_rate: rate of the dropout of the inputs of every layer but the first, in training.
        time_major: whether x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters. The state is carried in
            at least float32.
        param_dtype: the parameters' dtype.
        kernel_init: draws W_ih and W_hr. None: uniform in ±1/√hidden_features, as in torch.
        recurrent_kernel_init: draws W_hh. None: like the default of `kernel_init`.
        bias_init: draws b_ih, b_hr and the peepholes. None: like the default of `kernel_init`.
        recurrent_bias_init: draws b_hh. None: zero if `bias_init` is given, otherwise like the
            default of `kernel_init`.
        method: "cudnn" is NVIDIA's own LSTM, which runs on its GPUs in float32 and supports no
            projections, peepholes or `reset`. "native" is the package twinscan-native, which runs
            on CPUs in float32 or float64 and supports no projections or peepholes. "xla" runs
            anywhere with every option, and so does "definition", a plain `lax.scan`. "auto" uses
            cuDNN or native kernels for sequences that they support and are likely to make faster,
            and XLA otherwise (see below). `ops.forms_of` shows the choice.
        rngs: draws the parameters (`params`) and the dropout masks (`dropout`).

    Raises:
        ValueError: a size is not positive, proj_features is not less than hidden_features, a rate
            is not in [0, 1), there is no such method, or an initializer is given for a bias that
            the layer lacks.
        NotImplementedError: (at the call) the form that `method` names does not support the call.

    "auto" uses cuDNN for more than one row and step, if the program runs on the machine's only
    NVIDIA GPU or inside a `jax.shard_map` over NVIDIA GPUs, because the compiler cannot divide a
    call of cuDNN over several GPUs. Like JAX's own matrix products on a GPU, those of cuDNN use
    TensorFloat-32 unless `jax.default_matmul_precision("highest")` or another setting asks for
    more. Under `vmap`, calls of cuDNN run one after the other. On a CPU, "auto" uses the native
    kernels for 16 steps or more in float32, if the program has a single device or is inside a
    `jax.shard_map`.

    Layouts: `torch.nn` (torch.nn.LSTM), `torch.nn.cell` (torch.nn.LSTMCell, for one layer in one
    direction), `scratch` (LSTMScratch, LSTMProj), `labml` (labml's LSTM, with one bias per layer).
    To continue training labml's LSTM, build the layer with `recurrent_bias=False`. Otherwise each
    of the two biases would receive the full gradient of labml's one bias. Source: Hochreiter and
    Schmidhuber 1997; peepholes, Gers and Schmidhuber 2000; the projection, Sak et al. 2014 (arXiv
    1402.1128); torch.nn.LSTM.

    """

    state_type = LSTMState
    gate_names = "ifgo"

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        proj_features: int | None = None,
        proj_bias: bool = False,
        use_bias: bool = True,
        recurrent_bias: bool = True,
        use_peepholes: bool = False,
        dropout_rate: float = 0.0,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        method: LSTMMethod = "auto",
        kernel_init: Initializer | None = None,
        recurrent_kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        recurrent_bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        # A projection as wide as the cell is refused, because torch.nn.LSTM refuses it, too.
        if proj_features is not None and not 0 < proj_features < hidden_features:
            raise ValueError(
                f"proj_features: expected between 1 and hidden_features − 1 = "
                f"{hidden_features - 1}, got {proj_features}"
            )
        if proj_bias and proj_features is None:
            raise ValueError("proj_bias: expected False where there is no proj_features, got True")
        super().__init__(
            in_features,
            hidden_features,
            num_layers=num_layers,
            bidirectional=bidirectional,
            proj_features=proj_features,
            proj_bias=proj_bias,
            use_bias=use_bias,
            recurrent_bias=recurrent_bias,
            use_peepholes=use_peepholes,
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
        self.method = RECURRENT_STACK.checked_method(method)

    def operator(self):
        return partial(ops.recurrent_stack, ops.lstm, method=self.method)

    def torch_layouts(self) -> Layouts:
        """The layouts of every stack, and those that the files of architectures declare."""
        return RecurrentStack.torch_layouts(self) | SharedLayer.torch_layouts(self)
