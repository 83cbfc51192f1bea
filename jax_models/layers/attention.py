"""Causal attention with a cache of keys and values."""

__all__ = ["Attention"]

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive, check_divides, checked_size
from jax_models.layers.linear import Adapter, Linear, adapted, normal_of_fan_in
from jax_models.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jax_models.mesh_axes import MeshAxes, first_axis, last_axis, whole
from jax_models.ops import LocalAttentionState, Rows
from jax_models.options import (
    Index,
    Initializer,
    LayerOptions,
    norm_options,
    refuse_unused,
    with_inits,
)
from jax_models.sequence import SequenceLayer, State, check_time
from jax_models.weights import SharedLayer, Table, linear, rms_norm

Norm = Literal["head", "all"]
"""Whether the queries and keys of each head are normed, or those of all heads together."""


class CachedAttention(SequenceLayer[State]):
    """The base class of layers with causal attention, whose state is a cache of earlier steps.

    A subclass sets the attributes below, and calls `attend` with queries, keys and values. One that
    caches other arrays than keys and values overrides `cache`, and calls `with_cache`.
    """

    num_kv_heads: int
    head_features: int
    window: int | None = None
    """The number of steps that each step sees, including itself. None: all steps up to itself."""
    max_length: int | None = None
    """Without a window: the length of the longest document that the state can continue."""

    def set_view(self, time_axis: str | None = None, max_length: int | None = None) -> None:
        """Sets these options in a view: `nnx.view` calls this method.

        Args:
            time_axis: as in `SequenceLayer.set_view`.
            max_length: the number of slots of the state of full attention, as in `Attention`. A
                layer with a window has the state that its window needs.

        """
        super().set_view(time_axis)
        if max_length is not None and self.window is None:
            self.max_length = checked_size("max_length", max_length)

    def init_state(self, batch_size: int) -> State:
        """An empty cache, in at least float32.

        Full attention without a `max_length` has no slots, and cannot continue from a state.
        """
        return self.cache(batch_size, self.max_length or 0)

    def start(self, batch_size: int) -> None:
        """Returns None, because at the beginning there is nothing to attend to except x."""
        return None

    def attend(
        self,
        q: Float[Array, "batch time heads head_features"],
        k: Float[Array, "batch time kv_heads head_features"],
        v: Float[Array, "batch time kv_heads head_features"],
        state: State | None,
        rows: Rows,
        dropout: Callable[[Array], Array] | None = None,
    ) -> tuple[Float[Array, "batch time heads head_features"], State]:
        """Attends to the keys of the state and of the sequence, and returns the state after it."""
        run = partial(ops.local_attention, q, k, v, dropout=dropout)
        return self.with_cache(run, q.shape[0], q.shape[1], state, rows)

    def with_cache(
        self,
        run: Callable[..., tuple[Float[Array, "batch time heads value_features"], Any]],
        batch_size: int,
        time: int,
        state: State | None,
        rows: Rows,
    ) -> tuple[Float[Array, "batch time heads value_features"], State]:
        """Runs attention from the state or, if it is None, from an empty cache.

        `run` takes a cache and the options `empty`, `holds_whole_document` and `rows` of
        `ops.local_attention`.
        """
        # Find out how many keys the state holds. Without a window or a max_length, it has no slots,
        # so it cannot continue a document.
        limit = self.max_length if self.window is None else None
        unlimited = self.window is None and limit is None
        if unlimited and state is not None:
            raise ValueError(
                "max_length: expected the length of the longest document, because the state has a "
                "slot for each of its keys, got None: build the layer with max_length=…, or use "
                "nnx.view(layer, max_length=…) and its init_state"
            )
        # Without a state, start from an empty cache, large enough for all steps of this call if
        # there is no limit.
        steps = time if rows.time_axis is None else time * lax.axis_size(rows.time_axis)
        before: Any = state
        if before is None:
            before = self.cache(batch_size, steps if unlimited else limit or 0)
        y, after = run(
            before, empty=state is None, holds_whole_document=self.window is None, rows=rows
        )
        # The cache of an unlimited call lives only in the call: a state without slots has a fixed
        # shape.
        if unlimited:
            return y, type(after)(after.position, *(a[:, :0] for a in after[1:]))
        if limit is None:
            return y, after
        # There are no slots for keys beyond max_length. If the length of the document is known,
        # refuse one that is too long. Otherwise, mark its outputs with NaN.
        if state is None and rows.reset is None:
            check_time("x", steps, limit)
            return y, after
        positions, _ = rows.positions(before.position, time)
        return jnp.where((positions < limit)[..., None, None], y, jnp.nan), after

    def cache(self, batch_size: int, max_length: int) -> Any:
        """An empty cache of keys and values, with `max_length` slots if there is no window."""
        slots = max_length if self.window is None else self.window - 1
        shape = (batch_size, slots, self.num_kv_heads, self.head_features)
        keys, values = jnp.zeros((2, *shape), self.state_dtype)
        return LocalAttentionState(jnp.zeros(batch_size, jnp.int32), keys, values)


