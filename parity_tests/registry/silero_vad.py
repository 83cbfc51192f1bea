"""silero-VAD 6, at both sample rates."""

import math
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

import torch_ref
from jax_models import SileroVAD
from parity_tests.registry.case import Case
from parity_tests.registry.mutation import (
    CUT,
    DOCUMENTS,
    PADDING,
    STEPS,
    Mutation,
    edited,
    gates_swapped,
    ignoring,
    replaced,
    zeroed,
)


class SileroVADFrames(SileroVAD):
    """The model as a sequence layer; each step is a frame of shape (batch, frame_length)."""

    causal = resettable = True

    @property
    def in_features(self) -> int:
        """The number of samples in a frame."""
        return self.frame_length

    def __call__(self, audio: Any, state=None, *, lengths: Any = None, reset=None):
        """Runs on audio (batch, frames, frame_length); the outputs are (batch, frames, 1).

        `lengths` counts frames.
        """
        samples = None if lengths is None else lengths * self.frame_length
        audio = audio.reshape(audio.shape[0], math.prod(audio.shape[1:]))
        y, state = super().__call__(audio, state, lengths=samples, reset=reset)
        return y[..., None], state


def call(twin, x, state=None):
    """Calls the twin with frames, as `SileroVADFrames` is called."""
    y, last = twin(x.flatten(1), state)
    return y[..., None], last


def case(sample_rate: Literal[16000, 8000]) -> Case:
    """The case of the model for a sample rate in Hz."""
    return Case(
        f"SileroVAD, {sample_rate // 1000} kHz",
        partial(torch_ref.SileroVAD, sample_rate),
        partial(SileroVADFrames, sample_rate),
        layout="silero",
        architecture="silero_vad",
        call=call,
    )


CASES = [case(16000), case(8000)]


def taps_reversed(layer):
    """Reverses the taps of a convolution, which is a cross-correlation in torch."""
    kernel = layer.convolutions[0].kernel
    taps = kernel[...].reshape(3, -1, kernel.shape[-1])
    kernel[...] = taps[::-1].reshape(kernel.shape)


def from_silence(contexts):
    """Replaces the previous samples, which the state holds, by zeros."""
    return lambda tails, context, **masks: contexts(tails, jnp.zeros_like(context), **masks)


of_the_first = partial(Mutation, case=CASES[0].name)

MUTATIONS = [
    of_the_first("taps reversed", kind="weights", plant=edited(taps_reversed)),
    of_the_first("gates i and f swapped", kind="weights", plant=gates_swapped("lstm.cells.0", 4)),
    of_the_first("bias forgotten", kind="weights", plant=zeroed("convolutions.3.bias")),
    of_the_first(
        "power for magnitude",
        kind="forward",
        plant=replaced(
            "jax_models.SileroVAD._spectrum", lambda spectrum: lambda *args: spectrum(*args) ** 2
        ),
    ),
    of_the_first(
        "edge repeated, not reflected",
        kind="forward",
        plant=replaced(
            "jax_models.models.silero_vad.jnp.pad",
            lambda pad: (
                lambda x, width, mode="constant": pad(
                    x, width, "edge" if mode == "reflect" else mode
                )
            ),
        ),
    ),
    *(
        of_the_first(
            name,
            kind="states and masks",
            plant=replaced("jax_models.models.silero_vad._contexts", wrong),
            check=check,
        )
        for name, wrong, check in (
            ("context forgotten", from_silence, STEPS),
            ("context forgotten", from_silence, CUT),
            ("lengths forgotten", ignoring("lengths"), PADDING),
            ("resets forgotten", ignoring("reset"), DOCUMENTS),
        )
    ),
]
