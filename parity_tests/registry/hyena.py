"""The Hyena blocks of The Annotated Hyena."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jax_models import AuthenticHyenaBlock, HyenaBlock
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    PAST_AND_FUTURE,
    ROWS,
    STEPS,
    TRAJECTORY,
    Mutation,
    edited,
    replaced,
    zeroed,
)

MAX_LENGTH = 32
"""Longer than a block of the online convolution, so that a state includes a tile."""

hyena = partial(
    paired,
    layout="annotated-hyena",
    architecture="hyena",
    twin_state=False,
    prefix=20,
    mixes_steps=True,
)
network = {"embed_features": 5, "mlp_features": 6, "num_filter_layers": 3}

CASES = [
    *(
        hyena(
            f"HyenaBlock, order {order}, kernel {size}",
            partial(HyenaBlock, 5, MAX_LENGTH, order=order, kernel_size=size),
        )
        for order, size in ((1, 4), (3, 3))
    ),
    *(
        hyena(
            f"AuthenticHyenaBlock, {name}, order 2",
            partial(AuthenticHyenaBlock, 5, MAX_LENGTH, implicit=implicit, **network),
        )
        for name, implicit in (("explicit", False), ("implicit", True))
    ),
]


def over_the_features(convolve):
    """Convolves along the features, so that no step sees another one."""
    return lambda method, v, h: jnp.swapaxes(
        convolve(method, jnp.swapaxes(v, 1, 2), jnp.swapaxes(h, 0, 1)), 1, 2
    )


def around_a_circle(_):
    """Does not pad the FFT, so that the convolution is circular: the end reaches the beginning."""
    return lambda method, v, h: jnp.fft.irfft(jnp.fft.rfft(v) * jnp.fft.rfft(h)[None], v.shape[-1])


def over_the_rows(convolve):
    """Adds a little of another row to each row."""
    return lambda method, v, h: convolve(method, v + 1e-6 * jnp.roll(v, 1, axis=0), h)


def silenced(function):
    """Multiplies the results of a function by zero."""
    return lambda *args: 0 * function(*args)


def train_times(layer):
    """Trains the times of a filter, which torch does not train."""
    layer.filter.t = nnx.Param(layer.filter.t[...])


explicit, plain = "AuthenticHyenaBlock, explicit, order 2", "HyenaBlock, order 1, kernel 4"
convolutions = [f"jax_models.ops.{module}.convolve" for module in ("conv", "conv.online_conv")]

MUTATIONS = [
    Mutation(
        "filter's first bias forgotten",
        "AuthenticHyenaBlock, implicit, order 2",
        "weights",
        zeroed("filter.biases.0"),
        culprit="filter.mlp.0",
    ),
    Mutation(
        "gates not normalised",
        plain,
        "forward",
        replaced("jax_models.layers.hyena.normalized", lambda _: lambda x: x),
    ),
    *(
        Mutation(f"convolution {name}", explicit, "forward", replaced(convolutions, wrong), check)
        for name, wrong, check in (
            ("over the features", over_the_features, PAST_AND_FUTURE),
            ("around a circle", around_a_circle, PAST_AND_FUTURE),
            ("around a circle", around_a_circle, STEPS),
            ("over the rows, too", over_the_rows, ROWS),
        )
    ),
    *(
        Mutation(
            f"online convolution without its {name}",
            plain,
            "states and masks",
            replaced(f"jax_models.ops.conv.online_conv.{function}", silenced),
            STEPS,
        )
        for name, function in (("tiles", "_tile"), ("steps ahead", "_ahead"))
    ),
    Mutation("a constant trained", plain, "training", edited(train_times), TRAJECTORY),
]

COMPARED = {"HyenaBlock": partial(HyenaBlock, max_length=4096)}
