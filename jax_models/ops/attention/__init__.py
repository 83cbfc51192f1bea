"""Attention with a mask, or to earlier steps."""

from collections.abc import Callable
from typing import Annotated

import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from jax_models.checks.arguments import checked
from jax_models.checks.values import checked_size
from jax_models.ops.attention import definition, tiles
from jax_models.ops.attention.definition import (
    CausalAttention,
    LocalAttentionState,
    keys_and_mask,
    masked_attention,
)
from jax_models.ops.forms import NATIVE, Form, Operator
from jax_models.ops.shard_map_axes import match_varying_axes

ATTENTION = Operator(
    "attention",
    (
        Form("small_tiles", tiles.run_small, ("cpu",), pays=tiles.small_tiles_pay),
        Form("large_tiles", tiles.run_large),
        Form("definition", definition.run),
    ),
    (NATIVE,),
)

AttentionMethod = Annotated[str, "auto or the name of a form"]
"""What runs causal attention."""


@checked()
def attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch keys kv_heads head_features"],
    v: Float[Array, "batch keys kv_heads value_features"],
    mask: Bool[Array, "batch time keys"] | None = None,
    *,
    window: Annotated[int, checked_size] | None = None,
    dropout: Callable[[Array], Array] | None = None,
    method: AttentionMethod = "auto",
) -> Float[Array, "batch time heads value_features"]:
    """Computes `softmax(q kᵀ / √head_features) v` of each head, over the keys in a step's mask.

        >>> q, k, v = jnp.ones((3, 8, 100, 4, 16))
        >>> y = attention(q, k, v)

    Without a mask, attention is causal: step t sees the steps up to t or, with a `window`, the last
    `window` steps up to t. It is computed tile by tile, also backward, so that memory is linear in
    the number of steps. `method` names the form that runs: "native" (the package twinscan-native:
    CPUs, no cache), "small_tiles" (for CPUs), "large_tiles" (for accelerators) or "definition",
    which computes all scores at once and is the only form with a mask or dropout. "auto" chooses
    the one that is likely to be the fastest.

    Each head of k and v is shared by `heads / kv_heads` neighboring heads of q. The heads of v may
    have another size than those of q and k.

    The softmax is in at least float32, and `dropout` is applied to its weights. If the query of a
    step, or any key or value in its mask, is not finite in a head, the output of this head is NaN.
    Other heads and steps are unaffected. If the mask of a step contains no key, the output is zero.

    Raises:
        NotImplementedError: the form that `method` names does not support the call, such as any
            form but the definition with a mask or dropout.
        ValueError: the heads or the shapes do not fit each other, both a mask and a window are
            given, there is no such method, or without a mask, k has another number of steps than q.

    """
    if mask is None:
        if k.shape[1] != q.shape[1]:
            raise ValueError(
                f"k: expected the {q.shape[1]} steps of q, because there is no mask, "
                f"got {k.shape[1]}"
            )
        step = jnp.arange(q.shape[1], dtype=jnp.int32)
        first = jnp.zeros_like(step) if window is None else jnp.maximum(step - window + 1, 0)
        first = jnp.broadcast_to(first, q.shape[:2])
        past = LocalAttentionState(jnp.zeros_like(first, shape=q.shape[:1]), k[:, :0], v[:, :0])
        call = CausalAttention(q, k, v, first, past, window or q.shape[1])
        return causal_attention(call, method, dropout)
    if window is not None:
        raise ValueError(f"window: expected None with a mask, got {window}")
    check_heads(q, k)
    _refuse_tiles(method)
    return masked_attention(q, k, v, mask, dropout)


def causal_attention(
    call: CausalAttention, method: str, dropout: Callable[[Array], Array] | None = None
) -> Float[Array, "batch time heads value_features"]:
    """Runs the form that `method` names. With dropout, there is only the definition."""
    check_heads(call.q, call.k)
    if not is_symbolic_dim(call.q.shape[1]) and call.q.shape[1] == 0:
        return jnp.zeros_like(call.q, shape=(*call.q.shape[:3], call.v.shape[3]))
    if dropout is None:
        return ATTENTION(match_varying_axes(call), method)
    _refuse_tiles(method)
    return masked_attention(call.q, *keys_and_mask(call), dropout)


def check_heads(q: Array, k: Array) -> None:
    """Raises a ValueError if the heads of q cannot be divided equally among those of k."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k: expected a number of heads that divides the {q.shape[2]} of q, got {k.shape[2]}"
        )


def _refuse_tiles(method: str) -> None:
    if ATTENTION.checked_method(method) not in ("auto", "definition"):
        raise NotImplementedError(
            f"method={method!r}: it does not support a mask or dropout; use method='definition'"
        )
