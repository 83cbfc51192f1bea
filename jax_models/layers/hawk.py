"""Hawk and its block, from the Griffin paper (arXiv 2402.19427)."""

__all__ = ["Hawk", "HawkBlock", "HawkState"]

from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp

from jax_models import ops
from jax_models.checks.values import Positive
from jax_models.layers.activation import ACTIVATIONS, Gelu
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.linear import Linear, lecun_normal
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import RMSNorm
from jax_models.layers.residual import ResidualBlock
from jax_models.layers.rg_lru import RGLRU, Parameterization
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState, RGLRUState
from jax_models.options import (
    Initializer,
    LayerOptions,
    MatrixOptions,
    declared_options,
    norm_options,
    with_inits,
)
from jax_models.sequence import SequenceLayer, State
from jax_models.weights import Layouts, Table, layouts_of, linear, nested, rms_norm


class HawkState(NamedTuple):
    """The state of a Hawk block: the convolution's inputs and the recurrence's state."""

    conv: CausalConv1DState
    rglru: RGLRUState


class GatedRecurrence(SequenceLayer[State]):
    """The base class of the recurrent blocks of Griffin, RecurrentGemma and hippogriff.

        y = (activation(x W_gate) ⊙ rglru(conv(x W_rec))) W_out

    A subclass chooses the options of the parts. If `kernel_size` is None, there is no convolution.
    """

    divides_time = True

    mesh_axes = last_axis("features", "gate_proj", "recurrent_proj", "conv") | first_axis(
        "features", "out_proj.kernel"
    )

    def __init__(
        self,
        features: int,
        hidden_features: int,
        kernel_size: int | None,
        *,
        matrix: dict[str, Any],
        conv: dict[str, Any],
        rglru: dict[str, Any],
        out_init: Initializer | None = None,
        activation: Gelu = "gelu",
    ):
        """Makes the parts, each with its own options."""
        super().__init__(features, **norm_options(matrix))
        self.activation: Gelu = activation
        self.gate_proj = Linear(features, hidden_features, **matrix)
        self.recurrent_proj = Linear(features, hidden_features, **matrix)
        has_conv = kernel_size is not None
        self.conv = CausalConv1D(hidden_features, kernel_size, **conv) if has_conv else None
        self.rglru = RGLRU(hidden_features, **rglru)
        matrix = {**matrix, "kernel_init": out_init or matrix["kernel_init"]}
        self.out_proj = Linear(hidden_features, features, **matrix)

    def init_state(self, batch_size: int) -> Any:
        """Zeros, in at least float32. Without a convolution, its array of inputs has size 0."""
        rglru = self.rglru.init_state(batch_size)
        if self.conv is None:
            no_inputs = jnp.zeros((*rglru.h.shape, 0), rglru.h.dtype)
            return HawkState(CausalConv1DState(no_inputs), rglru)
        return HawkState(self.conv.init_state(batch_size), rglru)

    def sequence(self, x, state: Any, rows):
        """Gates the output of the convolution and the recurrence, and projects it back."""
        x = x.astype(self.computation_dtype(x))
        # One branch is the gate, which sees only the current step.
        gate = ACTIVATIONS[self.activation](self.gate_proj(x))
        # The other branch mixes over time: a short convolution, then the recurrence.
        u = self.recurrent_proj(x)
        if self.conv is not None:
            u, conv = self.conv.sequence(u, state.conv, rows)
            state = state._replace(conv=conv)
        h, state = self.recurrence(u, state, rows)
        return self.out_proj(gate * h), state

    def recurrence(self, u, state, rows):
        """Runs the RG-LRU, and returns the block's new state."""
        h, rglru = self.rglru.sequence(u, state.rglru, rows)
        return h, state._replace(rglru=rglru)

    def part_rows(self, layout: str, conv: str, rglru: str) -> Table:
        """The weight tables of the convolution and the RG-LRU, with the given names as prefixes."""
        parts = {"conv": (self.conv, conv), "rglru": (self.rglru, rglru)}
        return [
            row
            for name, (part, key) in parts.items()
            if part is not None
            for row in nested(part.torch_layouts()[layout], name, key)
        ]


