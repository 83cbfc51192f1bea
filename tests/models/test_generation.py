"""Batches of prompts, the filters of the next token, and rows that stop."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import (
    GRU,
    Attention,
    GPModelConfig,
    LanguageModel,
    LanguageModelConfig,
    RMSNorm,
    RNNLanguageModelConfig,
    generate,
    stream,
)
from jax_models.models.decoder import Decoder
from jax_models.models.sampling import _keep_largest, _keep_nucleus, penalize, sample
from parity_tests.registry import CASES

KEY = jax.random.key(0)
VOCAB = 20
CONFIGS = {
    "rnn": RNNLanguageModelConfig(VOCAB, cell="gru"),
    "attention": GPModelConfig(VOCAB, 9, features=8, num_layers=1, num_heads=2, block="attention"),
}
CACHED = "full attention"


def model(name: str = "rnn") -> LanguageModel:
    rngs = nnx.Rngs(0)
    if name != CACHED:
        return CONFIGS[name].build(rngs=rngs)
    blocks = [Attention(8, 2, num_kv_heads=1, rngs=rngs), Attention(8, 2, window=4, rngs=rngs)]
    parts = {"embedding": nnx.Embed(VOCAB, 8, rngs=rngs), "norm": RMSNorm(8, rngs=rngs)}
    return LanguageModel(LanguageModelConfig(VOCAB), blocks, **parts)


def padded(rows: list[list[int]], side: str, value: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and their mask, as a tokenizer of transformers returns them."""
    time = max(map(len, rows))
    pads = [[value] * (time - len(row)) for row in rows]
    if side == "left":
        tokens = [pad + row for pad, row in zip(pads, rows, strict=True)]
        mask = [[0] * len(pad) + [1] * len(row) for pad, row in zip(pads, rows, strict=True)]
    else:
        tokens = [row + pad for pad, row in zip(pads, rows, strict=True)]
        mask = [[1] * len(row) + [0] * len(pad) for pad, row in zip(pads, rows, strict=True)]
    return np.array(tokens), np.array(mask)


ROWS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
KINDS = {
    "recurrence": "RNNLanguageModel of minGRU",
    "context of a long convolution": "GPModel of hyena",
    "context of attention": "GPModel of attention",
    "window": "GriffinLanguageModel",
    "cache": "Qwen35LanguageModel",
}
"""A model for each kind of state. The registry pads all models, but does not generate from them."""


