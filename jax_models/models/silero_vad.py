"""silero-VAD 6, which finds speech in recordings."""

__all__ = ["SileroVAD", "SileroVADState"]

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models import ops
from jax_models.auto_axes import with_auto_axes
from jax_models.call_arguments import (
    checked_lengths,
    checked_reset,
    checked_state,
    checked_step_reset,
)
from jax_models.checks.values import as_array, checked_array, set_rows_to_nan
from jax_models.layers.dropout import Dropout
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.lstm import LSTM, LSTMState
from jax_models.models.architecture import ModelConfig
from jax_models.ops import Rows, carry_dtype
from jax_models.options import CheckedOptions, NormOptions
from jax_models.weights import Layouts, Table, Weight, flipped, nested, same
from jax_models.weights.constant import Constant
from jax_models.weights.keys import checked_mapping, joined

RATES: dict[int, Literal[16000, 8000]] = {256: 16000, 128: 8000}
"""The sample rate, in Hz, for each size of the STFT's windows."""
HIDDEN = 128
"""The number of features that the convolutions output per frame, and the size of the LSTM."""
TAPS = 3
"""Taps of each convolution."""
CONVOLUTIONS = ((128, 1), (64, 2), (64, 2), (HIDDEN, 1))
"""Output features and stride of each convolution. They reduce a frame's four columns to one."""


class SileroVADState(NamedTuple):
    """The state of silero-VAD: the samples before the next frame, and the LSTM's h and c."""

    context: Float[Array, "batch context"]
    h: Float[Array, "batch hidden"]
    c: Float[Array, "batch hidden"]


@dataclasses.dataclass(frozen=True)
class SileroVADConfig(ModelConfig):
    """The config of a `SileroVAD`."""

    family: ClassVar = "silero-VAD"
    marks: ClassVar = ("stft",)

    sample_rate: Literal[16000, 8000] = 16000
    """Sampling rate of the audio, in Hz."""

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **options: Any) -> Self:
        """Reads a checkpoint's config. The size of the STFT's windows determines the rate."""
        for key, array in checked_mapping("state_dict", state_dict).items():
            window = [0, *getattr(array, "shape", ())][-1]
            if "stft" in str(key) and window in RATES:
                return cls(**{"sample_rate": RATES[window], **options})
        keys = ", ".join(joined(sorted(map(str, state_dict)))) or "no keys"
        windows = " or ".join(map(str, RATES))
        raise ValueError(f"state_dict: expected an stft of {windows} samples, got {keys}")

    def build(self, **options: Any) -> "SileroVAD":
        return SileroVAD(self.sample_rate, **options)