class Hawk(GatedRecurrence[HawkState]):
    """The recurrent block of Griffin.

        >>> layer = Hawk(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate) ⊙ rglru(conv(x W_rec))) W_out

    x and y are (batch, time, features), and the state is `HawkState(conv, rglru)`. gelu is the
    exact GELU, with erf.

    Args:
        features: size of x_t and y_t.
        kernel_size: taps of the causal convolution.
        parameterization: whether the RG-LRU trains `a_param` ("softplus"), with
            a = e^{−softplus(a_param)}, or its decay `a` itself ("direct"). None: "softplus", until
            weights with `a` are loaded; `RGLRU` explains why.
        c: the exponent of the RG-LRU, whose a_t lies between a^c and 1.
        method: the method of `ops.linear_recurrence`, as in `RGLRU`.
        **options: as in `LayerOptions`. The matrices are initialized by `lecun_normal`, the
            convolution as in `CausalConv1D`. Only the convolution has a bias.

    Raises:
        ValueError: a size or c is not positive.

    Layouts: `hawk`, the keys of torch_ref.Hawk. Weights whose `rglru.a` lies outside [0, 1] are
    refused.

    """

    def __init__(
        self,
        features: int,
        *,
        kernel_size: int = 4,
        parameterization: Parameterization | None = None,
        c: Positive = 8.0,
        method: ops.LinearRecurrenceMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(
            features,
            features,
            kernel_size,
            matrix=with_inits(options, lecun_normal, None, use_bias=False),
            conv={**options},
            rglru={
                **declared_options(MatrixOptions, options),
                "parameterization": parameterization,
                "c": c,
                "method": method,
            },
        )

    def torch_layouts(self) -> Layouts:
        """`hawk`: the keys of torch_ref.Hawk."""
        projections = ("gate_proj", "recurrent_proj", "out_proj")
        return {
            "hawk": [
                *(row for p in projections for row in linear(p, p, bias=False)),
                *self.part_rows("hawk", "conv", "rglru"),
            ]
        }


class HawkBlock(ResidualBlock[HawkState]):
    """The residual block of Griffin.

        >>> layer = HawkBlock(64, 192, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + hawk(norm(x))
        x ← x + mlp(norm(x))

    x is (batch, time, features). The state is a `HawkState`, the state of `Hawk`.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLP; three times `features` in the paper.
        kernel_size: taps of the causal convolution.
        parameterization: "softplus", "direct" or None, as in `Hawk`.
        **options: as in `LayerOptions`; parameters are initialized as in `Hawk` and `GatedMLP`.

    Raises:
        ValueError: a size is not positive.

    Layouts: `hawk` (torch_ref.HawkBlock).

    """

    parts = ("temporal_pre_norm", "hawk", "channel_pre_norm", "mlp")

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        kernel_size: int = 4,
        parameterization: Parameterization | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.temporal_pre_norm = RMSNorm(features, **norm_options(options))
        self.hawk = Hawk(
            features, kernel_size=kernel_size, parameterization=parameterization, **options
        )
        self.channel_pre_norm = RMSNorm(features, **norm_options(options))
        self.mlp = GatedMLP(features, mlp_features, **declared_options(MatrixOptions, options))

    def torch_layouts(self) -> Layouts:
        """`hawk`: the keys of torch_ref.HawkBlock."""
        norms = ("temporal_pre_norm", "channel_pre_norm")
        return {
            "hawk": [
                *(row for norm in norms for row in rms_norm(norm, norm)),
                *nested(self.hawk.torch_layouts()["hawk"], "hawk", "hawk"),
                *nested(self.mlp.torch_layouts()["hawk"], "mlp", "mlp"),
            ]
        }


@layouts_of(RGLRU)
def rglru_layouts(rglru: RGLRU) -> Layouts:
    """`hawk`: the keys of torch_ref.RGLRU, whose gates have neither blocks nor biases."""
    if rglru.num_blocks is not None:
        return {}
    gates = ("input_gate", "recurrence_gate")
    rows = (row for gate in gates for row in linear(gate, gate, bias=False))
    return {"hawk": [rglru.decay_row(), *rows]}


@layouts_of(CausalConv1D)
def conv_layouts(conv: CausalConv1D) -> Layouts:
    """`hawk`: the keys of torch_ref.CausalConv1d."""
    return {"hawk": nested(conv.torch_rows(), "", "conv")}


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`hawk`: the keys of torch_ref.GatedMLP, which has no biases."""
    if mlp.use_bias:
        return {}
    return {"hawk": mlp.rows("gate_proj", "up_proj", "down_proj")}