@pytest.mark.parametrize(
    "kind", [k if k == "recurrence" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_padding_has_no_influence(x64, kind):
    """Each row continues as alone, also where the rows fill a context one after the other.

    The longest prompt is longer than the contexts.
    """
    case, rows = CASES[KINDS[kind]], [[3, 1, 4, 1, 5] * 3, *ROWS[1:]]
    lm = case.build_layer(case.build_twin())
    # Without the penalty, a model with a tied head and random weights repeats a single token.
    options = {"key": KEY, "temperature": 0, "repetition_penalty": 100.0}
    alone = [generate(lm, [row], 12, **options)[0] for row in rows]
    assert len({tuple(text.tolist()) for text in alone}) > 1, "the prompts do not matter"
    for side, value in (("left", 7), ("right", -1)):
        tokens, mask = padded(rows, side, value)
        for given in (mask, jnp.array(mask, bool)):
            together = generate(lm, tokens, 12, mask=given, **options)
            np.testing.assert_array_equal(together, alone, f"padded on the {side}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn", "attention"])
def test_a_mask_may_be_traced(name):
    """A wrong mask or token, which cannot raise an error there, gives tokens of −1 in its row."""
    lm = model(name)
    graphdef, weights = nnx.split(lm)
    tokens, mask = padded(ROWS, "left", 7)

    @jax.jit
    def text(weights, tokens, mask, key):
        return generate(nnx.merge(graphdef, weights), tokens, 9, mask=mask, key=key)

    expected = generate(lm, tokens, 9, mask=mask, key=KEY)
    np.testing.assert_array_equal(text(weights, tokens, mask, KEY), expected)
    assert (text(weights, tokens + VOCAB, mask, KEY) == -1).all()
    mask[0, 2], mask[1] = 0, 0
    found = text(weights, tokens, mask, KEY)
    assert (found[:2] == -1).all()
    np.testing.assert_array_equal(found[2], expected[2])


def test_a_row_repeats_its_stop_token_and_the_text_ends_with_the_last_row(monkeypatch):
    lm = model()
    tokens, mask = padded(ROWS, "left", 7)
    draw = partial(generate, lm, tokens, 90, mask=mask, key=KEY)
    free, ends = np.asarray(draw()), (3, 8)
    first = [np.flatnonzero(np.isin(row, ends))[0] for row in free]
    assert max(first) < 60
    expected = np.stack([
        np.where(np.arange(90) < end, row, row[end]) for row, end in zip(free, first, strict=True)
    ])  # fmt: skip
    np.testing.assert_array_equal(draw(stop_tokens=ends), expected)
    # Under jit, all columns are computed, and the loop still does nothing after the last stop.
    graphdef, weights = nnx.split(lm)
    traced = jax.jit(
        lambda weights: generate(
            nnx.merge(graphdef, weights), tokens, 90, mask=mask, key=KEY, stop_tokens=ends
        )
    )
    np.testing.assert_array_equal(traced(weights), expected)
    # A stream ends, whatever the size of its calls.
    calls, steps = [], Decoder.steps
    monkeypatch.setattr(Decoder, "steps", lambda *args: calls.append(args) or steps(*args))
    for size in ("auto", 4):
        text = stream(lm, tokens, 90, mask=mask, key=KEY, stop_tokens=ends, steps_per_call=size)
        np.testing.assert_array_equal(np.stack([*text], axis=1), expected[:, : max(first) + 1])
    assert len(calls) < 2 * 90 / 4
    # One row may stop at its first token.
    assert [*stream(lm, [[1]], 9, key=KEY, stop_tokens=range(VOCAB))][1:] == []


def test_the_filters_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((5, 50))).astype(np.float32)
    logits[1, :40] = -np.inf
    tokens = rng.integers(0, 50, (5, 12))
    as_torch = torch.tensor(logits)
    seen = np.zeros((5, 50), bool)
    np.put_along_axis(seen, tokens, True, axis=1)
    for penalty in (1.0, 1.3, 0.5):
        process = processors.RepetitionPenaltyLogitsProcessor(penalty)
        theirs = process(torch.tensor(tokens), as_torch.clone()).numpy()
        np.testing.assert_array_equal(jax.jit(penalize)(logits, seen, penalty), theirs)
    for k in (1, 2, 49, 50):
        rounded = logits.round(1)  # some are equal
        theirs = processors.TopKLogitsWarper(k)(None, torch.tensor(rounded)).numpy()
        np.testing.assert_array_equal(jax.jit(_keep_largest)(rounded, k), theirs)
    for p in (0.0, 0.2, 0.9, 0.999):
        theirs = processors.TopPLogitsWarper(p)(None, as_torch).numpy()
        np.testing.assert_array_equal(jax.jit(_keep_nucleus)(logits, jnp.float32(p)), theirs)
    # All together, in their order: penalty, temperature, top_k, top_p. The draws never leave it.
    chain = [
        processors.TemperatureLogitsWarper(1.7),
        processors.TopKLogitsWarper(20),
        processors.TopPLogitsWarper(0.8),
    ]
    theirs = as_torch
    for process in chain:
        theirs = process(None, theirs)
    draw = jax.jit(partial(sample, temperature=1.7, top_k=20, top_p=0.8))
    keys = jax.random.split(KEY, 3000)
    drawn = np.asarray(jax.lax.map(lambda key: draw(logits, key), keys))
    for row, expected in zip(drawn.T, torch.softmax(theirs, dim=-1).numpy(), strict=True):
        frequencies = np.bincount(row, minlength=50) / len(row)
        assert (frequencies[expected == 0] == 0).all()
        np.testing.assert_allclose(frequencies, expected, atol=0.04)


