"""Hawk, its RG-LRU and its block, from the Griffin paper (arXiv 2402.19427)."""

__all__ = ["RGLRU", "Hawk", "HawkBlock", "HawkState", "RGLRUState"]

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.activation import ACTIVATIONS, Gelu
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.linear import BlockDiagonal, Linear, lecun_normal, normal_of_fan_in
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import RMSNorm
from jax_models.layers.residual import ResidualBlock
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState, RGLRUState, carry_dtype
from jax_models.ops.checks import checked_positive
from jax_models.options import (
    Initializer,
    LayerOptions,
    MatrixOptions,
    norm_options,
    only,
    refuse_unused,
    with_inits,
)
from jax_models.sequence import SequenceLayer, State
from jax_models.weights import Layouts, Table, linear, nested, rms_norm, same

Parameterization = Literal["direct", "softplus"]
"""What an RG-LRU trains: its decay `a` itself, or `a_param` with a = e^{−softplus(a_param)}."""


class RGLRU(SequenceLayer[RGLRUState]):
    """The real-gated linear recurrent unit.

        >>> layer = RGLRU(64, parameterization="softplus", rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        i_t = σ(x_t W_i)
        r_t = σ(x_t W_r)
        a_t = a^(c·r_t)
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t)

    x and y = h are (batch, time, features), the state `RGLRUState(h)` with h (batch, features).
    `1 − a_t²` is computed as `−expm1(2 c r_t log a)`, which loses no digits where a is close to 1.

    To train a new layer, choose `parameterization="softplus"`. The parameter is then `a_param`,
    which may be any number, with a = e^{−softplus(a_param)} = σ(−a_param) as in the paper, and the
    derivative of the square root is at most 1000, as in recurrentgemma. With "direct", the
    parameter is `a`. Its gradient is finite for a in [0, 1] but grows without bound near a = 1
    (`ops.decay` has the derivation), so that clipping by the global norm scales all other gradients
    down to almost nothing. If an optimizer moves `a` outside [0, 1], the layer computes with the
    nearest value inside; `jax_models.project` moves the parameter there.

    With `num_blocks`, W_i and W_r are block-diagonal and have biases. RecurrentGemma's RG-LRU is
    `RGLRU(features, num_blocks=…, scale_first_step=False)`.

    Args:
        features: size of x_t and h_t.
        num_blocks: blocks of W_i and W_r, a divisor of `features`. None: W_i and W_r are dense.
        parameterization: "direct" trains `a`, "softplus" trains `a_param`. None: "direct", or
            "softplus" with `num_blocks`, which supports no other.
        scale_first_step: whether √(1 − a_t²) also scales the first step of a document. If False,
            h_t = i_t ⊙ x_t there. The state is then `RGLRUState(h, position)`, whose position
            (batch,) counts the steps of the document so far and starts at 0.
        c: a_t lies between a^c (r_t = 1) and 1 (r_t = 0).
        epsilon: added under the square root, only with "softplus"; 1e-6 in hippogriff.
        method: how `ops.linear_recurrence` runs.
        **options: as in `LayerOptions`. W_i and W_r start as `lecun_normal`; blocks start normal,
            with the variance 1 / features, and their biases at zero. a^c starts uniform in
            [0.9, 0.999]. With "softplus", a² starts uniform in [0.81, 0.998], as in recurrentgemma.
            The gates and the state are computed in at least float32.

    Raises:
        ValueError: a size or c is not positive, there is no such method, num_blocks does not
            divide the features, num_blocks or an epsilon is given with "direct", or `bias_init`
            without num_blocks.

    Layouts: without `num_blocks`, `hawk`: the keys of torch_ref.RGLRU, which are `a` or, with
    "softplus", `a_param`, and the two gates' `weight`. An `a` outside [0, 1] is refused. With
    `num_blocks`: `hf` (transformers' RecurrentGemma) and `deepmind` (recurrentgemma).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_blocks: int | None = None,
        parameterization: Parameterization | None = None,
        scale_first_step: bool = True,
        c: float = 8.0,
        epsilon: float = 0.0,
        method: ops.LinearRecurrenceMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.c = checked_positive("c", c)
        # Block-diagonal gates are those of recurrentgemma, which always trains a_param.
        default = "direct" if num_blocks is None else "softplus"
        self.parameterization: Parameterization = parameterization or default
        direct = self.parameterization == "direct"
        if direct and num_blocks is not None:
            raise ValueError(
                'parameterization: expected "softplus" with num_blocks, got "direct"; '
                "leave out num_blocks for dense gates"
            )
        if epsilon < 0 or (epsilon and direct):
            expected = (
                'expected 0 with parameterization="direct"' if direct else "expected at least 0"
            )
            raise ValueError(f"epsilon: {expected}, got {epsilon}")
        self.epsilon = epsilon
        self.scale_first_step = scale_first_step
        self.method: ops.LinearRecurrenceMethod = method
        self.num_blocks = num_blocks
        rngs, param_dtype = options["rngs"], self.param_dtype
        # Dense gates have no bias, as in the paper; blocks have one, as in recurrentgemma.
        if num_blocks is None:
            because = "without num_blocks, because only blocks have biases"
            refuse_unused("bias_init", options.get("bias_init"), unless=False, because=because)
            matrix = with_inits(options, lecun_normal, None, use_bias=False)
            self.input_gate = Linear(features, features, **matrix)
            self.recurrence_gate = Linear(features, features, **matrix)
        else:
            blocks = with_inits(options, normal_of_fan_in())
            self.input_gate = BlockDiagonal(features, num_blocks, **blocks)
            self.recurrence_gate = BlockDiagonal(features, num_blocks, **blocks)
        # The initial a, raised to this power, is uniform between low and high.
        power, low, high = (c, 0.9, 0.999) if direct else (2, 0.9**2, 0.999**2)
        to_power = jax.random.uniform(
            rngs.params(), (features,), carry_dtype(param_dtype), low, high
        )
        if direct:
            below_one = 1 - float(jnp.finfo(param_dtype).epsneg)  # a = 1 would let nothing in
            a = jnp.minimum(to_power ** (1 / power), below_one).astype(param_dtype)
            self.a = nnx.Param(a, bounds=(0.0, 1.0))
        else:
            a_param = jnp.log(jnp.expm1(-jnp.log(to_power) / power))
            self.a_param = nnx.Param(a_param.astype(param_dtype))

    def init_state(self, batch_size: int) -> RGLRUState:
        """Zeros, (batch, features), in at least float32, at position 0 if there is one."""
        h = jnp.zeros((batch_size, self.in_features), self.state_dtype)
        return RGLRUState(h, None if self.scale_first_step else jnp.zeros(batch_size, jnp.int32))

    def sequence(self, x, state, rows, c=None):
        """`ops.rg_lru`; `c` replaces the option c, because hippogriff stores c as a weight."""
        dtype = self.computation_dtype(x)
        first = end = None
        if state.position is not None:
            positions, end = rows.positions(state.position, x.shape[1])
            first = positions == 0
        weights: dict[str, Any] = {
            f"{name}_{part}": param[...].astype(dtype)
            for name, gate in (("input", self.input_gate), ("recurrence", self.recurrence_gate))
            for part, param in (("kernel", gate.kernel), ("bias", gate.bias))
            if param is not None
        }
        decay = "a" if self.parameterization == "direct" else "a_param"
        weights[decay] = getattr(self, decay)[...]
        y, state = ops.rg_lru(
            x.astype(dtype),
            state,
            **weights,
            first=first,
            c=self.c if c is None else c,
            epsilon=self.epsilon,
            method=self.method,
            rows=rows,
        )
        return y.astype(dtype), state._replace(position=end)

    mesh_axes = last_axis("features", "input_gate", "recurrence_gate", "a", "a_param")

    def torch_layouts(self) -> Layouts:
        """`hawk`: the keys of torch_ref.RGLRU; with blocks, those of RecurrentGemma."""
        gates = ("input_gate", "recurrence_gate")
        if self.num_blocks is None:
            decay = "a" if self.parameterization == "direct" else "a_param"
            rows = (row for g in gates for row in linear(g, g, bias=False))
            return {"hawk": [same(decay, decay), *rows]}
        hf = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight")
        names = {
            "hf": ("recurrent_param", *hf, "recurrent_gate_bias"),
            "deepmind": ("a_param", "input_gate.w", "input_gate.b", "a_gate.w", "a_gate.b"),
        }
        params = ("a_param", *(f"{gate}.{part}" for gate in gates for part in ("kernel", "bias")))
        return {
            layout: [same(param, key) for param, key in zip(params, keys, strict=True)]
            for layout, keys in names.items()
        }


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
        """Make the parts, each with its options."""
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
        """Zeros, in at least float32, and an array without inputs if there is no convolution."""
        rglru = self.rglru.init_state(batch_size)
        if self.conv is None:
            no_inputs = jnp.zeros((*rglru.h.shape, 0), rglru.h.dtype)
            return HawkState(CausalConv1DState(no_inputs), rglru)
        return HawkState(self.conv.init_state(batch_size), rglru)

    def sequence(self, x, state: Any, rows):
        """The gate times the recurrence of the convolution, projected."""
        x = x.astype(self.computation_dtype(x))
        gate = ACTIVATIONS[self.activation](self.gate_proj(x))
        u = self.recurrent_proj(x)
        if self.conv is not None:
            u, conv = self.conv.sequence(u, state.conv, rows)
            state = state._replace(conv=conv)
        h, state = self.recurrence(u, state, rows)
        return self.out_proj(gate * h), state

    def recurrence(self, u, state, rows):
        """The RG-LRU, and the block's state after it."""
        h, rglru = self.rglru.sequence(u, state.rglru, rows)
        return h, state._replace(rglru=rglru)

    def part_rows(self, layout: str, conv: str, rglru: str) -> Table:
        """The tables of the convolution and the RG-LRU, whose keys begin with these names."""
        parts = {"conv": (self.conv, conv), "rglru": (self.rglru, rglru)}
        return [
            row
            for name, (part, key) in parts.items()
            if part is not None
            for row in nested(part.torch_layouts()[layout], name, key)
        ]


