"""The filters of HyenaDNA (arXiv 2306.15794) and safari."""

__all__ = ["HyenaDNAFilter"]

from typing import Unpack

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models.layers.hyena_filter import (
    at_least_float32,
    check_network,
    draw_network,
    embed_positions,
    l1_normalized,
    run_network,
    unit_times,
    window_exponents,
)
from jax_models.options import CheckedOptions, FilterOptions
from jax_models.sequence import check_time
from jax_models.weights import Layouts, Weight, same, squeezed, tied, transposed
from jax_models.weights.constant import Constant
from jax_models.weights.rows import reshaped

LOWEST_FREQUENCY = 1e-4
"""The lowest frequency of the position embedding. The highest is the number of frequencies − 1."""


class HyenaDNAFilter(CheckedOptions, nnx.Module):
    """The filters of HyenaDNA: a network of the position with trained frequencies, times a window.

        >>> taps = HyenaDNAFilter(64, max_length=128, rngs=nnx.Rngs(0))(100)
        >>> taps.shape
        (1, 64, 100)

        h_t = (sin(f ⊙ (… sin(f ⊙ (z_t W_1 + b_1)) …)) W_last) ⊙ (exp(−t/(L−1) |δ|) + shift)

    z (max_length, embed_features) is trained, and so is f, which all sines share. δ (order,
    features) and t are constants. z and t depend on max_length, so a model with another max_length
    has other taps.

    Args:
        features: D.
        max_length: L, the longest sequence.
        order: the number of filters, one less than the operator's order.
        embed_features: size of z_t, an odd number 2 K + 1. z_t is t/(L−1), then cosines and sines
            of K frequencies in equal steps from 1e-4 to K − 1 periods.
        mlp_features: width of the network.
        num_filter_layers: linear layers of the network, at least 2; all but the last have a bias
            and a sine.
        omega: the initial f.
        shift: the value to which the window decays. By default, HyenaDNA uses 0.05, and safari 0.
        modulate: whether the window is applied.
        normalized: whether the taps of all filters at a step are divided by their L1 norm, after
            the window is applied. Safari's version with FlashFFTConv divides before the window;
            this order is not supported.
        **options: as in `FilterOptions`; matrices and biases are initialized as in torch.

    Raises:
        ValueError: a size is not positive, embed_features is even or less than 3, or there are
            fewer than 2 layers.

    Layouts: `hyena-dna` (HyenaFilter of HyenaDNA's standalone file), `hyena-dna-file` (the same
    with f under one key, as in safetensors files), `safari` (HyenaFilter of safari, which orders
    the features of several filters differently).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 1,
        embed_features: int = 5,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 10.0,
        shift: float = 0.05,
        modulate: bool = True,
        normalized: bool = False,
        **options: Unpack[FilterOptions],
    ):
        rngs, param_dtype = options["rngs"], options.get("param_dtype")
        check_network(embed_features, num_filter_layers)
        self.shape, self.shift = (order, features, max_length), shift
        self.modulate, self.normalized = modulate, normalized
        widths = [embed_features, *[mlp_features] * (num_filter_layers - 1), order * features]
        frequencies = np.linspace(LOWEST_FREQUENCY, embed_features // 2 - 1, embed_features // 2)
        self.z = nnx.Param(embed_positions(max_length, frequencies, param_dtype, sign=-1))
        self.kernels, self.biases = draw_network(widths, rngs, param_dtype)
        self.freq = nnx.Param(jnp.full((1, mlp_features), omega, param_dtype))
        self.t = Constant(unit_times(max_length, param_dtype))
        self.deltas = Constant(
            window_exponents(order * features, param_dtype).reshape(order, features)
        )

    def __call__(self, length: int) -> Float[Array, "order features length"]:
        """The first `length` taps, in at least float32."""
        order, features, max_length = self.shape
        check_time("length", length, max_length)
        # A small network maps the embedding of each position to the taps of all filters there.
        freqs = [self.freq] * len(self.biases)
        h = run_network(at_least_float32(self.z)[:length], self.kernels, self.biases, freqs)
        h = h.T.reshape(order, features, length)
        # The window lets taps fade with time, faster in some channels than in others.
        if self.modulate:
            decay = (
                jnp.abs(at_least_float32(self.deltas))[..., None]
                * at_least_float32(self.t)[None, None, :length]
            )
            h = h * (jnp.exp(-decay) + self.shift)
        return l1_normalized(h, axis=(0, 1)) if self.normalized else h

    def torch_layouts(self) -> Layouts:
        """`hyena-dna`; `hyena-dna-file`, where all sines share one key; `safari`."""
        order, features, _ = self.shape
        last = len(self.biases)
        freqs = tuple(f"implicit_filter.{2 * i + 1}.freq" for i in range(last))
        common = [
            squeezed("z", "pos_emb.z", (0,)),
            squeezed("t", "pos_emb.t", (0, 2)),
            *(transposed(f"kernels.{i}", f"implicit_filter.{2 * i}.weight") for i in range(last)),
            *(same(f"biases.{i}", f"implicit_filter.{2 * i}.bias") for i in range(last)),
        ]
        deltas = squeezed("deltas", "modulation.deltas", (0, 1))
        deltas = reshaped(deltas, (order, features), (order * features,))
        outputs = transposed(f"kernels.{last}", f"implicit_filter.{2 * last}.weight")
        return {
            "hyena-dna": [*common, tied("freq", freqs), outputs, deltas],
            "hyena-dna-file": [*common, same("freq", freqs[0]), outputs, deltas],
            "safari": [
                *common,
                tied("freq", freqs),
                by_feature(outputs, order),
                by_feature(deltas, order, axis=2),
            ],
        }


def by_feature(row: Weight, order: int, axis: int = 0) -> Weight:
    """The row of a key whose filter features are ordered by feature first, then by filter."""

    def turned(a, rows: int, columns: int):
        shape = (*a.shape[:axis], rows, columns, *a.shape[axis + 1 :])
        return a.reshape(shape).swapaxes(axis, axis + 1).reshape(a.shape)

    return row._replace(
        to_jax=lambda a: row.to_jax(turned(a, -1, order)),
        to_torch=lambda a: (turned(row.to_torch(a)[0], order, -1),),
    )