@pytest.mark.parametrize(("name", "penalty"), [("rnn", 2.0), ("attention", 1.0), (CACHED, 2.0)])
def test_greedy_tokens_are_those_of_a_loop_over_the_whole_text(name, penalty):
    """A model with a context reads only the last tokens. A penalty counts a row's own tokens."""
    lm = model(name)
    forward, size = jax.jit(lambda text: lm(text)[0]), lm.context_length or 13
    rows = [[3, 1, 4], [5, 9, 2]]
    for _ in range(10):
        text = np.array(rows)[:, -size:]
        logits = np.array(forward(np.pad(text, ((0, 0), (0, size - text.shape[1])))))
        for row, of_row in zip(rows, logits[:, text.shape[1] - 1], strict=True):
            seen = [*set(row)]
            of_row[seen] = np.where(
                of_row[seen] < 0, of_row[seen] * penalty, of_row[seen] / penalty
            )
            row.append(int(of_row.argmax()))
    options = {"key": KEY, "temperature": 0, "repetition_penalty": penalty}
    found = generate(lm, [[3, 1, 4], [5, 9, 2]], 10, **options)
    np.testing.assert_array_equal(found, np.array(rows)[:, 3:])


@pytest.mark.parametrize(
    ("length", "padded_to"), [(1, 1), (2, 16), (16, 16), (17, 32), (64, 64), (65, 100)]
)
def test_few_lengths_of_prompts_compile(monkeypatch, length, padded_to):
    def first(self, arrays, prompt, *rest):
        raise RuntimeError(prompt.shape[1])  # before anything compiles

    monkeypatch.setattr(Decoder, "first", first)
    lm = RNNLanguageModelConfig(VOCAB, context_length=100, cell="gru").build(rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match=f"^{padded_to}$"):
        generate(lm, [[1] * length], 3, key=KEY)


@pytest.mark.slow
def test_caches_have_room_for_the_text(monkeypatch):
    """A few sizes, so that few programs are compiled, and at most the model's context."""
    sizes = []

    def set_view(self, time_axis=None, max_length=None):
        sizes.append(max_length)

    monkeypatch.setattr(GRU, "set_view", set_view)
    tokens, mask = padded([[1] * 70, [2] * 60], "left", 0)
    generate(model(), [[1, 2]], 9, key=KEY)
    for num_tokens in (58, 59):
        generate(model(), tokens, num_tokens, mask=mask, key=KEY)
    limited = RNNLanguageModelConfig(VOCAB, context_length=9, cell="gru")
    generate(limited.build(rngs=nnx.Rngs(0)), [[1, 2]], 3, key=KEY)
    assert sizes == [64, 128, 256, 9]


TWO = [[1, 2, 3], [4, 5, 6]]


def test_greedy_decoding_needs_no_key():
    expected = generate(model(), TWO, 3, key=KEY, temperature=0)
    np.testing.assert_array_equal(generate(model(), TWO, 3, temperature=0), expected)


REFUSED = [
    *(
        ("prompt: expected an integer dtype, got bool", {"prompt": np.ones((1, 3), bool)} | mask)
        for mask in ({}, {"mask": [[0, 1, 1]]})
    ),
    ("mask: expected the shape of the prompt", {"mask": [[1, 1]]}),
    ("mask: expected at least one real token .* in row 1", {"mask": [[1, 1, 1], [1, 0, 1]]}),
    ("mask: expected at least one real token .* in row 0", {"mask": [[0, 0, 0], [0, 0, 1]]}),
    ("mask: expected 0 and 1", {"mask": [[0, 1, 2], [0, 1, 1]]}),
    ("mask: expected booleans", {"mask": [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]}),
    ("mask: expected rows of one length", {"mask": [[1], [1, 1]]}),
    *(
        (f"{name}: expected", {name: value})
        for name, values in {
            "temperature": (-1.0, "hot"),
            "num_tokens": (0, 2**31),
            "key": (None, 0, jax.random.split(KEY)),
            "top_k": (0,),
            "top_p": (1.5, float("nan"), "0.9"),
            "repetition_penalty": (0, True),
            "stop_tokens": ([-1, 3, 20], "</s>"),
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("message", "options"), REFUSED)
@pytest.mark.parametrize("call", [generate, stream])
def test_refuses(message, options, call):
    with pytest.raises((TypeError, ValueError), match=message):
        call(model(), **{"prompt": TWO, "num_tokens": 3, "key": KEY} | options)
