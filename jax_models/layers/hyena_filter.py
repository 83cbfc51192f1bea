"""The filters of Hyena: parameters, or a network of the position (arXiv 2302.10866)."""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.linear import torch_uniform
from jax_models.ops import carry_dtype
from jax_models.options import CheckedOptions, FilterOptions
from jax_models.sequence import check_time
from jax_models.weights import Layouts, same, squeezed, transposed
from jax_models.weights.constant import Constant

FAST_DECAY, SLOW_DECAY, TARGET = 0.3, 1.5, 1e-2
"""The fastest and slowest channels of a window decay to TARGET after these parts of max_length."""


def draw_network(
    widths: list[int], rngs: nnx.Rngs, dtype: Any, kind: type[nnx.Variable] = nnx.Param
) -> tuple[nnx.List, nnx.List]:
    """Draws the kernels and the biases of a filter's network, whose last layer has no bias."""

    def draw(fan_in: int, *shape: int) -> nnx.Variable:
        return kind(torch_uniform(fan_in)(rngs.params(), shape, dtype))

    kernels = nnx.List(draw(fan_in, fan_in, width) for fan_in, width in itertools.pairwise(widths))
    return kernels, nnx.List(draw(fan_in, widths[1]) for fan_in in widths[:-2])


def run_network(
    z: Float[Array, "length embed"],
    kernels: Iterable[nnx.Variable],
    biases: Iterable[nnx.Variable],
    freqs: Iterable[nnx.Variable],
) -> Float[Array, "length out"]:
    """Linear layers with sines of the given frequencies between them."""
    *hidden, last = kernels
    for kernel, bias, freq in zip(hidden, biases, freqs, strict=True):
        z = ops.affine(z, at_least_float32(kernel), at_least_float32(bias))
        z = jnp.sin(jnp.broadcast_to(at_least_float32(freq), z.shape) * z)
    return ops.affine(z, at_least_float32(last))


def check_network(embed_features: int, num_filter_layers: int) -> None:
    """Refuses sizes with which no network can be built."""
    if embed_features % 2 == 0 or embed_features < 3:
        raise ValueError(
            f"embed_features: expected an odd number of at least 3 (the time, and a cosine and "
            f"a sine of each frequency), got {embed_features}"
        )
    if num_filter_layers < 2:
        raise ValueError(f"num_filter_layers: expected at least 2, got {num_filter_layers}")


