"""StripedHyena's Hyena operator and block."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_models import StripedHyenaBlock, StripedHyenaMixer
from parity_tests.engine.problem import in_every_dtype
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    CUT,
    STEPS,
    Mutation,
    edited,
    epsilon_doubled,
    mask_ignored,
    replaced,
    zeroed,
)


def inside_the_circle(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random real and imaginary parts of poles below 0.85 in magnitude, exact in bfloat16."""
    return in_every_dtype(rng.uniform(0.2, 0.6, shape))


striped_hyena = partial(
    paired,
    layout="stripedhyena",
    architecture="striped_hyena",
    bounded=lambda twin: [twin.get_parameter("filter.poles").data],
    draw_bounded=inside_the_circle,
)
sizes = {"num_heads": 2, "state_size": 3}
CASES = [
    striped_hyena("StripedHyenaMixer", partial(StripedHyenaMixer, 6, **sizes)),
    striped_hyena(
        "StripedHyenaMixer, thirds, 4 taps",
        partial(StripedHyenaMixer, 5, state_size=1, kernel_size=4),
    ),
    striped_hyena("StripedHyenaBlock", partial(StripedHyenaBlock, 6, 7, **sizes)),
    striped_hyena(
        "StripedHyenaBlock, gelu",
        partial(StripedHyenaBlock, 6, 7, activation="gelu", epsilon=1e-3, **sizes),
    ),
]


def real_parts_only(modal_conv):
    """Computes Re R ⊙ Re s instead of Re(R ⊙ s), as stripedhyena's `prefill_style="recurrence"`."""

    def wrong(v, state, *, residues, **options):
        return modal_conv(v, state, residues=residues.at[..., 1].set(0), **options)

    return wrong


def in_thirds(layer):
    """Splits the projection into x_2, x_1 and v of all heads, instead of head by head."""
    layer.num_heads = 1


def epsilon_inside(_):
    """A norm that adds ε to the mean square under the root, instead of outside of the root."""

    def wrong(norm, x):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.epsilon)
        return y * jnp.broadcast_to(norm.scale[...], y.shape)

    return wrong


def state_without_the_rest(modal_conv):
    """Returns the state unchanged."""

    def wrong(v, state, **options):
        return modal_conv(v, state, **options)[0], state

    return wrong


def conjugate(modal_conv):
    """Conjugates the poles, so that they rotate in the opposite direction."""

    def wrong(v, state, *, poles, **options):
        return modal_conv(v, state, poles=poles.at[..., 1].multiply(-1), **options)

    return wrong


OPERATOR = "jax_models.ops.modal_conv"
of_mixer = partial(Mutation, case="StripedHyenaMixer")
of_block = partial(Mutation, case="StripedHyenaBlock")

MUTATIONS = [
    of_mixer("D forgotten", kind="weights", plant=zeroed("D"), culprit="filter"),
    of_mixer("projection in thirds", kind="forward", plant=edited(in_thirds), culprit="filter"),
    of_mixer(
        "residues' real parts alone", kind="forward", plant=replaced(OPERATOR, real_parts_only)
    ),
    of_mixer("poles conjugate", kind="forward", plant=replaced(OPERATOR, conjugate)),
    of_block(
        "epsilon inside of the root",
        kind="forward",
        plant=replaced("jax_models.layers.striped_hyena.StripedHyenaNorm.__call__", epsilon_inside),
        culprit="pre_norm",
    ),
    of_block(
        "epsilon doubled", kind="forward", plant=epsilon_doubled("post_norm"), culprit="post_norm"
    ),
    *(
        of_mixer(
            f"state stands still, {check}",
            kind="states and masks",
            plant=replaced(OPERATOR, state_without_the_rest),
            check=check,
        )
        for check in (STEPS, CUT)
    ),
    *mask_ignored("StripedHyenaBlock", OPERATOR),
]

COMPARED = {"StripedHyenaMixer": StripedHyenaMixer}
