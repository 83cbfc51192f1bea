"""Language models and text generation, as users call them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import (
    GRU,
    HawkBlock,
    HawkLanguageModelConfig,
    LanguageModel,
    LanguageModelConfig,
    RMSNorm,
    RNNLanguageModel,
    RNNLanguageModelConfig,
    generate,
    stream,
)
from jax_models.models import decoder, language_model
from jax_models.models.decoder import Decoder
from jax_models.models.sampling import sample

KEY = jax.random.key(0)


def model(**fields) -> RNNLanguageModel:
    config = RNNLanguageModelConfig(**{"context_length": 8, **fields})
    return RNNLanguageModel(config, rngs=nnx.Rngs(0))


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, shape)


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
    hot = frequencies(temperature=3e38, top_k=2)
    np.testing.assert_allclose(hot, [0.5, 0.5, 0, 0], atol=0.015)


def test_sampling_keeps_the_tail_in_bfloat16():
    """With Gumbel noise in bfloat16, the last token would have a thirtieth of its probability."""
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
@pytest.mark.parametrize("steps_per_call", ["auto", 1, 3])
def test_a_text_in_one_call_is_the_streamed_one(context_length, num_tokens, steps_per_call):
    lm = model(context_length=context_length)
    prompt = tokens(2, 5)
    text = generate(lm, prompt, num_tokens, key=KEY)
    assert text.shape == (2, num_tokens)
    streamed = list(stream(lm, prompt, num_tokens, key=KEY, steps_per_call=steps_per_call))
    np.testing.assert_array_equal(text, np.stack(streamed, axis=1))


@pytest.mark.parametrize(
    ("step_seconds", "counts"),
    [(1e-9, [1, 2, 4, 8, 16, 32, 64, 64]), (1e-3, [1, 2, 4, 8, 9, 9, 9]), (9e-3, [1, 1, 1])],
)
def test_a_call_takes_the_steps_that_make_ten_milliseconds(step_seconds, counts, monkeypatch):
    """The fake clock advances by the duration of the previous call."""
    made, steps, now = [1], Decoder.steps, [0.0]

    def timed_steps(*args):
        now[0] += made[-1] * step_seconds * 1.01
        made.append(args[-1])
        return steps(*args)

    monkeypatch.setattr(Decoder, "steps", timed_steps)
    monkeypatch.setattr(decoder.time, "perf_counter", lambda: now[0])
    text = stream(model(context_length=None), tokens(1, 3), 1 + sum(counts), key=KEY)
    assert len(list(text)) == 1 + sum(counts)
    assert made[1:] == counts


def test_a_call_takes_the_steps_that_it_is_told(monkeypatch):
    made, steps = [], Decoder.steps
    monkeypatch.setattr(Decoder, "steps", lambda *args: made.append(args[-1]) or steps(*args))
    list(stream(model(context_length=None), tokens(1, 3), 10, key=KEY, steps_per_call=4))
    assert made == [4, 4, 1]


@pytest.mark.slow
@pytest.mark.parametrize("context_length", [None, 100])
def test_fifty_prompts_share_few_programs(context_length, compilations):
    """Counts prompts of all lengths and options, including operations outside the programs."""
    random = np.random.default_rng(0)
    lm = model(context_length=context_length, hidden_features=22)
    compilations.clear()
    for i in range(50):
        prompt = random.integers(0, 20, (1, random.integers(2, 400)))
        prompt = prompt if i % 4 < 2 else jax.device_put(prompt)
        options = {
            "key": jax.random.key(i),
            "temperature": random.choice([0.0, 1.0, random.uniform(0.1, 2)]),
            "top_k": random.choice([None, int(random.integers(1, 30))]),
            "top_p": random.choice([None, random.uniform()]),
            "repetition_penalty": random.choice([1.0, 1.2]),
            "stop_tokens": [[], 3, (4, 5)][i % 3],
            "mask": None if i % 5 else np.arange(prompt.shape[1])[None] > 0,
        }
        text = [generate, stream][i % 2](lm, prompt, int(random.integers(1, 150)), **options)
        # `generate` returns an array, which JAX would compile a program to iterate over.
        tokens_of_text = np.stack(list(text)) if i % 2 else text
        assert tokens_of_text.size > 0
    assert 0 < len(compilations) <= 8


def test_the_key_decides_the_text():
    texts = {
        np.asarray(generate(model(), tokens(1, 5), 20, key=jax.random.key(seed))).tobytes()
        for seed in (0, 1, 2, 0)
    }
    assert len(texts) == 3


@pytest.mark.parametrize("call", [generate, lambda *args, **kwargs: list(stream(*args, **kwargs))])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_refuses_to_draw_from_logits_that_are_not_finite(call, bad, temperature):
    lm = model(context_length=None)
    lm.embedding.embedding[...] = lm.embedding.embedding[...].at[3].set(bad)
    ok, fatal = [[1, 2], [1, 2]], [[1, 2], [1, 3]]
    call(lm, ok, 1, key=KEY)
    with pytest.raises(ValueError, match="model:"):
        call(lm, fatal, 9, key=KEY, temperature=temperature)


def test_streams_the_tokens_before_logits_that_are_not_finite():
    lm = model(context_length=None)
    lm.head.kernel[...] = jnp.zeros_like(lm.head.kernel[...])
    lm.head.bias[...] = jnp.zeros(20).at[3].set(1e3)
    lm.embedding.embedding[...] = lm.embedding.embedding[...].at[3].set(np.nan)
    text = stream(lm, [[1, 2]], 9, key=KEY)
    assert next(text).tolist() == [3]
    with pytest.raises(ValueError, match="model:"):
        next(text)


@pytest.mark.parametrize("three", [np.int64(3), jnp.int32(3), np.uint8(3)])
def test_counts_may_be_integers_of_any_kind_and_a_key_of_the_old_one(three):
    text = partial(generate, model(), tokens(1, 4), key=KEY)
    np.testing.assert_array_equal(text(3, top_k=10**12), text(3))
    found = text(three, top_k=three, key=jax.random.PRNGKey(0))
    np.testing.assert_array_equal(found, text(3, top_k=3))


def test_positions_end_with_the_context():
    lm = model()
    _, state = jax.jit(lambda tokens: lm(tokens))(tokens(1, 8))
    beyond, _ = jax.jit(lm.step)(tokens(1), state)
    assert np.isnan(beyond).all()


ONE = tokens(1, 1)
REFUSED = [
    *(
        ("tokens:", lambda lm, x=x: lm(x))
        for x in (np.zeros((1, 3)), tokens(3), np.array([[1, -1, 20]]), [[1], [1, 2]])
    ),
    *(
        ("prompt:", lambda lm, x=x: generate(lm, x, 3, key=KEY))
        for x in (np.zeros((1, 3)), tokens(3), [[1, 20]], [[1, 2], [1]], tokens(1, 0))
    ),
    *(
        ("steps_per_call:", lambda lm, n=n: stream(lm, ONE, 3, key=KEY, steps_per_call=n))
        for n in (0, 65, "all", True, 1.0)
    ),
    ("state.position:", lambda lm: lm(ONE, lm.init_state(1)._replace(position=np.zeros(1, bool)))),
    ("state:", lambda lm: lm(ONE, (1, 2))),
    ("token:", lambda lm: lm.step(np.array([2**32 + 3]), lm.init_state(1))),
    ("token:", lambda lm: lm.step(ONE, None)),
    ("at most context_length=8 steps", lambda lm: lm(tokens(1, 9))),
    ("logits:", lambda lm: sample(jnp.zeros((2, 0)), KEY)),
    ("model:", lambda lm: generate(type(lm), ONE, 3, key=KEY)),
    ("model:", lambda lm: generate(nnx.eval_shape(lambda: lm), ONE, 3, key=KEY)),
    (
        "stream: under jit its tokens have no values yet",
        lambda lm: jax.jit(lambda p: next(stream(lm, p, 3, key=KEY)))(ONE),
    ),
]


@pytest.mark.parametrize(("argument", "call"), REFUSED)
def test_refuses(argument, call):
    with pytest.raises((TypeError, ValueError), match=argument):
        call(model())


def test_the_old_name_of_the_blocks_is_answered_with_the_new_one():
    with pytest.raises(AttributeError, match="is now called blocks"):
        _ = model().layers
    assert not hasattr(model(), "layers")


@pytest.mark.slow
@pytest.mark.parametrize("call", [lambda lm, x: lm(x), nnx.jit(lambda lm, x: lm(x))])
def test_a_replaced_block_of_another_width_is_named(call):
    lm = HawkLanguageModelConfig(20, features=8, num_layers=2).build(rngs=nnx.Rngs(0))
    lm.blocks[1] = HawkBlock(9, 12, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^layers: expected in_features=\d+ of the HawkBlock"):
        call(lm, tokens(2, 5))


def test_a_model_of_any_parts():
    """A model with two kinds of blocks, a tied head and no layouts."""
    rngs = nnx.Rngs(0)
    lm = LanguageModel(
        LanguageModelConfig(vocab_size=20),
        embedding=nnx.Embed(20, 8, rngs=rngs),
        blocks=[HawkBlock(8, 12, rngs=rngs), GRU(8, 8, rngs=rngs)],
        norm=RMSNorm(8, rngs=rngs),
    )
    call = jax.jit(lambda tokens: lm(tokens))
    logits, _ = call(tokens(2, 5))
    _, state = call(tokens(2, 5)[:, :4])
    last, _ = jax.jit(lm.step)(tokens(2, 5)[:, 4], state)
    np.testing.assert_allclose(last, logits[:, 4], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="in_features=8"):
        LanguageModel(
            lm.config, [*lm.blocks, GRU(9, 9, rngs=rngs)], lm.norm, embedding=lm.embedding
        )


@pytest.mark.parametrize("name", language_model._MOVED)
def test_a_name_that_moved_says_where_it_is(name):
    with pytest.raises(ImportError, match=f"language_model.{name}: .*: see docs/migration.md"):
        exec(f"from jax_models.models.language_model import {name}", {})
    with pytest.raises(AttributeError, match="has no attribute 'Presets'"):
        _ = language_model.Presets
