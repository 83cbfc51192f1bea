"""Compares silero-VAD with the TorchScript of its package, with the published weights."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

import torch_ref
from jax_models import SileroVAD, from_torch, to_torch
from parity_tests.checked_layer import assert_same_tree
from parity_tests.engine.bounds.tolerance import assert_same, group_error
from parity_tests.engine.problem import Problem
from parity_tests.engine.references.torch_reference import TorchReference

PACKAGE = find_spec("silero_vad")  # not imported, because that reduces torch's threads
if PACKAGE is None:
    pytest.skip("silero-vad is not installed", allow_module_level=True)
DATA = Path(PACKAGE.origin).parent / "data"
OLDER = load_file(DATA / "silero_vad_16k.safetensors")
SHIPPED = torch.jit.load(str(DATA / "silero_vad.jit")).eval()
RATES = {16000: SHIPPED._model, 8000: SHIPPED._model_8k}
WEIGHTS = {
    "TorchScript, 16 kHz": (16000, SHIPPED._model.state_dict()),
    "TorchScript, 8 kHz": (8000, SHIPPED._model_8k.state_dict()),
    "safetensors, 16 kHz": (16000, OLDER),
}
REFUSED = [
    ("16000, 8000", lambda m: SileroVAD(44100, rngs=nnx.Rngs(0))),
    ("audio:", lambda m: m(jnp.ones((1, 2, 512)))),
    ("divide 16-bit samples", lambda m: m(np.ones((1, 512), np.int16))),
    ("chunk:", lambda m: m.step(jnp.ones((1, 256)), m.init_state(1))),
    ("state:", lambda m: m(jnp.ones((1, 512)), jnp.ones((2, 1, 128)))),
    ("state.context:", lambda m: m(jnp.ones((1, 512)), m.init_state(2))),
    ("lengths:", lambda m: m(jnp.ones((1, 512)), lengths=np.array([0.03]))),
    ("lengths:", lambda m: m(jnp.ones((1, 512)), lengths=[513])),
    ("reset:", lambda m: m(jnp.ones((1, 512)), reset=np.zeros((1, 512), bool))),
    ("stft.forward_basis_buffer:", lambda m: from_torch(m, SHIPPED._model_8k.state_dict())),
]


def model_of(weights, sample_rate=16000, dtype=jnp.float32) -> SileroVAD:
    model = nnx.eval_shape(lambda: SileroVAD(sample_rate, param_dtype=dtype, rngs=nnx.Rngs(0)))
    return from_torch(model, weights)


def recordings(sample_rate: int, frames: int = 24, dtype=np.float32) -> np.ndarray:
    """Recordings of voiced syllables after silence, of noise, and of both."""
    rng = np.random.default_rng(0)
    samples = frames * sample_rate * 32 // 1000
    t = np.arange(samples) / sample_rate
    pitch = np.cumsum(120 + 25 * np.sin(2 * np.pi * 2.5 * t)) / sample_rate
    voice = sum(np.sin(2 * np.pi * k * pitch) / k for k in range(1, 25))
    voice *= 0.1 * np.maximum(np.sin(2 * np.pi * 4 * t), 0) * (t > 0.2)
    noise = 0.05 * rng.standard_normal(samples)
    return np.stack([voice, noise, voice + noise]).astype(dtype)


def by_torchscript(weights: Mapping[str, Any], sample_rate: int, audio: np.ndarray):
    """The results of the published TorchScript with these weights, chunk by chunk."""
    module = RATES[sample_rate]
    own = {key: value.clone() for key, value in module.state_dict().items()}
    model = model_of(weights, sample_rate)
    chunks = torch.from_numpy(audio).split(model.frame_length, dim=1)
    try:
        module.load_state_dict({k: torch.from_numpy(v) for k, v in to_torch(model).items()})
        SHIPPED.reset_states()
        with torch.no_grad():
            y = torch.cat([SHIPPED(chunk, sample_rate) for chunk in chunks], dim=1)
        return y.numpy(), (SHIPPED._context.numpy(), *SHIPPED._state.clone().numpy())
    finally:
        module.load_state_dict(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_probabilities_and_states_err_as_those_of_torchscript(name, x64):
    sample_rate, weights = WEIGHTS[name]
    audio = recordings(sample_rate)
    model = model_of(weights, sample_rate)
    twin = torch_ref.SileroVAD(sample_rate).requires_grad_(False)
    twin.load_state_dict({k: torch.from_numpy(v) for k, v in to_torch(model, "silero").items()})
    problem = Problem(twin.double(), lambda *_: model, SileroVAD.__call__, None, inputs=(audio,))
    reference = TorchReference(problem.twin).run(problem)
    oracle = reference.oracle
    assert oracle["outputs"]["y"].min() < 0.01 < 0.4 < oracle["outputs"]["y"].max()

    results = model(audio), by_torchscript(weights, sample_rate, audio)
    for group, *of_both in zip(("outputs", "final state"), *results, strict=True):
        expected = oracle[group]
        ours, original = (
            dict(zip(expected, map(np.asarray, jax.tree.leaves(tree)), strict=True))
            for tree in of_both
        )
        error = group_error(
            jnp.dtype("float32"),
            oracle=expected,
            torch=original,
            jax=ours,
            torch32=original,
            rounded=[reference.runs.scatter("float32")[group]],
        )
        assert error.passed, f"{group}: {error}"


@pytest.mark.parametrize("name", WEIGHTS)
def test_published_weights_make_the_round_trip_bit_for_bit(name):
    sample_rate, weights = WEIGHTS[name]
    layout = "silero" if name.startswith("safetensors") else "torchscript"
    back = to_torch(model_of(weights, sample_rate), layout)
    assert back.keys() == weights.keys()
    for key, tensor in weights.items():
        assert back[key].tobytes() == np.asarray(tensor).tobytes(), key


@pytest.fixture(params=RATES)
def vad(request, x64) -> SileroVAD:
    """The published model in float64."""
    weights = {key: value.double() for key, value in RATES[request.param].state_dict().items()}
    return model_of(weights, request.param, jnp.float64)


@pytest.mark.slow
def test_rows_of_several_lengths_are_each_alone(vad):
    """Lengths are in samples. The last frame of a row is padded with zeros."""
    audio = recordings(vad.sample_rate, 9, float)
    samples = audio.shape[1]
    lengths = np.array([samples - 1, samples // 2 + 7, 0])
    call = jax.jit(vad.__call__)
    y, state = call(np.where(np.arange(samples) < np.c_[lengths], audio, np.nan), lengths=lengths)
    for row, length in enumerate(lengths):
        count = -(-length // vad.frame_length)
        alone = call(audio[row, :length])
        found = y[row, :count], jax.tree.map(lambda s: s[row], state)  # noqa: B023
        assert_same_tree(found, alone, f"row {row}")
        assert alone[0].shape == (count,)
        assert (y[row, count:] == 0).all()


@pytest.mark.slow
def test_logits_are_of_the_probabilities(vad):
    audio = recordings(vad.sample_rate, 5, float)
    (logits, _), (y, _) = vad.logits(audio), vad(audio)
    assert_same(jax.nn.sigmoid(logits), y, "probabilities")
    lengths = [0, 3, audio.shape[1]]
    assert (vad.logits(audio, lengths=lengths)[0][0] == 0).all()


def test_a_length_outside_under_jit_is_nan(vad):
    audio = recordings(vad.sample_rate, 3, float)
    call = jax.jit(lambda lengths: vad(audio, lengths=lengths))
    y, state = call(np.array([-1, 5, audio.shape[1] + 1]))
    for leaf in (y, *state):
        np.testing.assert_array_equal(jnp.isnan(leaf).all(axis=1), [True, False, True])
        assert not jnp.isnan(leaf[1]).any()


@pytest.mark.slow
def test_digital_silence_has_a_gradient(vad):
    """The square root of the original has the gradient NaN there."""
    gradient = jax.jit(jax.grad(lambda audio: vad(audio)[0].sum()))
    assert (gradient(jnp.zeros((1, 2 * vad.frame_length))) == 0).all()


def test_a_new_model_has_the_stft_of_the_shipped_one():
    for sample_rate, module in RATES.items():
        basis = to_torch(SileroVAD(sample_rate, rngs=nnx.Rngs(0)))["stft.forward_basis_buffer"]
        np.testing.assert_allclose(basis, module.stft.forward_basis_buffer, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_the_stft_is_not_trained_and_dropout_is_off_in_eval():
    model = SileroVAD(dropout_rate=0.5, rngs=nnx.Rngs(0))
    assert "stft" not in nnx.state(model, nnx.Param)
    audio = recordings(16000, 3)
    assert (model(audio)[0] != model(audio)[0]).any()
    model.eval()
    assert (model(audio)[0] == model(audio)[0]).all()


@pytest.mark.parametrize(("argument", "call"), REFUSED)
def test_refuses(argument, call):
    with pytest.raises((TypeError, ValueError), match=argument):
        call(model_of(SHIPPED._model.state_dict()))