class Attention(SharedLayer, CachedAttention[LocalAttentionState]):
    """Causal attention with grouped queries and rotary positions.

        >>> layer = Attention(64, num_heads=4, num_kv_heads=2, max_length=256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        q, k = rotary(norm(x W_q)), rotary(norm(x W_k)),   v = x W_v
        y = (softmax(q kᵀ / √head_features) v ⊙ σ(gate)) W_out

    The softmax of each head is over the steps up to the current one, or over the last `window`
    steps. x is (batch, time, features), and y is (batch, time, out_features). The state is
    `LocalAttentionState(position, keys, values)`. With a window, it holds the last window − 1
    steps. Otherwise, it has `max_length` slots, and the outputs from step max_length of a document
    on are NaN. A step costs O(window), or without a window O(steps of the document so far).

    Args:
        features: size of x_t, and of y_t unless there are `out_features`.
        num_heads: number of heads of the queries.
        num_kv_heads: number of heads of the keys and values, a divisor of num_heads. Each is shared
            by num_heads / num_kv_heads neighboring heads of the queries. None: num_heads.
        head_features: size of a head. None: features / num_heads.
        window: number of steps that each step sees, including itself. None: all earlier steps.
        max_length: without a window, the length of the longest document that a state can hold.
            The state has memory for all of its steps from the beginning, but a step takes time only
            for those of the document so far, if the state is donated to `jax.jit`. None: the layer
            runs over whole sequences, and cannot continue from a state. `generate` sets it for its
            text, and `nnx.view(model, max_length=…)` for any use of a model.
        out_features: size of y_t. None: features.
        rotary_features: n, the number of features of a head that `ops.rotary` rotates, starting
            with the first. If n is odd, n + 1 features are rotated by the angles p · θ^{−2i/n}, as
            in transformers. None: the whole head. 0: no rotation.
        rotary_pairs: number of pairs of these features that are rotated, starting with the fastest
            (p-RoPE). None: all n / 2.
        rope_theta: θ of `ops.rotary`. None: 10,000.
        qk_norm: the RMSNorm of queries and keys: over the features of each "head", or over "all"
            heads together. None: no norm.
        zero_centered_norm: whether this norm multiplies by 1 + scale instead of the scale.
        epsilon: ε of this norm. None: 1e-6.
        output_gate: whether the result of each head is multiplied by the sigmoid of a gate. q_proj
            then returns the query and the gate of each head side by side.
        head_gate: whether the result of each head is multiplied by the sigmoid of one number, which
            gate_proj computes from x.
        use_bias: whether queries, keys and values have biases.
        out_bias: whether the last projection has a bias.
        scale: the factor of the scores q kᵀ before the softmax. None: 1 / √head_features.
        out_init: initializes the last projection's matrix. None: like the others.
        **options: as in `LayerOptions`. The matrices are drawn from a normal distribution with
            variance 1 / inputs, and the biases are zero.

    Raises:
        ValueError: a size or the scale is not positive, num_heads does not divide the features and
            `head_features` is None, num_kv_heads does not divide num_heads, `rotary_features`
            exceeds a head, `rotary_pairs` exceeds half of them, or an option is given that has no
            effect: `max_length` with a window, `zero_centered_norm` or `epsilon` without a norm,
            `rope_theta` without rotated features, or `bias_init` without biases. At the call: x is
            longer than max_length, or a state is given without a `max_length`.

    Layouts: those that the architectures declare.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_features: int | None = None,
        window: int | None = None,
        max_length: int | None = None,
        out_features: int | None = None,
        rotary_features: Index | None = None,
        rotary_pairs: Index | None = None,
        rope_theta: Positive | None = None,
        qk_norm: Norm | None = None,
        zero_centered_norm: bool = False,
        epsilon: Positive | None = None,
        output_gate: bool = False,
        head_gate: bool = False,
        use_bias: bool = False,
        out_bias: bool = False,
        scale: Positive | None = None,
        out_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        if head_features is None:
            check_divides("num_heads", num_heads, "features", features)
            head_features = features // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        if window is not None and max_length is not None:
            raise ValueError(
                f"max_length: expected None with window={window}, which sets the size of the "
                f"state, got {max_length}"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_features = head_features
        self.window, self.max_length = window, max_length
        self.rotary_features = head_features if rotary_features is None else rotary_features
        if self._rotated > head_features:
            raise ValueError(
                "rotary_features: an odd number n rotates n + 1 features, but a head has only "
                f"{head_features}: expected at most {head_features - head_features % 2}, got "
                f"{self.rotary_features}"
            )
        if rotary_pairs is not None and 2 * rotary_pairs > self._rotated:
            raise ValueError(
                f"rotary_pairs: expected at most {self._rotated // 2}, got {rotary_pairs}"
            )
        self.rotary_pairs = rotary_pairs
        self.rope_theta = 10_000.0 if rope_theta is None else rope_theta
        self.qk_norm, self.output_gate, self.scale = qk_norm, output_gate, scale
        # Refuse options without an effect, because they are mistakes of the caller.
        rotates, norms = self._rotated > 0, qk_norm is not None
        refuse_unused("rope_theta", rope_theta, unless=rotates, because="with rotary_features=0")
        refuse_unused("epsilon", epsilon, unless=norms, because="with qk_norm=None")
        refuse_unused(
            "zero_centered_norm", zero_centered_norm, unless=norms, because="with qk_norm=None"
        )
        refuse_unused(
            "bias_init",
            options.get("bias_init"),
            unless=use_bias or out_bias,
            because="with use_bias=False and out_bias=False",
        )
        # The projections to queries with their gates, to keys and to values, and back to the
        # features.
        matrix = with_inits(options, normal_of_fan_in())
        query_size, key_size = num_heads * head_features, num_kv_heads * head_features
        gate_size = query_size if output_gate else 0
        self.q_proj = Linear(features, query_size + gate_size, use_bias=use_bias, **matrix)
        self.k_proj = Linear(features, key_size, use_bias=use_bias, **matrix)
        self.v_proj = Linear(features, key_size, use_bias=use_bias, **matrix)
        gate = with_inits(options, normal_of_fan_in(), None, use_bias=False)
        self.gate_proj = Linear(features, num_heads, **gate) if head_gate else None
        matrix["kernel_init"] = out_init or matrix["kernel_init"]
        self.out_proj = Linear(query_size, out_features or features, use_bias=out_bias, **matrix)
        if norms:
            norm = ZeroCenteredRMSNorm if zero_centered_norm else RMSNorm
            sizes = (query_size, key_size) if qk_norm == "all" else (head_features, head_features)
            self.q_norm, self.k_norm = (
                norm(size, epsilon=epsilon or 1e-6, **norm_options(options)) for size in sizes
            )

    @property
    def _rotated(self) -> int:
        """The number of rotated features, which is even."""
        return self.rotary_features + self.rotary_features % 2

    def sequence(self, x, state, rows, adapter: Adapter | None = None):
        """Projects to queries, keys and values, attends, and projects back.

        `adapter` is a function of x that returns what is added to the three projections.
        """
        x = x.astype(self.computation_dtype(x))
        batch_size, time, _ = x.shape
        # Count positions from the start of each document, for the rotation.
        start = jnp.zeros(batch_size, jnp.int32) if state is None else state.position
        positions, _ = rows.positions(start, time)

        def heads(x: Array, count: int) -> Array:
            return x.reshape(batch_size, time, count, x.shape[-1] // count)

        # Project to heads. With an output gate, each head of the queries is followed by its gate.
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = adapted([project(x) for project in projections], x, adapter)
        q, k, v = heads(q, self.num_heads), *(heads(y, self.num_kv_heads) for y in (k, v))
        gate = None
        if self.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        # Norm and rotate queries and keys, attend, then gate and project the heads back.
        q, k = (self._placed(part, name, positions) for part, name in ((q, "q"), (k, "k")))
        if self.scale is not None:
            q = q * (self.scale * math.sqrt(self.head_features))  # `attend` divides by the root
        y, state = self.attend(q, k, v, state, rows)
        if gate is not None:
            y = y * jax.nn.sigmoid(gate)
        if self.gate_proj is not None:
            y = y * jax.nn.sigmoid(self.gate_proj(x))[..., None]
        return self.out_proj(y.reshape(batch_size, time, self.out_proj.in_features)), state

    def _placed(self, x: Array, name: str, positions: Array) -> Array:
        """Norms queries or keys, and rotates them by their positions."""
        shape = x.shape
        if self.qk_norm is not None:
            x = x.reshape(*shape[:2], shape[2] * shape[3]) if self.qk_norm == "all" else x
            x = getattr(self, f"{name}_norm")(x).reshape(shape)
        if not self.rotary_features:
            return x
        # θ^{−2i/n}, also where n is one less than the number of rotated features
        theta = self.rope_theta ** (self._rotated / self.rotary_features)
        pairs = {"rotated": self._rotated, "num_pairs": self.rotary_pairs}
        return ops.rotary(x, positions, **pairs, theta=theta)

    @property
    def mesh_axes(self) -> MeshAxes:
        """Divides the heads. Keys and values that several heads share stay whole."""
        key_projections = ("k_proj", "v_proj")
        shared = self.num_kv_heads < self.num_heads
        return (
            last_axis("heads", "q_proj", "gate_proj")
            | (whole(*key_projections) if shared else last_axis("heads", *key_projections))
            | first_axis("heads", "out_proj.kernel")
        )

    def rows(
        self,
        q_proj: str,
        k_proj: str,
        v_proj: str,
        out_proj: str,
        q_norm: str,
        k_norm: str,
        gate_proj: str = "",
    ) -> Table:
        """The rows of a torch module whose parts have these names."""
        keys, bias = {"q_proj": q_proj, "k_proj": k_proj, "v_proj": v_proj}, self.q_proj.use_bias
        rows = [row for name, key in keys.items() for row in linear(name, key, bias=bias)]
        rows += linear("out_proj", out_proj, bias=self.out_proj.use_bias)
        if self.qk_norm is not None:
            rows += rms_norm("q_norm", q_norm) + rms_norm("k_norm", k_norm)
        if self.gate_proj is not None:
            rows += linear("gate_proj", gate_proj, bias=False)
        return rows
