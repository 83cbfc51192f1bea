"""The RG-LRU, from the Griffin paper (arXiv 2402.19427)."""

__all__ = ["RGLRU", "RGLRUState"]

from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.checks.values import Positive
from jax_models.layers.linear import BlockDiagonal, Linear, lecun_normal, normal_of_fan_in
from jax_models.mesh_axes import last_axis
from jax_models.ops import RGLRUState, carry_dtype
from jax_models.ops.linear import LINEAR_RECURRENCE
from jax_models.options import LayerOptions, refuse_unused, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import SharedLayer, Weight, same

Parameterization = Literal["direct", "softplus"]
"""The parameter of an RG-LRU: its decay `a`, or `a_param` with a = e^{−softplus(a_param)}."""
METADATA: dict[str, dict[str, Any]] = {"a": {"bounds": (0.0, 1.0)}, "a_param": {}}
"""The metadata of each of the two parameters."""


class RGLRU(SharedLayer, SequenceLayer[RGLRUState]):
    """The real-gated linear recurrent unit.

        >>> layer = RGLRU(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        i_t = σ(x_t W_i)
        r_t = σ(x_t W_r)
        a_t = a^(c·r_t)
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t)

    x and y = h are (batch, time, features), and the state is `RGLRUState(h)` with h (batch,
    features). `1 − a_t²` is computed as `−expm1(2 c r_t log a)`, which stays accurate if a is close
    to 1.

    By default, the parameter is `a_param`, which may be any number, with a = e^{−softplus(a_param)}
    = σ(−a_param) as in the paper, and the derivative of the square root is at most 1000, as in
    recurrentgemma. With `parameterization="direct"`, the parameter is `a`, for weights that are
    stored in this form. Its gradient is finite for a in [0, 1] but grows without bound near a = 1
    (`ops.decay` has the derivation), so that clipping by the global norm scales all other gradients
    down to almost nothing. If an optimizer moves `a` outside [0, 1], the layer computes with the
    nearest value inside; `jax_models.project` moves the parameter there.

    If you leave `parameterization` out, `from_torch` loads weights of either form bit for bit, and
    the layer then trains the parameter that they have.

    With `num_blocks`, W_i and W_r are block-diagonal and have biases. RecurrentGemma's RG-LRU is
    `RGLRU(features, num_blocks=…, scale_first_step=False)`.

    Args:
        features: size of x_t and h_t.
        num_blocks: blocks of W_i and W_r, a divisor of `features`. None: W_i and W_r are dense.
        parameterization: "softplus" trains `a_param`, "direct" trains `a`. None: "softplus", until
            weights with `a` are loaded. With `num_blocks`, only "softplus" is supported.
        scale_first_step: whether √(1 − a_t²) also scales the first step of a document. If False,
            h_t = i_t ⊙ x_t there. The state is then `RGLRUState(h, position)`, whose position
            (batch,) counts the steps of the document so far and starts at 0.
        c: a_t lies between a^c (r_t = 1) and 1 (r_t = 0).
        epsilon: added under the square root, only with "softplus".
        method: the method of `ops.linear_recurrence`.
        **options: as in `LayerOptions`. W_i and W_r are initialized by `lecun_normal`. As in
            recurrentgemma's PyTorch version, blocks are drawn from a normal distribution with
            variance num_blocks / features, and their biases are zero. With "direct", a^c is drawn
            uniformly from [0.9, 0.999]. With "softplus", a² is drawn uniformly from [0.81, 0.998],
            as in recurrentgemma. The gates and the state are computed in at least float32.

    Raises:
        ValueError: a size or c is not positive, there is no such method, num_blocks does not
            divide the features, num_blocks or an epsilon is given with "direct", or `bias_init`
            without num_blocks.

    Layouts: those that the architectures declare. The first is `hawk`, the keys of torch_ref.RGLRU:
    `a_param` or, with "direct", `a`, and the two gates' `weight`. With `num_blocks`, it is `hf`
    (transformers' RecurrentGemma). An `a` outside [0, 1] is refused.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_blocks: int | None = None,
        parameterization: Parameterization | None = None,
        scale_first_step: bool = True,
        c: Positive = 8.0,
        epsilon: float = 0.0,
        method: ops.LinearRecurrenceMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.c = c
        # Neither blocks nor an epsilon are defined for `a`.
        self.takes_either = parameterization is None and num_blocks is None and not epsilon
        direct = parameterization == "direct"
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
        self.method = LINEAR_RECURRENCE.checked_method(method)
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
            inits = with_inits(options, normal_of_fan_in(in_blocks=True))
            blocks = {k: inits[k] for k in ("kernel_init", "bias_init", "param_dtype", "rngs")}
            self.input_gate = BlockDiagonal(features, num_blocks, **blocks)
            self.recurrence_gate = BlockDiagonal(features, num_blocks, **blocks)
        # The initial a, raised to `power`, is uniform between `low` and `high`.
        power, low, high = (c, 0.9, 0.999) if direct else (2, 0.9**2, 0.999**2)
        to_power = jax.random.uniform(
            rngs.params(), (features,), carry_dtype(param_dtype), low, high
        )
        if direct:
            below_one = 1 - float(jnp.finfo(param_dtype).epsneg)  # a = 1 would ignore the input
            a = jnp.minimum(to_power ** (1 / power), below_one).astype(param_dtype)
            self.a = nnx.Param(a, **METADATA["a"])
        else:
            a_param = jnp.log(jnp.expm1(-jnp.log(to_power) / power))
            self.a_param = nnx.Param(a_param.astype(param_dtype))

    @property
    def parameterization(self) -> Parameterization:
        """Which parameter the layer trains: `a_param` ("softplus") or `a` ("direct")."""
        return "direct" if hasattr(self, "a") else "softplus"

    @property
    def decay_name(self) -> str:
        """The name of the parameter that the layer trains."""
        return "a" if hasattr(self, "a") else "a_param"

    def other_param(self, name: str) -> nnx.Param:
        """Returns `a` or `a_param`, to `adopt` in the place of the other.

        Raises:
            ValueError: the layer was built for the parameter that it has.

        """
        if not self.takes_either:
            option = f'parameterization="{self.parameterization}"'
            option = f"epsilon={self.epsilon}" if self.epsilon else option
            raise ValueError(
                f'expected "{self.decay_name}", because the RGLRU was built with {option}, '
                f'got "{name}": build it without this option, and it takes either'
            )
        param = getattr(self, self.decay_name).copy()
        metadata = {k: v for k, v in param.get_metadata().items() if k != "bounds"}
        param.set_metadata(metadata | METADATA[name])
        return param

    def adopt(self, name: str, param: nnx.Param) -> None:
        """Trains `a` or `a_param`, as returned by `other_param`, in the place of the other."""
        delattr(self, self.decay_name)
        setattr(self, name, param)

    def init_state(self, batch_size: int) -> RGLRUState:
        """Zeros, (batch, features), in at least float32, and position 0 if there is a position."""
        h = jnp.zeros((batch_size, self.in_features), self.state_dtype)
        return RGLRUState(h, None if self.scale_first_step else jnp.zeros(batch_size, jnp.int32))

    def sequence(self, x, state, rows, c=None):
        """Runs `ops.rg_lru`. `c` replaces the option c, if a model stores c as a weight."""
        dtype = self.computation_dtype(x)
        # With a position in the state, find the first step of each document, whose input is not
        # scaled.
        first = end = None
        if state.position is not None:
            positions, end = rows.positions(state.position, x.shape[1])
            first = positions == 0
        # The gates' weights are cast to the computation's dtype. The decay keeps its own, because a
        # close to 1 needs all its digits.
        weights: dict[str, Any] = {
            f"{name}_{part}": param[...].astype(dtype)
            for name, gate in (("input", self.input_gate), ("recurrence", self.recurrence_gate))
            for part, param in (("kernel", gate.kernel), ("bias", gate.bias))
            if param is not None
        }
        weights[self.decay_name] = getattr(self, self.decay_name)[...]
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

    def decay_row(self) -> Weight:
        """The row of `a_param` or `a`, whichever a state_dict has, under the parameter's name."""
        [other] = METADATA.keys() - {self.decay_name}
        return same(self.decay_name, self.decay_name)._replace(otherwise=same(other, other))
