"""Hawk, its RG-LRU and its block, from the Griffin paper (arXiv 2402.19427)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.activation import ACTIVATIONS, GateActivation
from jax_models.layers.linear import BlockDiagonal, Linear, torch_uniform
from jax_models.layers.norm import RMSNorm, checked_rows
from jax_models.ops import CausalConv1DState, RGLRUState, carry_dtype
from jax_models.ops.checks import checked_positive
from jax_models.ops.segments import positions_and_end
from jax_models.options import CheckedOptions, FloatingDtype, Initializer, refuse_unused
from jax_models.sequence import SequenceLayer
from jax_models.weights import (
    Layouts,
    Weight,
    dense,
    linear,
    nested,
    parts,
    rms_norm,
    same,
    stacked,
    transposed,
)

lecun_normal = nnx.initializers.lecun_normal()
"""How Flax's Linear draws its kernel."""

Parameterization = Literal["direct", "softplus"]
"""What an RG-LRU trains: its decay `a` itself, or `a_param` with a = e^{−softplus(a_param)}."""


def normal_of_fan_in(variance: float = 1.0) -> Initializer:
    """How recurrentgemma draws matrices: normal, with this variance over the inputs' number."""
    return nnx.initializers.variance_scaling(variance, "fan_in", "normal")


class RGLRU(SequenceLayer[RGLRUState]):
    """The real-gated linear recurrent unit.

        >>> layer = RGLRU(64, parameterization="softplus", rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        i_t = σ(x_t W_i)
        r_t = σ(x_t W_r)
        a_t = a^(c·r_t)
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t)

    x and y = h are (batch, time, features), the state `RGLRUState(h)` with h (batch, features).
    `1 − a_t²` is `−expm1(2 c r_t log a)`, which loses no digits where a is close to 1.

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
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters. The gates and the state
            are computed in at least float32.
        param_dtype: the parameters' dtype.
        kernel_init: draws W_i and W_r. None: `lecun_normal`; the blocks normal, with the variance
            1 / features.
        bias_init: draws the biases that blocks have. None: zero.
        rngs: draws the parameters; a^c starts uniform in [0.9, 0.999]. With "softplus", a² starts
            uniform in [0.81, 0.998], as in recurrentgemma.

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
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        self.c = checked_positive("c", c)
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
        refuse_unused(
            "bias_init",
            bias_init,
            unless=num_blocks is not None,
            because="without num_blocks, because only blocks have biases",
        )
        if num_blocks is None:
            options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
            matrix = {"use_bias": False, "kernel_init": kernel_init or lecun_normal, **options}
            self.input_gate = Linear(features, features, **matrix)
            self.recurrence_gate = Linear(features, features, **matrix)
        else:
            blocks = {
                "param_dtype": param_dtype,
                "kernel_init": kernel_init or normal_of_fan_in(),
                "bias_init": bias_init or nnx.initializers.zeros,
                "rngs": rngs,
            }
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

    def sequence(self, x, state, lengths, reset, c=None):
        """`ops.rg_lru`; `c` replaces the option c, because hippogriff stores c as a weight."""
        dtype = self.computation_dtype(x)
        first = end = None
        if state.position is not None:
            positions, end = positions_and_end(
                state.position, x.shape[1], lengths, reset, self.time_axis
            )
            first = positions == 0
        gates = {
            f"{name}_{part}": param[...].astype(dtype)
            for name, gate in (("input", self.input_gate), ("recurrence", self.recurrence_gate))
            for part, param in (("kernel", gate.kernel), ("bias", gate.bias))
            if param is not None
        }
        decay = "a" if self.parameterization == "direct" else "a_param"
        y, state = ops.rg_lru(
            x.astype(dtype),
            state,
            **{decay: getattr(self, decay)[...]},
            **gates,
            first=first,
            c=self.c if c is None else c,
            epsilon=self.epsilon,
            method=self.method,
            lengths=lengths,
            reset=reset,
            time_axis=self.time_axis,
        )
        return y.astype(dtype), state._replace(position=end)

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


class CausalConv1D(SequenceLayer[CausalConv1DState]):
    """A depthwise convolution that sees the current and the last kernel_size − 1 inputs.

        >>> layer = CausalConv1D(64, kernel_size=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y_t = Σ_j kernel_j ⊙ x_{t−K+1+j} + bias,    j = 0 … K−1

    x and y are (batch, time, features), the state `CausalConv1DState(inputs)` with the last K − 1
    inputs, (batch, features, K − 1), zeros at first. An input from before a `reset` counts as zero.

    Args:
        features: size of x_t and y_t.
        kernel_size: K, the number of taps.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the (kernel_size, features) kernel. None: uniform in ±1/√K, as in torch.
        bias_init: draws the bias. None: uniform in ±1/√K, as in torch.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive.

    Layouts: `hawk` (torch_ref.CausalConv1d), `hf` (a torch.nn.Conv1d) and `deepmind`
    (recurrentgemma's Conv1D).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        kernel_size: int,
        *,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        self.kernel_size = kernel_size
        uniform = torch_uniform(kernel_size)

        def param(init: Initializer | None, *shape: int) -> nnx.Param:
            return nnx.Param((init or uniform)(rngs.params(), shape, param_dtype))

        self.kernel = param(kernel_init, kernel_size, features)
        self.bias = param(bias_init, features)

    def init_state(self, batch_size: int) -> CausalConv1DState:
        """Zeros, (batch, features, kernel_size − 1), in at least float32."""
        dtype = self.state_dtype
        shape = (batch_size, self.in_features, self.kernel_size - 1)
        return CausalConv1DState(jnp.zeros(shape, dtype))

    def sequence(self, x, state, lengths, reset):
        """`ops.causal_conv`."""
        dtype = self.computation_dtype(x)
        return ops.causal_conv(
            x.astype(dtype),
            state,
            kernel=self.kernel[...].astype(dtype),
            bias=self.bias[...].astype(dtype),
            lengths=lengths,
            reset=reset,
            time_axis=self.time_axis,
        )

    def torch_layouts(self) -> Layouts:
        """`hawk` and `hf`: a `torch.nn.Conv1d` of one input channel a group; `deepmind`."""
        layouts = {"hawk": "conv.", "hf": ""}
        return {
            layout: [
                Weight(
                    ("kernel",),
                    (f"{prefix}weight",),
                    lambda a: (a[:, 0].T,),
                    lambda a: (a.T[:, None],),
                ),
                same("bias", f"{prefix}bias"),
            ]
            for layout, prefix in layouts.items()
        } | {"deepmind": [same("kernel", "w"), same("bias", "b")]}


class HawkState(NamedTuple):
    """What a Hawk block carries: the convolution's inputs and the recurrence's state."""

    conv: CausalConv1DState
    rglru: RGLRUState


class Hawk(SequenceLayer[HawkState]):
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
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices and the convolution's kernel. None: the matrices as
            `lecun_normal`, the kernel as `CausalConv1D` does.
        bias_init: draws the convolution's bias. None: as `CausalConv1D` does.
        rngs: draws the parameters.

    Raises:
        ValueError: a size or c is not positive.

    Layouts: `hawk`, the keys of torch_ref.Hawk with the same `parameterization`. Weights whose
    `rglru.a` lies outside [0, 1] are refused.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        kernel_size: int = 4,
        parameterization: Parameterization = "direct",
        c: float = 8.0,
        method: ops.LinearRecurrenceMethod = "auto",
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        matrix = {"use_bias": False, "kernel_init": kernel_init or lecun_normal, **options}
        self.gate_proj = Linear(features, features, **matrix)
        self.recurrent_proj = Linear(features, features, **matrix)
        self.conv = CausalConv1D(
            features, kernel_size, kernel_init=kernel_init, bias_init=bias_init, **options
        )
        self.rglru = RGLRU(
            features,
            parameterization=parameterization,
            c=c,
            method=method,
            kernel_init=kernel_init,
            **options,
        )
        self.out_proj = Linear(features, features, **matrix)

    def init_state(self, batch_size: int) -> HawkState:
        """Zeros, in at least float32."""
        return HawkState(self.conv.init_state(batch_size), self.rglru.init_state(batch_size))

    def sequence(self, x, state, lengths, reset):
        """The gate times the recurrence of the convolution, projected."""
        x = x.astype(self.computation_dtype(x))
        gate = ops.gelu(self.gate_proj(x))
        u, conv = self.conv.sequence(self.recurrent_proj(x), state.conv, lengths, reset)
        h, rglru = self.rglru.sequence(u, state.rglru, lengths, reset)
        return self.out_proj(gate * h), HawkState(conv, rglru)

    def torch_layouts(self) -> Layouts:
        """`hawk`: the keys of torch_ref.Hawk."""
        projections = ("gate_proj", "recurrent_proj", "out_proj")
        return {
            "hawk": [
                *(row for p in projections for row in linear(p, p, bias=False)),
                *nested(self.conv.torch_layouts()["hawk"], "conv", "conv"),
                *nested(self.rglru.torch_layouts()["hawk"], "rglru", "rglru"),
            ]
        }


class GatedMLP(CheckedOptions, nnx.Module):
    """The gated MLP of Griffin.

        >>> mlp = GatedMLP(64, 192, rngs=nnx.Rngs(0))
        >>> y = mlp(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate) ⊙ x W_up) W_down

    x and y are (…, features). gelu is the exact one, with erf, or the one by tanh, or else silu.

    Args:
        features: size of x and y.
        mlp_features: width of the MLP.
        use_bias: the three projections have biases.
        activation: which gelu, or silu.
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices. None: `lecun_normal`.
        down_init: draws W_down. None: as the others.
        bias_init: draws the biases. None: zero.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive, or `bias_init` is given without biases.

    Layouts: `hawk` (torch_ref.GatedMLP), and those of the packages `stripedhyena` and `hippogriff`.
    With biases: `hf` (transformers' RecurrentGemma), `deepmind` (recurrentgemma in Flax) and
    `deepmind-torch`.

    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        use_bias: bool = False,
        activation: GateActivation = "gelu",
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        down_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        refuse_unused("bias_init", bias_init, unless=use_bias, because="with use_bias=False")
        init = kernel_init or lecun_normal
        options = {
            "use_bias": use_bias,
            "bias_init": bias_init or nnx.initializers.zeros,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.activation: GateActivation = activation
        self.gate_proj = Linear(features, mlp_features, kernel_init=init, **options)
        self.up_proj = Linear(features, mlp_features, kernel_init=init, **options)
        self.down_proj = Linear(mlp_features, features, kernel_init=down_init or init, **options)

    def __call__(self, x):
        """Apply the MLP to the last axis of x."""
        x = checked_rows(x, self.gate_proj.in_features)
        gate = ACTIVATIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))

    def torch_layouts(self) -> Layouts:
        """`hawk`: the twin's keys; those of packages; with biases, those of RecurrentGemma."""
        bias = self.gate_proj.use_bias
        rows = [row for p in ("gate_proj", "up_proj") for row in linear(p, p, bias=bias)]
        keys = [*rows, *linear("down_proj", "down_proj", bias=bias)]
        if not bias:
            names = {"gate_proj": "l1", "up_proj": "l2", "down_proj": "l3"}
            numbered = (row for p, key in names.items() for row in linear(p, key, bias=False))
            joined = [
                parts(["gate_proj.kernel", "up_proj.kernel"], "grow.weight"),
                transposed("down_proj.kernel", "shrink.weight"),
            ]
            return {"hawk": keys, "stripedhyena": [*numbered], "hippogriff": joined}
        up = [
            stacked(("gate_proj.kernel", "up_proj.kernel"), "ffw_up.w"),
            stacked(("gate_proj.bias", "up_proj.bias"), "ffw_up.b", (1, 2)),
        ]
        return {
            "hf": keys,
            "deepmind": [*up, *dense("down_proj", "ffw_down")],
            "deepmind-torch": [*up, *linear("down_proj", "ffw_down")],
        }


class HawkBlock(SequenceLayer[HawkState]):
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
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices and the convolution's kernel. None: as `Hawk` does.
        bias_init: draws the convolution's bias. None: as `CausalConv1D` does.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive.

    Layouts: `hawk` (torch_ref.HawkBlock).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        kernel_size: int = 4,
        parameterization: Parameterization = "direct",
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.temporal_pre_norm = RMSNorm(features, **options)
        self.hawk = Hawk(
            features,
            kernel_size=kernel_size,
            parameterization=parameterization,
            kernel_init=kernel_init,
            bias_init=bias_init,
            **options,
        )
        self.channel_pre_norm = RMSNorm(features, **options)
        self.mlp = GatedMLP(features, mlp_features, kernel_init=kernel_init, **options)

    def init_state(self, batch_size: int) -> HawkState:
        """Zeros, in at least float32."""
        return self.hawk.init_state(batch_size)

    def sequence(self, x, state, lengths, reset):
        """Hawk, then the gated MLP, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        y, state = self.hawk.sequence(self.temporal_pre_norm(x), state, lengths, reset)
        x = x + y
        return x + self.mlp(self.channel_pre_norm(x)), state

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