class SileroVAD(CheckedOptions, nnx.Module):
    """silero-VAD 6: computes the probability of speech in each frame (32 ms) of a recording.

        >>> model = SileroVAD(rngs=nnx.Rngs(0))
        >>> probabilities, state = model(jnp.zeros((8, 16000)))
        >>> probability, state = model.step(jnp.zeros((8, 512)), state)

        s = |STFT([context, frame])|         4 columns, of `context` samples of the frame before
        z = conv₄(conv₃(conv₂(conv₁(s))))    relu after each
        h, c = LSTM(z, (h, c))
        p = σ(relu(h) w + b)

    Audio is (batch, samples) with values between −1 and 1, probabilities are (batch, frames), and
    the state is `SileroVADState(context, h, c)`. The last frame is padded with zeros. The
    convolutions run on all frames at once, and the LSTM is a loop over frames. A long recording can
    be split into pieces of whole frames: pass the state after each piece to the next call.

    Args:
        sample_rate: sample rate of the audio. 16000 Hz: frames of 512 samples with a context of 64
            samples. 8000 Hz: frames of 256 samples with a context of 32.
        dropout_rate: rate of the dropout of h in training. The published module has 0.1.
        **options: as in `NormOptions`. The parameters are initialized as in torch. The STFT is a
            `Constant`, a Fourier basis times a Hann window.

    Raises:
        ValueError: there is no model for that sample rate, or a rate is not in [0, 1).

    Layouts: `torchscript` (`torch.jit.load(…)._model` of the package `silero-vad`, `_model_8k` for
    8000 Hz), `silero` (its file `silero_vad_16k.safetensors`). Source: snakers4/silero-vad, MIT.

    """

    def __init__(
        self,
        sample_rate: Literal[16000, 8000] = 16000,
        *,
        dropout_rate: float = 0.0,
        **options: Unpack[NormOptions],
    ):
        window = sample_rate * 16 // 1000
        self.sample_rate = sample_rate
        self.frame_length, self.context_length = 2 * window, window // 4
        self.dtype, self.param_dtype = options.get("dtype"), options.get("param_dtype")

        def linear(in_features: int, out_features: int) -> Linear:
            init = torch_uniform(in_features)
            return Linear(in_features, out_features, kernel_init=init, bias_init=init, **options)

        self.stft = Constant(jnp.asarray(_hann_fourier(window), self.param_dtype))
        features, self.convolutions = window // 2 + 1, nnx.List()
        for out_features, _ in CONVOLUTIONS:
            self.convolutions.append(linear(TAPS * features, out_features))
            features = out_features
        self.lstm = LSTM(HIDDEN, HIDDEN, **options)
        self.dropout = Dropout(dropout_rate, rngs=options["rngs"])
        self.head = linear(HIDDEN, 1)

    def init_state(self, batch_size: int) -> SileroVADState:
        """The state before the first frame: zeros, in at least float32."""
        dtype = carry_dtype(self.dtype or self.param_dtype)
        sizes = (self.context_length, HIDDEN, HIDDEN)
        return SileroVADState(*(jnp.zeros((batch_size, size), dtype) for size in sizes))

    @with_auto_axes
    def __call__(
        self,
        audio: Float[ArrayLike, "batch samples"],
        state: SileroVADState | None = None,
        *,
        lengths: Int[ArrayLike, " batch"] | None = None,
        reset: Bool[ArrayLike, "batch frames"] | None = None,
    ) -> tuple[Float[Array, "batch frames"], SileroVADState]:
        """Computes the probability of speech in each frame of whole recordings.

        Args:
            audio: (batch, samples), or one unbatched recording (samples,).
            state: the state before the first frame. None: zeros.
            lengths: the number of samples of each row before its padding, 0 … samples. The
                probabilities of frames in the padding are zero, and the returned state is the state
                at the end of each row. Under `jit`, where no error can be raised, a length outside
                that range makes the row's probabilities and state NaN.
            reset: true at the first frame of each recording if several are packed into a row, each
                as whole frames. The state is set to zero before such a frame.

        Raises:
            TypeError: the audio is not floating, lengths are not integers, reset is not bool, or
                the structure of the state differs from that of `init_state`.
            ValueError: a rank or size is wrong, or a length lies outside 0 … samples.

        """
        return self._run(jax.nn.sigmoid, audio, state, lengths, reset)

    @with_auto_axes
    def logits(
        self,
        audio: Float[ArrayLike, "batch samples"],
        state: SileroVADState | None = None,
        *,
        lengths: Int[ArrayLike, " batch"] | None = None,
        reset: Bool[ArrayLike, "batch frames"] | None = None,
    ) -> tuple[Float[Array, "batch frames"], SileroVADState]:
        """Computes the logits of the probabilities, for a loss. The arguments are as for a call."""
        return self._run(lambda logits: logits, audio, state, lengths, reset)

    def step(
        self,
        chunk: Float[ArrayLike, "batch samples"],
        state: SileroVADState,
        *,
        reset: Bool[ArrayLike, " batch"] | None = None,
    ) -> tuple[Float[Array, " batch"], SileroVADState]:
        """Runs one frame, given the state before it.

        The frame is (batch, frame_length), or (frame_length,) unbatched. `reset` is (batch,), or a
        single bool if unbatched: true for each row whose frame begins a recording.

        Raises:
            TypeError, ValueError: as for a whole recording, or the chunk is not a whole frame.

        """
        length = self.frame_length
        expected = f"(batch, {length}) or ({length},) unbatched, at {self.sample_rate} Hz"
        chunk = _checked_audio("chunk", chunk, expected)
        if chunk.shape[-1] != length:
            raise ValueError(f"chunk: expected shape {expected}, got {chunk.shape}")
        reset = checked_step_reset(reset, chunk.shape[:-1], -1)
        probabilities, state = self(chunk, state, reset=reset)
        return probabilities[..., 0], state

    def _run(self, activation: Callable[[Array], Array], audio, state, lengths, reset):
        # Check all arguments, and convert them to a batch.
        audio = _checked_audio("audio", audio, "(batch, samples) or (samples,) unbatched")
        batch_shape, samples = audio.shape[:-1], audio.shape[-1]
        count = -(-samples // self.frame_length)
        lengths, outside = checked_lengths(lengths, batch_shape, samples)
        reset = checked_reset(reset, (*batch_shape, count))
        batch_size = batch_shape[0] if batch_shape else 1
        if state is None:
            state = self.init_state(batch_size)
        else:
            state = checked_state(self, state, batch_size, batched=bool(batch_shape))

        # Divide the recording into whole frames, with zeros in the padding.
        audio = Rows.of(samples, lengths).masked(jnp.atleast_2d(audio))
        audio = jnp.pad(audio, ((0, 0), (0, count * self.frame_length - samples)))
        frames = audio.reshape(audio.shape[0], count, self.frame_length)
        ends = None if lengths is None else -(-lengths // self.frame_length)

        y, last = self._frames(frames, state, ends, reset)
        # Set the padding to zero. Under `jit`, a wrong length cannot raise an error, so the row
        # becomes NaN.
        y = Rows.of(count, ends).masked(activation(y))
        if outside is not None:
            y, last = set_rows_to_nan(outside, (y, last), 0)
        return (y, last) if batch_shape else (y[0], jax.tree.map(lambda s: s[0], last))

    def _frames(
        self,
        frames: Float[Array, "batch frames length"],
        state: SileroVADState,
        ends: Int[Array, " batch"] | None,
        reset: Bool[Array, "batch frames"] | None,
    ) -> tuple[Float[Array, "batch frames"], SileroVADState]:
        """Returns the logits of each frame, and each row's state after its first `ends` frames."""
        dtype = self.dtype or jnp.result_type(frames, self.param_dtype)
        carried = carry_dtype(dtype)
        state = jax.tree.map(lambda s: s.astype(carried), state)

        tails = frames[:, :, -self.context_length :].astype(carried)
        before, context = _contexts(tails, state.context, lengths=ends, reset=reset)
        x = self._spectrum(jnp.concatenate([before.astype(dtype), frames.astype(dtype)], axis=-1))
        for convolution, (_, stride) in zip(self.convolutions, CONVOLUTIONS, strict=True):
            x = jax.nn.relu(convolution(_conv_windows(x.astype(dtype), stride)))
        lstm_state = LSTMState(state.h[None], state.c[None])
        h, lstm_state = self.lstm(x[:, :, 0], lstm_state, lengths=ends, reset=reset)
        y = self.head(jax.nn.relu(self.dropout(h)))[..., 0]
        return y, SileroVADState(context, lstm_state.h[0], lstm_state.c[0])

    def _spectrum(
        self, x: Float[Array, "batch frames samples"]
    ) -> Float[Array, "batch frames 4 bins"]:
        """The magnitudes of the STFT, computed separately for each frame and its context."""
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, self.context_length)), mode="reflect")
        hops = padded.reshape(*x.shape[:2], 5, len(self.stft) // 2)
        windows = jnp.concatenate([hops[:, :, :-1], hops[:, :, 1:]], axis=-1)
        real, imaginary = jnp.split(ops.affine(windows, self.stft[...].astype(x.dtype)), 2, axis=-1)
        power = real * real + imaginary * imaginary
        is_silent = power == 0  # √ has no derivative there
        return jnp.where(is_silent, 0, jnp.sqrt(jnp.where(is_silent, 1, power)))

    def torch_layouts(self) -> Layouts:
        """`torchscript`: the keys of the published module; `silero`: of the safetensors file."""
        numbers = range(len(CONVOLUTIONS))
        shipped = [f"encoder.{i}.reparam_conv" for i in numbers]
        in_file = [f"conv{i + 1}" for i in numbers]
        return {
            "torchscript": self._table(
                "stft.forward_basis_buffer", shipped, "decoder.rnn", "decoder.decoder.2"
            ),
            "silero": self._table("stft_conv.weight", in_file, "lstm_cell", "final_conv"),
        }

    def _table(self, stft: str, convolutions: list[str], lstm: str, head: str) -> Table:
        return [
            _kernel("stft", stft, taps=len(self.stft)),
            *(
                row
                for i, key in enumerate(convolutions)
                for row in _convolution(f"convolutions.{i}", key, TAPS)
            ),
            *nested(self.lstm.torch_layouts()["torch.nn.cell"], "lstm", lstm),
            *_convolution("head", head, taps=1),
        ]


def _checked_audio(name: str, audio: Any, expected: str) -> Array:
    """Returns a recording or a batch as a floating array, or raises an error."""
    audio = as_array(name, audio)
    if jnp.issubdtype(audio.dtype, jnp.integer):
        raise TypeError(
            f"{name}: expected floating numbers between −1 and 1, got {audio.dtype}: divide 16-bit "
            "samples by 32768"
        )
    audio = checked_array(name, audio, Float)
    if audio.ndim not in (1, 2):
        raise ValueError(f"{name}: expected shape {expected}, got {audio.shape}")
    return audio


def _contexts(
    tails: Float[Array, "batch frames context"],
    context: Float[Array, "batch context"],
    *,
    lengths: Int[Array, " batch"] | None,
    reset: Bool[Array, "batch frames"] | None,
) -> tuple[Float[Array, "batch frames context"], Float[Array, "batch context"]]:
    """Returns the context before each frame, and the context at the end of each row."""
    contexts = jnp.concatenate([context[:, None], tails], axis=1)
    before, last = contexts[:, :-1], contexts[:, -1]
    if lengths is not None:
        last = jnp.take_along_axis(contexts, lengths[:, None, None], axis=1)[:, 0]
    if reset is not None:
        before = jnp.where(reset[..., None], 0, before)
    return before, last


def _conv_windows(
    x: Float[Array, "batch frames columns in"], stride: int
) -> Float[Array, "batch frames kept 3*in"]:
    """The input windows of a convolution: each column that it outputs, between its neighbors."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    columns = x.shape[2]
    shifted = [padded[:, :, tap : tap + columns : stride] for tap in range(TAPS)]
    return jnp.concatenate(shifted, axis=-1)


def _hann_fourier(window: int) -> np.ndarray:
    """A Fourier basis times a Hann window, (window, 2 · bins): real, then imaginary parts."""
    real_fourier = np.fft.rfft(np.eye(window))
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    return hann[:, None] * np.concatenate([real_fourier.real, real_fourier.imag], axis=1)


def _convolution(param: str, key: str, taps: int) -> Table:
    """The table of a `Linear` over `taps` concatenated neighbors, which is a Conv1d in torch."""
    return [_kernel(f"{param}.kernel", f"{key}.weight", taps), same(f"{param}.bias", f"{key}.bias")]


def _kernel(param: str, key: str, taps: int) -> Weight:
    """The row of a kernel that is (taps · in, out) here and (out, in, taps) in torch."""
    row = flipped(param, key)
    return row._replace(
        to_jax=lambda a: (row.to_jax(a)[0].reshape(-1, a.shape[0]),),
        to_torch=lambda a: row.to_torch(a.reshape(taps, -1, a.shape[1])),
    )
