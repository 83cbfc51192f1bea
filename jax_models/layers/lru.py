"""The linear recurrent unit (Orvieto et al. 2023), and what diagonal state spaces share."""

__all__ = ["LRU", "LRUState"]

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Inexact

from jax_models import ops
from jax_models.checks.values import Positive
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import carry_dtype
from jax_models.ops.linear import LINEAR_RECURRENCE
from jax_models.options import MatrixOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, same, transposed


class LRUState(NamedTuple):
    """The state of an `LRU` or an `S5`: real and imaginary parts of h."""

    h: Float[Array, "batch state 2"]


class DiagonalStateSpace(SequenceLayer[LRUState]):
    """`h_t = λ ⊙ h_{t−1} + γ ⊙ (x_t B)`, `y_t = s Re(h_t C) + D ⊙ x_t`, with complex λ, γ, B and C.

    A subclass makes the parameters, computes λ and γ from them (`recurrence`) and sets s
    (`output_scale`). If `bidirectional`, a second h runs from the last step to the first. It has a
    C of its own (`C2_re`, `C2_im`) and follows the first h in the state.
    """

    divides_time = True
    bidirectional = False
    output_scale: float = 1.0

    B_re: nnx.Param
    B_im: nnx.Param
    C_re: nnx.Param
    C_im: nnx.Param
    D: nnx.Param
    C2_re: nnx.Param
    C2_im: nnx.Param

    def __init__(
        self, features: int, state_features: int, method: str, **options: Unpack[MatrixOptions]
    ):
        super().__init__(features, **options)
        self.state_features = state_features
        self.method = LINEAR_RECURRENCE.checked_method(method)

    def set_matrix(
        self,
        name: str,
        shape: tuple[int, int],
        draw: Callable[..., tuple[Array, Array]],
        **options: Unpack[MatrixOptions],
    ) -> None:
        """Makes the parts of a complex matrix by `kernel_init`, or together by `draw`."""
        keys, init, dtype = options["rngs"].params, options.get("kernel_init"), self.param_dtype
        if init is None:
            parts = [part.astype(dtype) for part in draw(keys(), shape, carry_dtype(dtype))]
        else:
            parts = [init(keys(), shape, dtype) for _ in range(2)]
        for part, value in zip(("re", "im"), parts, strict=True):
            setattr(self, f"{name}_{part}", nnx.Param(value))

    def recurrence(self, dtype: Any) -> tuple[Inexact[Array, " state"], Inexact[Array, " state"]]:
        """Returns λ and γ, computed in this dtype, which is at least float32."""
        raise NotImplementedError  # a subclass defines it

    def init_state(self, batch_size: int) -> LRUState:
        """Zeros, in at least float32."""
        size = self.state_features * (1 + self.bidirectional)
        return LRUState(jnp.zeros((batch_size, size, 2), self.state_dtype))

    def sequence(self, x, state, rows):
        """Runs `ops.linear_recurrence` between the products with B and C."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        # The inputs and λ, which is constant over time, are the same in both directions.
        real, imaginary = (ops.affine(x, B[...].astype(dtype)) for B in (self.B_re, self.B_im))
        inputs = lax.complex(real, imaginary)
        decay, scale = (u.astype(inputs.dtype) for u in self.recurrence(real.dtype))
        inputs *= scale[None, None]
        decays = jnp.broadcast_to(decay, inputs.shape)

        matrices = [(self.C_re, self.C_im)]
        if self.bidirectional:
            matrices.append((self.C2_re, self.C2_im))
        h0 = state.h.astype(carry_dtype(state.h.dtype))
        starts = jnp.split(lax.complex(h0[..., 0], h0[..., 1]), len(matrices), axis=1)
        y = self.D[...].astype(real.dtype)[None, None] * x.astype(real.dtype)
        ends = []
        for reverse, (start, (C_re, C_im)) in enumerate(zip(starts, matrices, strict=True)):
            h, end = ops.linear_recurrence(
                decays, inputs, start, reverse=bool(reverse), method=self.method, rows=rows
            )
            # Re(h C) is one product of real numbers: [h_re, −h_im] [C_re; C_im].
            parts = jnp.concatenate([h.real, -h.imag], axis=-1)
            C = jnp.concatenate([C_re[...], C_im[...]]).astype(dtype)
            y += self.output_scale * ops.affine(parts, C)
            ends.append(end)
        end = jnp.concatenate(ends, axis=1)
        return y.astype(dtype), LRUState(jnp.stack([end.real, end.imag], axis=-1))


class LRU(DiagonalStateSpace):
    """The linear recurrent unit, a diagonal state space with complex decays.

        >>> layer = LRU(64, 128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        λ = e^{−ν + iθ},   ν = e^{nu_log},   θ = e^{theta_log},   γ = e^{gamma_log}
        h_t = λ ⊙ h_{t−1} + γ ⊙ (x_t B)
        y_t = Re(h_t C) + D ⊙ x_t

    x and y are (batch, time, features). h consists of complex numbers, and the state is
    `LRUState(h)` with their real and imaginary parts, (batch, state_features, 2). B and C are
    complex matrices, stored as `B_re`, `B_im`, `C_re` and `C_im`. All other parameters are real.
    |λ| < 1 whatever the parameters are, so the recurrence is stable. λ does not depend on x.

    Args:
        features: size of x_t and y_t.
        state_features: size of h_t.
        r_min: smallest initial |λ|.
        r_max: largest initial |λ|. A value close to 1 keeps inputs for many steps.
        max_phase: largest initial angle of λ, in radians. For long sequences, the authors restrict
            the angles to a small range.
        method: the method of `ops.linear_recurrence`.
        **options: as in `MatrixOptions`. λ is uniform on the ring between r_min and r_max, and γ
            is √(1 − |λ|²), so that white noise gives all numbers of h the same expected variance.
            The parts of B are normal with variance 1 / (2 features), those of C with variance
            1 / state_features, and D with variance 1. A `kernel_init` draws each part of B and C.
            h is computed in at least float32.

    Raises:
        ValueError: a size or max_phase is not positive, there is no such method, or not
            0 ≤ r_min < r_max ≤ 1.

    Layouts: `lru` (the parameters of the authors' notation, as in minimal-LRU).

    Source: "Resurrecting Recurrent Neural Networks for Long Sequences", Orvieto et al. 2023
    (arXiv 2303.06349), appendix A.

    """

    def __init__(
        self,
        features: int,
        state_features: int,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: Positive = 2 * math.pi,
        method: ops.LinearRecurrenceMethod = "auto",
        **options: Unpack[MatrixOptions],
    ):
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"r_min, r_max: expected 0 ≤ r_min < r_max ≤ 1, got {r_min}, {r_max}")
        super().__init__(features, state_features, method, **options)
        rngs, dtype = options["rngs"], self.param_dtype
        wide, shape = carry_dtype(dtype), (state_features,)
        # Uniform squares of |λ| spread λ evenly over the area of the ring. Draw 1 − |λ|², because
        # |λ|² would round to 1 if r_min is close to 1.
        info = jnp.finfo(wide)
        smallest, largest = max(1 - r_max**2, float(info.tiny)), 1 - r_min**2
        gap = jax.random.uniform(rngs.params(), shape, wide, smallest, largest)
        gap = jnp.clip(gap, smallest, 1 - info.epsneg)
        angle = jax.random.uniform(rngs.params(), shape, wide, info.tiny, max_phase)
        self.nu_log = nnx.Param(jnp.log(-jnp.log1p(-gap) / 2).astype(dtype))
        self.theta_log = nnx.Param(jnp.log(angle).astype(dtype))
        self.gamma_log = nnx.Param((jnp.log(gap) / 2).astype(dtype))
        of_inputs, of_states = (2 * features) ** -0.5, state_features**-0.5
        self.set_matrix("B", (features, state_features), normal_parts(of_inputs), **options)
        self.set_matrix("C", (state_features, features), normal_parts(of_states), **options)
        self.D = nnx.Param(jax.random.normal(rngs.params(), (features,), dtype))

    def recurrence(self, dtype):
        """`λ = e^{−ν + iθ}` and γ."""
        parameters = (self.nu_log, self.theta_log, self.gamma_log)
        nu, theta, gamma = (jnp.exp(p[...].astype(dtype)) for p in parameters)
        return jnp.exp(lax.complex(-nu, theta)), gamma

    mesh_axes = last_axis("state", "B_re", "B_im", "nu_log", "theta_log", "gamma_log") | first_axis(
        "state", "C_re", "C_im"
    )

    def torch_layouts(self) -> Layouts:
        """`lru`: the names of the parameters, with (out, in) matrices."""
        return {
            "lru": [
                *(same(name, name) for name in ("nu_log", "theta_log", "gamma_log")),
                *(transposed(name, name) for name in ("B_re", "B_im", "C_re", "C_im")),
                same("D", "D"),
            ]
        }


def normal_parts(deviation: float) -> Callable[..., tuple[Array, Array]]:
    """Draws the parts of a complex matrix from a normal distribution."""

    def draw(key, shape, dtype):
        real, imaginary = deviation * jax.random.normal(key, (2, *shape), dtype)
        return real, imaginary

    return draw
