"""S5, a diagonal state space of a continuous-time system (Smith et al. 2023)."""

__all__ = ["S5"]

import math
from collections.abc import Callable
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array

from jax_models import ops
from jax_models.checks.values import Positive, check_divides
from jax_models.layers.linear import lecun_normal
from jax_models.layers.lru import DiagonalStateSpace
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import carry_dtype
from jax_models.options import MatrixOptions
from jax_models.weights import Layouts, Weight, same, squeezed
from jax_models.weights.rows import namespace

LARGEST_REAL_PART = -1e-4
"""The largest real part of an eigenvalue with `clip_eigenvalues`."""


class S5(DiagonalStateSpace):
    """S5, a diagonal state space that discretizes a linear system in continuous time.

        >>> layer = S5(64, 32, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        Λ = Lambda_re + i Lambda_im,   Δ = step_rescale · e^{log_step}
        λ = e^{ΛΔ},   γ = (λ − 1) / Λ                              zero-order hold
        λ = (1 + ΛΔ/2) / (1 − ΛΔ/2),   γ = Δ / (1 − ΛΔ/2)          bilinear
        h_t = λ ⊙ h_{t−1} + γ ⊙ (x_t B)
        y_t = 2 Re(h_t C) + D ⊙ x_t

    x and y are (batch, time, features), and the state is `LRUState(h)`, the real and imaginary
    parts of h, (batch, state_features, 2). B and C are complex matrices, stored as `B_re`, `B_im`,
    `C_re` and `C_im`; all other parameters are real. The eigenvalues Λ of a real system come in
    conjugate pairs. h has one number for each pair, and the factor 2 accounts for the other. With
    `bidirectional`, a second state runs backward:

        k_t = λ ⊙ k_{t+1} + γ ⊙ (x_t B)
        y_t = 2 Re(h_t C + k_t C2) + D ⊙ x_t

    The state is then (batch, 2 state_features, 2): h after the last step, and k after the first.

    Args:
        features: size of x_t and y_t.
        state_features: size of h_t. If `conjugate_pairs`, this is half of the authors' state size.
        num_blocks: number of blocks, a divisor of `state_features`. All start with the same
            eigenvalues, those of a HiPPO matrix of the size of a block.
        conjugate_pairs: whether h has one number of each conjugate pair. If False, it has all, and
            y_t = Re(h_t C) + D ⊙ x_t.
        bidirectional: whether a second state runs from the last step to the first.
        discretization: "zoh" (zero-order hold) or "bilinear".
        clip_eigenvalues: whether to clip Lambda_re to at most −0.0001, so that the recurrence is
            stable.
        step_rescale: the factor of Δ, such as 2 for signals that are sampled half as often as the
            signals that the layer was trained on.
        step_min: smallest initial Δ.
        step_max: largest initial Δ.
        method: the method of `ops.linear_recurrence`.
        **options: as in `MatrixOptions`. Λ starts with the eigenvalues of the normal part of
            HiPPO-LegS, e^{log_step} is log-uniform, and D is normal. B and the parts of C are drawn
            for the real system before it is diagonalized, which has N = 2 state_features states,
            or state_features without `conjugate_pairs`, from a truncated normal distribution with
            variance 1 / N. A `kernel_init` draws each part of the diagonalized B and C. h is
            computed in at least float32.

    Raises:
        ValueError: a size or a step is not positive, step_min exceeds step_max, num_blocks does not
            divide state_features, or there is no such discretization or method.

    Layouts: `s5` (the parameters of the authors' S5SSM, with `C_init` other than
    "complex_normal" if `bidirectional`).

    Source: "Simplified State Space Layers for Sequence Modeling", Smith et al. 2023
    (arXiv 2208.04933); `s5/ssm.py` of lindermanlab/S5.

    """

    def __init__(
        self,
        features: int,
        state_features: int,
        *,
        num_blocks: int = 1,
        conjugate_pairs: bool = True,
        bidirectional: bool = False,
        discretization: Literal["zoh", "bilinear"] = "zoh",
        clip_eigenvalues: bool = False,
        step_rescale: Positive = 1.0,
        step_min: Positive = 0.001,
        step_max: Positive = 0.1,
        method: ops.LinearRecurrenceMethod = "auto",
        **options: Unpack[MatrixOptions],
    ):
        super().__init__(features, state_features, method, **options)
        check_divides("num_blocks", num_blocks, "state_features", state_features)
        if step_min > step_max:
            raise ValueError(f"step_min: expected at most step_max={step_max}, got {step_min}")
        self.bidirectional, self.causal = bidirectional, not bidirectional
        self.discretization = discretization
        self.clip_eigenvalues = clip_eigenvalues
        self.step_rescale = step_rescale
        self.output_scale = 2.0 if conjugate_pairs else 1.0
        rngs, dtype = options["rngs"], self.param_dtype
        # All blocks start with the same eigenvalues: all of a HiPPO matrix, or one of each pair.
        size = state_features // num_blocks
        frequencies, vectors = hippo_eigenvectors(size * (1 + conjugate_pairs))
        frequencies, vectors = np.tile(frequencies[:size], num_blocks), vectors[:, :size]
        shape = (state_features,)
        self.Lambda_re = nnx.Param(jnp.full(shape, -0.5, dtype))
        self.Lambda_im = nnx.Param(jnp.asarray(frequencies, dtype))
        log_steps = math.log(step_min), math.log(step_max)
        log_step = jax.random.uniform(rngs.params(), shape, carry_dtype(dtype), *log_steps)
        self.log_step = nnx.Param(log_step.astype(dtype))
        self.set_matrix("B", (features, state_features), input_parts(vectors), **options)
        for name in ("C", "C2")[: 1 + bidirectional]:
            self.set_matrix(name, (state_features, features), output_parts(vectors), **options)
        self.D = nnx.Param(jax.random.normal(rngs.params(), (features,), dtype))

    def recurrence(self, dtype):
        """Discretizes: λ and γ."""
        real, imaginary, log_step = (
            p[...].astype(dtype) for p in (self.Lambda_re, self.Lambda_im, self.log_step)
        )
        if self.clip_eigenvalues:
            real = jnp.minimum(real, LARGEST_REAL_PART)
        step = self.step_rescale * jnp.exp(log_step)
        turn = lax.complex(real * step, imaginary * step)
        step = step.astype(turn.dtype)
        if self.discretization == "zoh":
            # (e^z − 1) / z, and 1 + z/2 at z = 0.
            is_zero = turn == 0
            ratio = jnp.expm1(turn) / jnp.where(is_zero, 1, turn)
            return jnp.exp(turn), step * jnp.where(is_zero, 1 + turn / 2, ratio)
        denominator = 1 - turn / 2
        return (1 + turn / 2) / denominator, step / denominator

    mesh_axes = last_axis(
        "state", "B_re", "B_im", "Lambda_re", "Lambda_im", "log_step"
    ) | first_axis("state", "C_re", "C_im", "C2_re", "C2_im")

    def torch_layouts(self) -> Layouts:
        """`s5`: the names of the authors' parameters, with (out, in, 2) matrices."""
        keys = {"C": "C1", "C2": "C2"} if self.bidirectional else {"C": "C"}
        return {
            "s5": [
                *(same(name, name) for name in ("Lambda_re", "Lambda_im")),
                squeezed("log_step", "log_step", (1,)),
                *(complex_matrix(name, key) for name, key in {"B": "B", **keys}.items()),
                same("D", "D"),
            ]
        }


