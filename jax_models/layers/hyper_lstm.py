"""The HyperLSTM of labml.ai, after HyperNetworks (arXiv 1609.09106)."""

__all__ = ["HyperLSTM", "HyperLSTMState"]

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.layer_norm_lstm import CellNorms, LayerNormLSTM, cell_norms
from jax_models.layers.linear import lecun_normal, torch_uniform
from jax_models.ops import HyperLSTMState, carry_dtype
from jax_models.options import Initializer, LayerOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, gates, nested


class HyperLSTM(SequenceLayer[HyperLSTMState]):
    """LSTMs whose matrix products are scaled at each step by a smaller LSTM, the hyper network.

        >>> layer = HyperLSTM(64, 256, 32, 8, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        ĥ_t, ĉ_t = LayerNormLSTM([h_{t−1}, x_t], (ĥ_{t−1}, ĉ_{t−1}))
        z_h, z_x, z_b = ĥ_t W_zh + b_zh, ĥ_t W_zx + b_zx, ĥ_t W_zb      for each gate
        d_h, d_x, d_b = z_h D_h, z_x D_x, z_b D_b + b_d                 for each gate
        i, f, g, o = LN(d_h ⊙ (h_{t−1} W_h) + d_x ⊙ (x_t W_x) + d_b)    each its own layer norm
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(LN(c_t))

    x is (batch, time, in_features), y (batch, time, hidden_features), the h of the last layer, and
    the state `HyperLSTMState(h, c, hyper_h, hyper_c)`: h and c (num_layers, batch,
    hidden_features), ĥ and ĉ (num_layers, batch, hyper_features).

    Args:
        in_features: size of x_t.
        hidden_features: size of h_t and c_t.
        hyper_features: size of ĥ_t and ĉ_t.
        embedding_features: size of each gate's z.
        num_layers: number of layers. Each reads the outputs of the one below.
        recurrent_kernel_init: draws W_h of all gates and the hyper network's W_hh. None: each
            gate's W_h is orthogonal (zero in labml's code), and W_hh is uniform in
            ±1/√hyper_features, like torch's Linear.
        **options: as in `LayerOptions`. W_x is initialized by `lecun_normal` (to zero in labml's
            code), and the W_z, the D, the hyper network's W_ih and the biases like torch's Linear.
            Layer norms start with scale 1 and bias 0. LN is computed in at least float32.

    Raises:
        ValueError: a size is not positive.

    Layouts: `labml` (torch_ref.HyperLSTM). Source: Ha et al. 2016, appendix A.2.2. As in labml's
    code, z is computed from ĥ_t, whereas the paper prints ĥ_{t−1}.

    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        hyper_features: int,
        embedding_features: int,
        *,
        num_layers: int = 1,
        recurrent_kernel_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(in_features, **options)
        self.hidden_features = hidden_features
        self.hyper_features = hyper_features
        self.num_layers = num_layers
        self.cells = nnx.List(
            HyperLSTMCell(
                hidden_features if layer else in_features,
                hidden_features,
                hyper_features,
                embedding_features,
                recurrent_kernel_init,
                options,
            )
            for layer in range(num_layers)
        )

    def init_state(self, batch_size: int) -> HyperLSTMState:
        """Zeros, (num_layers, batch, features), in at least float32."""
        hidden, hyper = self.hidden_features, self.hyper_features
        dtype = self.state_dtype
        return HyperLSTMState(
            *(
                jnp.zeros((self.num_layers, batch_size, features), dtype)
                for features in (hidden, hidden, hyper, hyper)
            )
        )

    def sequence(self, x, state, rows):
        """Runs `ops.hyper_lstm` for one layer after the other."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        # Each layer runs over the whole sequence, from its own slice of the state, and its outputs
        # are the next one's inputs.
        layers = zip(*state, strict=True)
        last_states = []
        for cell, layer_state in zip(self.cells, layers, strict=True):
            y, last_state = ops.hyper_lstm(
                x,
                HyperLSTMState(*layer_state),
                **jax.tree.map(lambda w: w.astype(dtype), cell.arrays()),
                rows=rows,
            )
            x = y.astype(dtype)
            last_states.append(last_state)
        return x, jax.tree.map(lambda *s: jnp.stack(s), *last_states)

    def torch_layouts(self) -> Layouts:
        """`labml`: the keys of torch_ref.HyperLSTM."""
        return {
            "labml": [
                row
                for layer, cell in enumerate(self.cells)
                for row in nested(cell.torch_layouts()["labml"], f"cells.{layer}", f"cells.{layer}")
            ]
        }


