"""Normalization as torch computes it."""

__all__ = ["BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm", "ZeroCenteredRMSNorm"]

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models.checks.values import Positive, as_array, check_divides, checked_array, wrong_shape
from jax_models.ops import carry_dtype
from jax_models.options import CheckedOptions, NormOptions
from jax_models.weights import Layouts, batch_norm


def checked_rows(x, features: int) -> Array:
    """Returns x as a floating array whose last axis has this size, or raises an error."""
    x = checked_array("x", as_array("x", x), Float)
    if x.shape[-1:] != (features,):
        raise wrong_shape("x", ("…", features), x.shape)
    return x


class LayerNorm(nnx.LayerNorm, CheckedOptions):
    """`(x − mean) / √(var + 1e-5) · scale + bias` over the features, in at least float32.

        >>> norm = LayerNorm(64, rngs=nnx.Rngs(0))
        >>> y = norm(jnp.ones((8, 100, 64)))

    The variance is computed from the centered values, not as a difference of squares. Unlike Flax's
    own, this norm works under `jax_numpy_dtype_promotion="strict"` in float64 and bfloat16.
    """

    def __init__(self, features: int, **options: Unpack[NormOptions]):
        super().__init__(
            features,
            epsilon=1e-5,
            use_fast_variance=False,
            **options,
        )

    def __call__(self, x, *, mask=None):
        """Normalizes the last axis of x."""
        x = checked_rows(x, self.num_features)
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)


class GroupNorm(nnx.GroupNorm, CheckedOptions):
    """`(x − mean) / √(var + ε) · scale + bias` over each group of the features of a row.

        >>> norm = GroupNorm(64, num_groups=4, rngs=nnx.Rngs(0))
        >>> y = norm(jnp.ones((8, 64)))

    x is (rows, features). Without `use_bias`, there is no bias. The norm is computed in at least
    float32, and works under `jax_numpy_dtype_promotion="strict"`, as `LayerNorm` does.
    """

    def __init__(
        self,
        features: int,
        *,
        num_groups: int,
        epsilon: float = 1e-5,
        use_bias: bool = True,
        **options: Unpack[NormOptions],
    ):
        super().__init__(
            features,
            num_groups=num_groups,
            epsilon=epsilon,
            use_bias=use_bias,
            use_fast_variance=False,
            **options,
        )

    def __call__(self, x, *, mask=None):
        """Normalizes each row of x."""
        x = checked_rows(x, self.num_groups * self.group_size)
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)


class BatchNorm(nnx.BatchNorm, CheckedOptions):
    """Batch norm whose running statistics match `torch.nn.BatchNorm1d`, `2d` and `3d`.

        >>> norm = BatchNorm(64, rngs=nnx.Rngs(0))
        >>> y = norm(jnp.ones((8, 100, 64)))

        y = (x − mean) / √(var + ε) · scale + bias
        running mean ← m · running mean + (1 − m) · mean
        running var ← m · running var + (1 − m) · n / (n − 1) · var

    The features are the last axis of x. mean and var are taken over the n positions along all other
    axes. After `norm.eval()`, y is computed with the running statistics instead. Flax's own layer
    leaves out the factor n / (n − 1).

    Args:
        features: size of the last axis of x.
        momentum: m, one minus torch's momentum.
        epsilon: ε.
        **options: as in `NormOptions`. The scale starts at 1, the bias at 0. The running statistics
            are in float32.

    Raises:
        ValueError: momentum is not in [0, 1], or epsilon is not positive. At the call: the size of
            the last axis of x is not `features`, or x has fewer than two rows in training.

    Layouts: `torch.nn`.

    """

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.9,
        epsilon: Positive = 1e-5,
        **options: Unpack[NormOptions],
    ):
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: expected 0 ≤ momentum ≤ 1, got {momentum}")
        super().__init__(
            features,
            momentum=momentum,
            epsilon=epsilon,
            use_fast_variance=False,
            **options,
        )

    def __call__(self, x, use_running_average: bool | None = None, *, mask=None):
        """Normalizes each feature, and updates the running statistics in training.

        The statistics ignore the elements of x where `mask`, if given, is false.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        x = checked_rows(x, self.num_features)
        rows = x.size // self.num_features
        if not use_running_average and rows < 2:
            raise ValueError(f"x: expected at least two rows in training, got shape {x.shape}")
        before = self.var[...]
        with jax.numpy_dtype_promotion("standard"):
            y = super().__call__(x, use_running_average, mask=mask)
        if not use_running_average:
            # Flax has added (1 − m) · var, and torch adds (1 − m) · var / (n − 1) on top.
            if mask is not None:
                counted = jnp.broadcast_to(mask, x.shape).reshape(rows, -1)
                rows = jnp.maximum(counted.sum(axis=0), 2)
            after = self.var[...]
            self.var[...] = after + (after - self.momentum * before) / (rows - 1)
        return y

    def torch_layouts(self) -> Layouts:
        """`torch.nn`: the keys of torch's batch norms."""
        return {"torch.nn": batch_norm("", "")}


