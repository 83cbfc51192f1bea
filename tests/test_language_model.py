"""Language models and generation as a user calls them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import RNNLanguageModel, RNNLanguageModelConfig, generate, generation, stream
from jax_models.generation import Decoder, sample

KEY = jax.random.key(0)


def model(**fields) -> RNNLanguageModel:
    return RNNLanguageModel(RNNLanguageModelConfig(**fields), rngs=nnx.Rngs(0))


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, shape)


@pytest.mark.parametrize("context_length", [8, None])
def test_generation_equals_recomputing_the_whole_text(context_length):
    """Past the context length the model sees the last tokens alone, at the first positions."""
    lm = model(context_length=context_length, cell="gru")
    prompt = tokens(2, 5)
    size = context_length or 17
    forward = jax.jit(lambda window: lm(window)[0])
    text = prompt
    for _ in range(12):
        window = text[:, -size:]
        padded = np.pad(window, ((0, 0), (0, size - window.shape[1])))
        logits = forward(padded)[:, window.shape[1] - 1]
        text = np.concatenate([text, np.asarray(logits.argmax(axis=-1))[:, None]], axis=1)
    greedy = generate(lm, prompt, 12, key=KEY, temperature=0)
    np.testing.assert_array_equal(greedy, text[:, 5:])


def test_a_long_prompt_counts_by_its_end():
    lm = model()
    prompt = tokens(1, 30)
    np.testing.assert_array_equal(
        generate(lm, prompt, 5, key=KEY), generate(lm, prompt[:, -8:], 5, key=KEY)
    )


def test_the_key_decides_the_text():
    lm = model(context_length=None)
    prompt = tokens(1, 3)
    first = generate(lm, prompt, 40, key=KEY)
    np.testing.assert_array_equal(first, generate(lm, prompt, 40, key=KEY))
    assert (first != generate(lm, prompt, 40, key=jax.random.key(1))).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sampling_follows_the_distribution(dtype):
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])).astype(dtype)
    logits = jnp.broadcast_to(logits, (20_000, 4))

    def frequencies(**options):
        drawn = np.asarray(sample(logits, KEY, **options))
        return np.bincount(drawn, minlength=4) / len(drawn)

    np.testing.assert_allclose(frequencies(), [0.5, 0.3, 0.15, 0.05], atol=0.015)
    np.testing.assert_allclose(frequencies(top_k=2), [0.625, 0.375, 0, 0], atol=0.015)
    squared = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(frequencies(temperature=0.5), squared / squared.sum(), atol=0.015)
    np.testing.assert_array_equal(frequencies(temperature=0), [1, 0, 0, 0])


def test_sampling_keeps_the_tail_in_bfloat16():
    """Gumbel noise in bfloat16 would give the last token a thirtieth of its share."""
    logits = jnp.log(jnp.array([0.999, 0.001])).astype(jnp.bfloat16)
    drawn = np.asarray(sample(jnp.broadcast_to(logits, (400_000, 2)), KEY))
    assert 0.0007 < drawn.mean() < 0.0013


def test_tokens_outside_the_vocabulary_are_nan_under_jit():
    lm = model()
    logits, _ = jax.jit(lambda tokens: lm(tokens))(np.array([[1, -1], [2, 20]]))
    assert np.isfinite(logits[:, 0]).all()
    assert np.isnan(logits[:, 1]).all()


@pytest.mark.parametrize(
    ("context_length", "num_tokens"), [(None, 9), (None, 1), (8, 3), (8, 9), (8, 4), (5, 3)]
)
@pytest.mark.parametrize("call_seconds", [0, 1000])
def test_a_text_in_one_call_is_the_streamed_one(
    context_length, num_tokens, call_seconds, monkeypatch
):
    lm = model(context_length=context_length)
    prompt = tokens(2, 5)
    text = generate(lm, prompt, num_tokens, key=KEY)
    assert text.shape == (2, num_tokens)
    monkeypatch.setattr(generation, "CALL_SECONDS", call_seconds)
    streamed = list(stream(lm, prompt, num_tokens, key=KEY))
    np.testing.assert_array_equal(text, np.stack(streamed, axis=1))


@pytest.mark.parametrize(
    ("step_seconds", "counts"),
    [(1e-9, [1, 2, 4, 8, 16, 32, 64, 64]), (1e-3, [1, 2, 4, 8, 9, 9, 9]), (9e-3, [1, 1, 1])],
)
def test_a_call_takes_the_steps_that_make_ten_milliseconds(step_seconds, counts, monkeypatch):
    """By a clock on which the call before is what takes time."""
    made, steps, now = [1], Decoder.steps, [0.0]

    def timed_steps(*args):
        now[0] += made[-1] * step_seconds * 1.01
        made.append(args[-1])
        return steps(*args)

    monkeypatch.setattr(Decoder, "steps", timed_steps)
    monkeypatch.setattr(generation.time, "perf_counter", lambda: now[0])
    text = stream(model(context_length=None), tokens(1, 3), 1 + sum(counts), key=KEY)
    assert len(list(text)) == 1 + sum(counts)
    assert made[1:] == counts


def test_a_longer_text_begins_with_the_shorter():
    lm = model()
    np.testing.assert_array_equal(
        generate(lm, tokens(1, 3), 12, key=KEY)[:, :4], generate(lm, tokens(1, 3), 4, key=KEY)
    )


def test_every_position_has_one_program():
    def programs() -> list[int]:
        return [p._cache_size() for p in (Decoder.first, Decoder.steps, Decoder.slide)]

    before = programs()
    for length in (3, 30):
        list(stream(model(hidden_features=21), tokens(1, 4), length, key=KEY))
    assert np.subtract(programs(), before).tolist() == [1, 1, 1]


def test_positions_restart_with_documents_and_end_with_the_context():
    lm = model()
    packed = tokens(1, 12)
    reset = np.zeros((1, 12), bool)
    reset[0, 7] = True
    logits, state = lm(packed, reset=reset)
    np.testing.assert_allclose(logits[:, 7:], lm(packed[:, 7:])[0], rtol=1e-5, atol=1e-6)
    assert state.position.tolist() == [5]
    _, state = lm(packed[:, :8])
    beyond, _ = lm.step(packed[:, 8], state)
    assert np.isnan(beyond).all()


REFUSED = {
    "too long a text": (lambda lm: lm(tokens(1, 9)), ValueError, "at most context_length=8 steps"),
    "floating tokens": (lambda lm: lm(np.zeros((1, 3))), TypeError, "tokens: expected an integer"),
    "rank of tokens": (lambda lm: lm(tokens(3)), ValueError, r"tokens: expected shape \(batch, t"),
    "unknown tokens": (
        lambda lm: lm(np.array([[1, -1, 20]])),
        ValueError,
        r"tokens: expected values in 0 … 19, got \[-1, 20\]",
    ),
    "unknown cell": (lambda lm: model(cell="foo"), ValueError, "cell: expected one of"),
    "no vocabulary": (lambda lm: model(vocab_size=0), ValueError, "vocab_size: expected a posi"),
    "no context": (lambda lm: model(context_length=0), ValueError, "context_length: expected at"),
    "rank of a token": (lambda lm: lm.step(tokens(1, 1), None), ValueError, "token: expected shap"),
    "state": (lambda lm: lm(tokens(1, 3), (1, 2)), TypeError, "state: expected LanguageModelState"),
    "empty prompt": (lambda lm: stream(lm, tokens(1, 0), 3, key=KEY), ValueError, "prompt: expec"),
    "no tokens": (lambda lm: stream(lm, tokens(1, 1), 0, key=KEY), ValueError, "num_tokens: expec"),
    "temperature": (
        lambda lm: stream(lm, tokens(1, 1), 3, key=KEY, temperature=-1.0),
        ValueError,
        "temperature: expected at least 0",
    ),
    "top_k": (
        lambda lm: stream(lm, tokens(1, 1), 3, key=KEY, top_k=0),
        ValueError,
        "top_k: expected at least 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(model())