class Hawk(GatedRecurrence[HawkState]):
    """The recurrent block of Griffin.

        >>> layer = Hawk(64, parameterization="softplus", rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate) ⊙ rglru(conv(x W_rec))) W_out

    x and y are (batch, time, features), the state `HawkState(conv, rglru)`. gelu is the exact one,
    with erf. To train a new layer, choose `parameterization="softplus"`; `RGLRU` says why.

    Args:
        features: size of x_t and y_t.
        kernel_size: taps of the causal convolution.
        parameterization: whether the RG-LRU trains its decay `a` ("direct") or `a_param`, with
            a = e^{−softplus(a_param)} ("softplus").
        c: the RG-LRU's c: a_t lies between a^c and 1.
        method: how `ops.linear_recurrence` runs, as in `RGLRU`.
        **options: as in `LayerOptions`. The matrices start as `lecun_normal`, the convolution as
            `CausalConv1D` says; there are no other biases.

    Raises:
        ValueError: a size or c is not positive.

    Layouts: `hawk`, the keys of torch_ref.Hawk with the same `parameterization`. Weights whose
    `rglru.a` lies outside [0, 1] are refused.

    """

    def __init__(
        self,
        features: int,
        *,
        kernel_size: int = 4,
        parameterization: Parameterization = "direct",
        c: float = 8.0,
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
                **only(MatrixOptions, options),
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

        >>> layer = HawkBlock(64, 192, parameterization="softplus", rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + hawk(norm(x))
        x ← x + mlp(norm(x))

    x is (batch, time, features); the state is a `HawkState`, as `Hawk` has it.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLP; three times `features` in the paper.
        kernel_size: taps of the causal convolution.
        parameterization: "direct" or "softplus", as in `Hawk`; "softplus" to train a new layer.
        **options: as in `LayerOptions`; parameters start as `Hawk` and `GatedMLP` say.

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
        parameterization: Parameterization = "direct",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.temporal_pre_norm = RMSNorm(features, **norm_options(options))
        self.hawk = Hawk(
            features, kernel_size=kernel_size, parameterization=parameterization, **options
        )
        self.channel_pre_norm = RMSNorm(features, **norm_options(options))
        self.mlp = GatedMLP(features, mlp_features, **only(MatrixOptions, options))

    def torch_layouts(self) -> Layouts:
        """`hawk`: the twin's keys."""
        norms = ("temporal_pre_norm", "channel_pre_norm")
        return {
            "hawk": [
                *(row for norm in norms for row in rms_norm(norm, norm)),
                *nested(self.hawk.torch_layouts()["hawk"], "hawk", "hawk"),
                *nested(self.mlp.torch_layouts()["hawk"], "mlp", "mlp"),
            ]
        }
