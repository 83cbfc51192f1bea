"""Causal attention whose keys and values are computed from latents, which its state holds."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jax_models.ops.attention.local_attention import cached_attention
from jax_models.ops.rows import Rows


class LatentAttentionState(NamedTuple):
    """The state of attention over latents: those of all steps of the document so far.

    The latents of position p of the document are in slot p.
    """

    position: Int[Array, " batch"]
    """Number of steps of the document so far."""
    latents: Float[Array, "batch slots latent_features"]


def latent_attention(
    q: Float[Array, "batch time heads head_features"],
    latents: Float[Array, "batch time latent_features"],
    state: LatentAttentionState,
    keys_and_values: Callable[[Array], tuple[Array, Array]],
    *,
    empty: bool,
    holds_whole_document: bool,
    rows: Rows,
) -> tuple[Float[Array, "batch time heads value_features"], LatentAttentionState]:
    """Like `local_attention`, with a state of latents.

    `keys_and_values` computes keys and values, (batch, steps, kv_heads, …), from the latents of
    past or new steps, (batch, steps, latent_features).
    """
    with_head = LatentAttentionState(state.position, state.latents[:, :, None])
    y, last = cached_attention(
        q,
        (latents[:, :, None],),
        with_head,
        lambda latents: keys_and_values(latents[:, :, 0]),
        None,
        "auto",
        rows,
        empty=empty,
        holds_whole_document=holds_whole_document,
    )
    return y, last._replace(latents=last.latents[:, :, 0])