class HyenaFilter(CheckedOptions, nnx.Module):
    """The filters of the simple block, stored as parameters, one for each order.

        >>> taps = HyenaFilter(64, max_length=128, rngs=nnx.Rngs(0))(100)
        >>> taps.shape
        (2, 64, 100)

        h_t = g_t ⊙ (exp(α t/(L−1)) + b) / ‖·‖₁

    g (order, features, max_length) is the parameter `h`; α and b are (features,). The norm is over
    the features at each step, as in the code of The Annotated Hyena. Its text says that the norm is
    over time. A tap that is zero in all features stays zero.

    Args:
        features: D.
        max_length: L, the longest sequence.
        order: N, the number of filters.
        **options: as in `FilterOptions`. g is drawn from a standard normal distribution, α is
            initialized to decays from slow to fast, and b to 0.

    Raises:
        ValueError: a size is not positive.

    Layouts: `annotated-hyena` (torch_ref.HyenaFilter).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        **options: Unpack[FilterOptions],
    ):
        rngs, param_dtype = options["rngs"], options.get("param_dtype")
        shape = (order, features, max_length)
        self.h = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype))
        self.alphas = nnx.Param(window_exponents(features, param_dtype))
        self.b = nnx.Param(jnp.zeros(features, param_dtype))
        self.t = Constant(unit_times(max_length, param_dtype))

    def __call__(self, length: int) -> Float[Array, "order features length"]:
        """The first `length` taps, in at least float32."""
        check_time("length", length, self.t.shape[0])
        g = at_least_float32(self.h)[:, :, :length]
        b = jnp.broadcast_to(at_least_float32(self.b)[:, None], g.shape[1:])
        h = g * jnp.broadcast_to(_decay(self.alphas, self.t, length) + b, g.shape)
        return l1_normalized(h, axis=1)

    def torch_layouts(self) -> Layouts:
        """`annotated-hyena`: the keys of the torch_ref filter of the same name."""
        return {
            "annotated-hyena": [
                same("h", "h"),
                squeezed("alphas", "window.alphas", (0, 2)),
                squeezed("b", "window.b", (0, 2)),
                squeezed("t", "window.t", (0, 1)),
            ]
        }


class AuthenticHyenaFilter(CheckedOptions, nnx.Module):
    """The paper's filters, one per order: a small network of the position, times a window.

        >>> taps = AuthenticHyenaFilter(64, max_length=128, rngs=nnx.Rngs(0))(100)
        >>> taps.shape
        (2, 64, 100)

        h_t = (sin(f ⊙ (… sin(f ⊙ (p_t W_1 + b_1)) …)) W_last) ⊙ exp(α t/(L−1))

    p (max_length, embed_features) is a trained embedding of the position. The text of The Annotated
    Hyena describes this filter. Its code, however, discards the network's output and uses a
    parameter g (order, features, max_length): h_t = g_t ⊙ exp(α t/(L−1)). For this filter, choose
    `implicit=False`. In both cases, the weights of both filters are loaded and kept; the unused
    ones are constants, and so are t, time_emb and f.

    Args:
        features: D.
        max_length: L, the longest sequence.
        order: N, the number of filters.
        embed_features: size of p_t, an odd number. p_t starts as t/(L−1), then cosines and sines of
            0, 1, … periods.
        mlp_features: width of the network.
        num_filter_layers: linear layers of the network, at least 2; all but the last have a bias
            and a sine.
        omega: f, the frequency of all sines.
        implicit: whether the network computes the filters. If False, g is used.
        **options: as in `FilterOptions`. The network is initialized as in torch, g from a standard
            normal distribution, and α to decays from slow to fast.

    Raises:
        ValueError: a size is not positive, embed_features is even or less than 3, or there are
            fewer than 2 layers.

    Layouts: `annotated-hyena` (torch_ref.AuthenticHyenaFilter).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        embed_features: int = 33,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 12.0,
        implicit: bool = True,
        **options: Unpack[FilterOptions],
    ):
        rngs, param_dtype = options["rngs"], options.get("param_dtype")
        shape = (order, features, max_length)
        check_network(embed_features, num_filter_layers)
        self.shape, self.implicit = shape, implicit
        network_kind, taps_kind = (nnx.Param, Constant) if implicit else (Constant, nnx.Param)
        widths = [embed_features, *[mlp_features] * (num_filter_layers - 1), order * features]
        # An implicit filter trains the network that computes the taps, and an explicit one trains
        # the taps h. Whichever is not trained is kept as constants, because checkpoints contain
        # both.
        self.h = taps_kind(jax.random.normal(rngs.params(), shape, param_dtype))
        self.pos_emb = network_kind(
            embed_positions(max_length, np.arange(embed_features // 2), param_dtype),
            is_matrix=False,
        )
        self.kernels, self.biases = draw_network(widths, rngs, param_dtype, network_kind)
        self.freqs = nnx.List(
            Constant(jnp.full(mlp_features, omega, param_dtype)) for _ in widths[1:-1]
        )
        # The window lets the taps of each channel decay at a trainable rate.
        self.alphas = nnx.Param(window_exponents(features, param_dtype))
        self.t = Constant(unit_times(max_length, param_dtype))
        self.time_emb = Constant(unit_times(max_length, param_dtype))

    def __call__(self, length: int) -> Float[Array, "order features length"]:
        """The first `length` taps, in at least float32."""
        check_time("length", length, self.shape[2])
        h = self.network(length) if self.implicit else at_least_float32(self.h)[:, :, :length]
        return h * jnp.broadcast_to(_decay(self.alphas, self.t, length), h.shape)

    def network(self, length: int) -> Float[Array, "order features length"]:
        """The network at the first `length` positions."""
        z = run_network(
            at_least_float32(self.pos_emb)[:length], self.kernels, self.biases, self.freqs
        )
        order, features, _ = self.shape
        return z.T.reshape(order, features, length)

    def torch_layouts(self) -> Layouts:
        """`annotated-hyena`: the keys of the torch_ref filter of the same name."""
        hidden = range(len(self.biases))
        return {
            "annotated-hyena": [
                same("h", "h"),
                squeezed("t", "t", (0, 1)),
                squeezed("time_emb", "pos_emb.time_emb", (0, 1)),
                same("pos_emb", "pos_emb.pos_emb"),
                *(
                    transposed(f"kernels.{i}", f"mlp.{2 * i}.weight")
                    for i in (*hidden, len(hidden))
                ),
                *(same(f"biases.{i}", f"mlp.{2 * i}.bias") for i in hidden),
                *(squeezed(f"freqs.{i}", f"mlp.{2 * i + 1}.freq", (0,)) for i in hidden),
                squeezed("alphas", "window.alphas", (0, 2)),
            ]
        }


class FixedFilter(nnx.Module):
    """The taps of a filter, computed once from its present weights, for inference.

    Args:
        filter: a module that computes taps, such as a `HyenaFilter`.
        max_length: the number of its taps.

    """

    def __init__(self, filter: Callable[[int], Array], max_length: int):
        self.h = Constant(_taps(*nnx.split(filter), max_length))

    def __call__(self, length: int) -> Float[Array, "order features length"]:
        """The first `length` taps."""
        check_time("length", length, self.h.shape[2])
        return self.h[...][:, :, :length]

    def torch_layouts(self) -> Layouts:
        """Not available, because fixed filters have no weights.

        Raises:
            NotImplementedError: always.

        """
        raise NotImplementedError("fixed filters have no weights; export the model they are of")


@partial(jax.jit, static_argnums=(0, 2))
def _taps(graphdef, params, length: int) -> Float[Array, "order features length"]:
    return nnx.merge(graphdef, params)(length)


def l1_normalized(h: Array, axis: int | tuple[int, ...]) -> Array:
    """Divides taps by their L1 norm over these axes. Taps that are all zero stay zero."""
    norm = jnp.sum(jnp.abs(h), axis=axis, keepdims=True)
    return h / jnp.where(norm > 0, norm, 1)


def at_least_float32(param: nnx.Variable) -> Array:
    """The parameter in at least float32."""
    return param[...].astype(carry_dtype(param.dtype))


def _decay(alphas: nnx.Variable, t: nnx.Variable, length: int) -> Float[Array, "features length"]:
    return jnp.exp(jnp.outer(at_least_float32(alphas), at_least_float32(t)[:length]))


def window_exponents(features: int, dtype) -> Float[Array, " features"]:
    """The exponents of the window at time 1, from the slowest decay to the fastest."""
    fastest, slowest = math.log(TARGET) / FAST_DECAY, math.log(TARGET) / SLOW_DECAY
    return jnp.asarray(np.linspace(slowest, fastest, features), dtype)


def unit_times(max_length: int, dtype) -> Float[Array, " max_length"]:
    """Evenly spaced times from 0 to 1."""
    return jnp.asarray(np.linspace(0, 1, max_length), dtype)


def embed_positions(
    max_length: int, frequencies: np.ndarray, dtype, *, sign: int = 1
) -> Float[Array, "max_length embed"]:
    """Embeds positions: the time from 0 to 1, then cosines and sines of these frequencies."""
    angle = 2 * np.pi * np.outer(np.arange(max_length), frequencies) / max_length
    time = np.linspace(0, 1, max_length)[:, None]
    return jnp.asarray(np.concatenate([time, np.cos(angle), sign * np.sin(angle)], axis=1), dtype)