class RMSNorm(nnx.RMSNorm, CheckedOptions):
    """`x / √(mean(x²) + ε) · scale` over the features, in at least float32.

        >>> norm = RMSNorm(64, rngs=nnx.Rngs(0))
        >>> y = norm(jnp.ones((8, 100, 64)))

    With `num_groups`, the mean is that of each group of consecutive features. Without `use_scale`,
    there is no scale. It works under `jax_numpy_dtype_promotion="strict"`, as `LayerNorm` does.
    """

    def __init__(
        self,
        features: int,
        *,
        num_groups: int = 1,
        epsilon: Positive = 1e-6,
        use_scale: bool = True,
        **options: Unpack[NormOptions],
    ):
        check_divides("num_groups", num_groups, "features", features)
        super().__init__(features, epsilon=epsilon, use_scale=use_scale, **options)
        self.num_groups = num_groups

    def __call__(self, x, mask=None):
        """Normalizes the last axis of x."""
        x = checked_rows(x, self.num_features)
        with jax.numpy_dtype_promotion("standard"):
            if self.num_groups == 1:
                return super().__call__(x, mask)
            dtype = self.dtype or jnp.result_type(x, self.param_dtype)
            shape = *x.shape[:-1], self.num_groups, x.shape[-1] // self.num_groups
            groups = x.astype(carry_dtype(dtype)).reshape(shape)
            where = None if mask is None else jnp.broadcast_to(mask, x.shape).reshape(shape)
            square = jnp.mean(groups * groups, axis=-1, keepdims=True, where=where)
            y = (groups * jax.lax.rsqrt(square + self.epsilon)).reshape(x.shape)
            if self.scale is not None:
                y = y * jnp.broadcast_to(self.scale[...], y.shape)
            return y.astype(dtype)


class RootMeanSquareNorm(CheckedOptions, nnx.Module):
    """The base class of norms by the root mean square of the features, in at least float32."""

    init = staticmethod(nnx.initializers.ones)

    def __init__(self, features: int, epsilon: float = 0.0, **options: Unpack[NormOptions]):
        self.epsilon = epsilon
        self.dtype = options.get("dtype")
        scale = self.init(options["rngs"].params(), (features,), options.get("param_dtype"))
        self.scale = nnx.Param(scale)

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        """Normalizes the last axis of x."""
        scale = self.scale[...]
        x = checked_rows(x, scale.size)
        dtype = self.dtype or jnp.result_type(x, scale)
        # Squares overflow in float16 and lose digits in bfloat16, so compute in at least float32.
        x, scale = (array.astype(carry_dtype(dtype)) for array in (x, scale))
        square = jnp.mean(x * x, axis=-1, keepdims=True)
        return self.scaled(x, square, jnp.broadcast_to(scale, x.shape)).astype(dtype)

    def scaled(self, x: Array, square: Array, scale: Array) -> Array:
        """The subclass's equation; `square` is the mean of the squares of x."""
        raise NotImplementedError  # a subclass defines it


class ZeroCenteredRMSNorm(RootMeanSquareNorm):
    """`x / √(mean(x²) + ε) · (1 + scale)` over the features, in at least float32.

        >>> norm = ZeroCenteredRMSNorm(64, rngs=nnx.Rngs(0))
        >>> y = norm(jnp.ones((8, 100, 64)))

    The norm of Gemma, whose scale is initialized to zero.
    """

    init = staticmethod(nnx.initializers.zeros)

    def __init__(self, features: int, *, epsilon: Positive = 1e-6, **options: Unpack[NormOptions]):
        super().__init__(features, epsilon, **options)

    def scaled(self, x, square, scale):
        """Normalizes with ε inside the root."""
        return x * jax.lax.rsqrt(square + self.epsilon) * (1 + scale)