class HyperLSTMCell(nnx.Module):
    """The weights of one layer.

    The matrices are (in, out). Along their last axis, the gates are side by side in the order i, f,
    g, o. In the matrices of z and d, the parts for h, x and b are side by side, each with its four
    gates.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        hyper_features: int,
        embedding_features: int,
        recurrent_kernel_init: Initializer | None,
        options: LayerOptions,
    ):
        hidden, hyper, embedding = hidden_features, hyper_features, embedding_features
        z_init, d_init = torch_uniform(hyper), torch_uniform(embedding)
        kernel_init, bias_init = options.get("kernel_init"), options.get("bias_init")
        rngs, param_dtype = options["rngs"], options.get("param_dtype")

        def param(init: Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        # The hyper network is a small LSTM, which reads the hidden state and the input.
        self.hyper = LayerNormLSTM(
            hidden + in_features,
            hyper,
            recurrent_kernel_init=recurrent_kernel_init,
            **options,
        )
        # Its outputs are embedded for each gate (z), and the embeddings give the factors and biases
        # (d) of the main LSTM's products.
        self.z_kernel = param(kernel_init or z_init, hyper, 12 * embedding)
        self.z_bias = param(bias_init or z_init, 8 * embedding)
        self.d_kernel = param(kernel_init or d_init, embedding, 12 * hidden)
        self.d_bias = param(bias_init or d_init, 4 * hidden)
        # The main LSTM has no bias of its own, because d contains one.
        self.kernel_ih = param(kernel_init or lecun_normal, in_features, 4 * hidden)
        self.kernel_hh = param(recurrent_kernel_init or rotations, hidden, 4 * hidden)
        self.norms = CellNorms(hidden, param_dtype=param_dtype)

    def arrays(self) -> dict:
        """The weights as arguments of `ops.hyper_lstm`."""
        names = ("kernel_ih", "kernel_hh", "z_kernel", "z_bias", "d_kernel", "d_bias")
        return {
            **{name: getattr(self, name)[...] for name in names},
            "norms": self.norms.arrays(),
            **{f"hyper_{name}": array for name, array in self.hyper.arrays().items()},
        }

    def torch_layouts(self) -> Layouts:
        """`labml`: the keys of torch_ref.HyperLSTMCell."""
        table = [
            *nested(self.hyper.torch_layouts()["labml"], "hyper", "hyper"),
            gates("z_kernel", [f"z_{name}.weight" for name in "hxb"]),
            gates("z_bias", [f"z_{name}.bias" for name in "hx"]),
            gates("d_kernel", [f"d_{name}.{k}.weight" for name in "hxb" for k in range(4)]),
            gates("d_bias", [f"d_b.{k}.bias" for k in range(4)]),
            gates("kernel_ih", [f"w_x.{k}" for k in range(4)]),
            gates("kernel_hh", [f"w_h.{k}" for k in range(4)]),
            *cell_norms("norms"),
        ]
        return {"labml": table}


def rotations(key, shape: tuple[int, int], dtype) -> Float[Array, "hidden gates"]:
    """An orthogonal matrix for each gate, side by side."""
    hidden, gates = shape
    wide = carry_dtype(dtype)  # QR is not defined for narrower dtypes
    matrices = jax.random.orthogonal(key, hidden, (gates // hidden,), wide)
    return jnp.concatenate(matrices, axis=1).astype(dtype)