def complex_matrix(name: str, key: str) -> Weight:
    """The two (in, out) parameters are the parts of the key's (out, in, 2) array."""
    return Weight(
        (f"{name}_re", f"{name}_im"),
        (key,),
        lambda a: (a[..., 0].T, a[..., 1].T),
        lambda real, imaginary: (namespace(real).stack([real.T, imaginary.T], axis=-1),),
    )


def hippo_eigenvectors(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the eigenvectors of the normal part of HiPPO-LegS, and their frequencies ω.

    This matrix is −½ on its diagonal, −√(n + ½) √(m + ½) below and √(n + ½) √(m + ½) above. Its
    eigenvalues are −½ + iω. They are sorted, so the first half has negative frequencies.
    """
    root = np.sqrt(np.arange(size) + 0.5)
    skew = np.triu(np.outer(root, root), 1)
    return np.linalg.eigh(-1j * (skew - skew.T))


def input_parts(vectors: np.ndarray) -> Callable[..., tuple[Array, Array]]:
    """Draws B of the system before it is diagonalized, and multiplies it by V⁻¹."""

    def draw(key, shape, dtype):
        features, num_blocks = shape[0], shape[1] // vectors.shape[1]
        B = lecun_normal(key, (num_blocks * len(vectors), features), dtype)
        B = lax.complex(B, jnp.zeros_like(B)).reshape(num_blocks, len(vectors), features)
        inverse = jnp.asarray(vectors.conj(), B.dtype)
        B = jnp.einsum("bsf,sn->fbn", B, inverse).reshape(shape)
        return B.real, B.imag

    return draw


def output_parts(vectors: np.ndarray) -> Callable[..., tuple[Array, Array]]:
    """Draws C of the system before it is diagonalized, and multiplies it by V."""

    def draw(key, shape, dtype):
        features, num_blocks = shape[1], shape[0] // vectors.shape[1]
        C = lecun_normal(key, (num_blocks * len(vectors), 2 * features), dtype)
        C = C.reshape(num_blocks, len(vectors), 2, features)
        C = lax.complex(C[:, :, 0], C[:, :, 1])
        C = jnp.einsum("bsf,sn->bnf", C, jnp.asarray(vectors, C.dtype)).reshape(shape)
        return C.real, C.imag

    return draw
