"""Hyena: the simple block of "The Annotated Hyena", and the paper's block (arXiv 2302.10866)."""

__all__ = [
    "AuthenticHyenaBlock",
    "AuthenticHyenaFilter",
    "HyenaBlock",
    "HyenaFilter",
    "HyenaState",
    "LongConvState",
]

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.dropout import Dropout
from jax_models.layers.hyena_filter import AuthenticHyenaFilter, FixedFilter, HyenaFilter
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.mesh_axes import whole
from jax_models.ops import CausalConv1DState, LongConvState, carry_dtype
from jax_models.options import LayerOptions, filter_options, with_inits
from jax_models.sequence import SequenceLayer, check_time
from jax_models.weights import Layouts, linear, nested, squeezed


class HyenaState(NamedTuple):
    """The state of a Hyena block: the short convolution's inputs, and each long one's state."""

    conv: CausalConv1DState
    long: tuple[LongConvState, ...]


@dataclasses.dataclass(frozen=True)
class FilterTaps:
    """The taps of one filter, as a function of the parameters, for `ops.online_conv`."""

    graphdef: Any
    index: int

    def __call__(self, params, length: int) -> Float[Array, "features length"]:
        return nnx.merge(self.graphdef, params)(length)[self.index]


class HyenaOperator(SequenceLayer[HyenaState]):
    """The base class of Hyenas: the projections, the long convolutions, and their state.

    `make_filter` makes the module whose call computes the taps of all filters, (order, features,
    length), given a length.
    """

    divides_time = True

    resettable = False

    def __init__(
        self,
        features: int,
        max_length: int,
        make_filter: Callable[[], Any],
        *,
        order: int,
        num_filters: int,
        kernel_size: int,
        dropout_rate: float,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.max_length = max_length
        self.num_gates, self.num_filters = order, num_filters
        matrix, rngs = with_inits(options, torch_uniform(features)), options["rngs"]
        self.proj_input = Linear(features, (order + 1) * features, **matrix)
        self.conv = CausalConv1D((order + 1) * features, kernel_size, **options)
        self.filter = make_filter()
        self.B = nnx.Param(
            jax.random.normal(rngs.params(), (num_filters, features), self.param_dtype),
            is_matrix=False,
        )
        self.proj_output = Linear(features, features, **matrix)
        self.dropout = Dropout(dropout_rate, rngs=rngs)

    def set_view(self, time_axis: str | None = None, fixed_filters: bool | None = None) -> None:
        """Sets these options in a view: `nnx.view` calls this method.

        Args:
            time_axis: as for every sequence layer, but the state must be None: the sequence starts
                at its first step.
            fixed_filters: whether the view computes its filters once, from the present weights, for
                inference. The original model keeps its own filters, and the view shares every other
                parameter with it.

        """
        super().set_view(time_axis)
        if fixed_filters:
            self.filter = FixedFilter(self.filter, self.max_length)

    def init_state(self, batch_size: int) -> HyenaState:
        """The state before any input, in at least float32."""
        dtype = self.state_dtype
        sizes = (batch_size, self.in_features, self.max_length)
        long = tuple(ops.empty_long_conv_state(*sizes, dtype) for _ in range(self.num_filters))
        return HyenaState(self.conv.init_state(batch_size), long)

    def start(self, batch_size: int) -> None:
        """Returns None, because at the beginning the convolutions run over x alone."""
        return None

    def sequence(self, x, state, rows):
        """Runs the projections, and the products and convolutions that the subclass defines."""
        batch_size, time = x.shape[:2]
        if rows.time_axis is not None:
            if state is not None:
                raise NotImplementedError(
                    "state: expected None where time is divided over the axis "
                    f"{rows.time_axis!r}: the convolution begins at the sequence's first step"
                )
            time *= jax.lax.axis_size(rows.time_axis)
        check_time("x", time, self.max_length)

        # The projection and the short convolution compute the gates and the values.
        conv = self.conv.init_state(batch_size) if state is None else state.conv
        u = x.astype(self.computation_dtype(x))
        z, conv = self.conv.sequence(self.proj_input(u), conv, rows)
        *gates, v = jnp.split(jnp.swapaxes(z, 1, 2), self.num_gates + 1, axis=1)
        graphdef, params = nnx.split(self.filter)

        # At the start of a sequence, all filters are computed once. When a sequence continues, each
        # convolution computes the taps that it needs.
        past = None if state is None else state.long
        h = self.filter(time) if past is None else ()
        last_states: dict[int, LongConvState] = {}

        def convolve(n: int, v: Float[Array, "batch features time"]) -> Array:
            """Returns `h_n ∗ v + B_n ⊙ v`, and stores the new n-th state in `last_states`."""
            taps = FilterTaps(graphdef, n)
            options = {"params": params, "max_length": self.max_length, "lengths": rows.lengths}
            if past is None:
                axis = rows.time_axis
                whole = v if axis is None else jax.lax.all_gather(v, axis, axis=2, tiled=True)
                last_states[n] = ops.long_conv_state(whole, taps=taps, **options)
                return ops.long_conv(v, h[n], self.skip[n], time_axis=axis)
            y, last_states[n] = ops.online_conv(v, past[n], skip=self.skip[n], taps=taps, **options)
            return y

        y = self.operator(u, gates, v, convolve)
        return y, HyenaState(conv, tuple(last_states[n] for n in range(self.num_filters)))

    @property
    def skip(self) -> Float[Array, "filters features"]:
        """The factors B by which the input of each long convolution is added to its output."""
        return self.B[...]

    def operator(
        self,
        u: Float[Array, "batch time features"],
        gates: list[Float[Array, "batch features time"]],
        v: Float[Array, "batch features time"],
        convolve: Callable[[int, Array], Array],
    ) -> Float[Array, "batch time features"]:
        """The subclass's equation; `convolve(n, v)` is `h_n ∗ v + B_n ⊙ v`."""
        raise NotImplementedError  # a subclass defines it

    def output(self, v: Float[Array, "batch features time"]) -> Float[Array, "batch time features"]:
        """The output projection, and dropout when training."""
        return self.dropout(self.proj_output(jnp.swapaxes(v, 1, 2)))

    # These stay whole because on a CPU, XLA cannot compile an FFT of features divided over devices.
    mesh_axes = whole("proj_input", "proj_output", "filter")

    def torch_layouts(self) -> Layouts:
        """`annotated-hyena`: the keys of the torch_ref block of the same name."""
        return {
            "annotated-hyena": [
                *linear("proj_input", "proj_input.linear"),
                *nested(self.conv.torch_rows(), "conv", "proj_input.conv"),
                *nested(self.filter.torch_layouts()["annotated-hyena"], "filter", "filter"),
                squeezed("B", "B", (1, 3)),
                *linear("proj_output", "proj_output"),
            ]
        }


class HyenaBlock(HyenaOperator):
    """The simple Hyena block of order N from The Annotated Hyena, with residuals inside.

        >>> layer = HyenaBlock(64, max_length=128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x_1, …, x_N, v = conv(u W + b)                  conv: short, causal, depthwise
        v ← v + u
        v ← v + x_n/‖x_n‖₂ ⊙ (h_n ∗ v + B_n ⊙ v)        n = 1 … N; ∗: causal, over the whole past
        y = v + v W_out + b_out

    x = u and y are (batch, time, features), and the state is `HyenaState(conv, long)`. h comes from
    a `HyenaFilter`. The norm is over the features, and at least 1e-12. A step costs O(log²
    max_length) on average (`ops.online_conv`). The outputs from step max_length on are NaN. For
    inference, `nnx.view(block, fixed_filters=True)` computes the filters once.

    A call convolves by FFT, whose rounding errors are relative to the largest output of a row. So
    later inputs change earlier outputs by about one ulp of that output, and one NaN makes the whole
    row NaN (`ops.long_conv`). `step` is exactly causal.

    Args:
        features: size of u_t and y_t.
        max_length: the longest sequence.
        order: N, the number of long convolutions.
        kernel_size: taps of the short convolution.
        dropout_rate: dropout of W_out's output in training. The Annotated Hyena declares it
            but never applies it.
        **options: as in `LayerOptions`. W, W_out and the short convolution are initialized as in
            torch, b and b_out to zero. The initializers do not apply to the filters.

    Raises:
        ValueError: a size is not positive, or (at the call) x is longer than max_length.
        NotImplementedError: (at the call) `reset`; give each document a batch row of its own.

    Layouts: `annotated-hyena` (torch_ref.HyenaBlock).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(
            features,
            max_length,
            partial(HyenaFilter, features, max_length, order=order, **filter_options(options)),
            order=order,
            num_filters=order,
            kernel_size=kernel_size,
            dropout_rate=dropout_rate,
            **options,
        )

    def operator(self, u, gates, v, convolve):
        """`v ← v + norm(x) ⊙ (h ∗ v)` for each gate x, from v + u on; then adds the output."""
        v = v + jnp.swapaxes(u, 1, 2)
        for n, x in enumerate(gates):
            v = v + normalized(x) * convolve(n, v)
        return jnp.swapaxes(v, 1, 2) + self.output(v)


class AuthenticHyenaBlock(HyenaOperator):
    """The Hyena operator of order N as in the paper, with each product after the convolution.

        >>> layer = AuthenticHyenaBlock(64, max_length=128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x_1, …, x_N, v = conv(u W + b)                  conv: short, causal, depthwise
        v ← x_n ⊙ (h_n ∗ v + B_n ⊙ v)                   n = 1 … N; ∗: causal, over the whole past
        y = v W_out + b_out

    x = u and y are (batch, time, features), and the state is `HyenaState(conv, long)`. h comes from
    an `AuthenticHyenaFilter`. A step costs O(log² max_length) on average (`ops.online_conv`). The
    outputs from step max_length on are NaN. For inference, `nnx.view(block, fixed_filters=True)`
    computes the filters once. As in `HyenaBlock`, a call is causal up to rounding, and `step` is
    exactly causal.

    Args:
        features: size of u_t and y_t.
        max_length: the longest sequence.
        order: N, the number of long convolutions.
        kernel_size: taps of the short convolution.
        dropout_rate: dropout of the output in training. The Annotated Hyena declares it but never
            applies it.
        embed_features: size of the filter's embedding of a position, odd.
        mlp_features: width of the filter's network.
        num_filter_layers: linear layers of the filter's network, at least 2.
        omega: frequency of the sines in the filter's network.
        implicit: True: a network computes the filters, as in the paper. False: the filters are
            parameters, as in the code of The Annotated Hyena.
        **options: as in `LayerOptions`. W, W_out and the short convolution are initialized as in
            torch, b and b_out to zero. The initializers do not apply to the filters.

    Raises:
        ValueError: a size is not one that the filter accepts, or (at the call) x is longer than
            max_length.
        NotImplementedError: (at the call) `reset`; give each document a batch row of its own.

    Layouts: `annotated-hyena` (torch_ref.AuthenticHyenaBlock).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
        embed_features: int = 33,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 12.0,
        implicit: bool = True,
        **options: Unpack[LayerOptions],
    ):
        make_filter = partial(
            AuthenticHyenaFilter,
            features,
            max_length,
            order=order,
            embed_features=embed_features,
            mlp_features=mlp_features,
            num_filter_layers=num_filter_layers,
            omega=omega,
            implicit=implicit,
            **filter_options(options),
        )
        super().__init__(
            features,
            max_length,
            make_filter,
            order=order,
            num_filters=order,
            kernel_size=kernel_size,
            dropout_rate=dropout_rate,
            **options,
        )

    def operator(self, u, gates, v, convolve):
        """`v ← x ⊙ (h ∗ v)` for each gate x, then the output projection."""
        for n, x in enumerate(gates):
            v = x * convolve(n, v)
        return self.output(v)


def normalized(x: Float[Array, "batch features time"]) -> Float[Array, "batch features time"]:
    """`x / max(‖x‖₂, 1e-12)` over the features, where the gradient of the norm is 0 at x = 0."""
    square = jnp.sum(jnp.square(x.astype(carry_dtype(x.dtype))), axis=1, keepdims=True)
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    return (x.astype(norm.dtype) / jnp.maximum(norm, 1e-12)).astype(x.dtype)
