"""Layers as users call them: layouts, dtypes, dropout, and the errors for wrong inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge

from jax_models import (
    LSTM,
    RNN,
    Bidirectional,
    CausalConv1D,
    HyenaBlock,
    ResidualBlock,
    Reversed,
    RNNLanguageModelConfig,
    RNNState,
    SelfAttentionBlock,
    SequenceLayer,
    Stack,
    state_batch_axes,
)
from parity_tests.engine.bounds.tolerance import assert_same


def lstm(**kwargs) -> LSTM:
    return LSTM(5, 6, rngs=nnx.Rngs(0), **kwargs)


def hyena(**kwargs) -> HyenaBlock:
    return HyenaBlock(5, 8, rngs=nnx.Rngs(0), **kwargs)


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_time_major_is_batch_major_transposed():
    x = inputs(3, 7, 5)
    reset = np.zeros((3, 7), bool)
    reset[1, 4] = True
    masks = {"lengths": np.array([7, 6, 2]), "starts": np.array([0, 2, 1])}
    y, state = lstm()(x, **masks, reset=reset)
    time_major = lstm(time_major=True)
    y_time, state_time = time_major(x.swapaxes(0, 1), **masks, reset=reset.T)
    np.testing.assert_array_equal(y_time.swapaxes(0, 1), y)
    np.testing.assert_array_equal(state_time.c, state.c)
    y_t, _ = time_major.step(x[:1, 0], time_major.init_state(1))
    np.testing.assert_allclose(y_t, y[:1, 0], rtol=1e-6)


def test_unbatched_is_a_batch_of_one():
    x = inputs(7, 5)
    layer = lstm(num_layers=2)
    alone = layer(x, lengths=5)
    batch = layer(x[None], lengths=np.array([5]))
    steps = layer.step(x[0], alone[1]), layer.step(x[:1], batch[1])
    axes = 0, state_batch_axes(layer)
    for result, of_batch in ((alone, batch), steps):
        expected = jax.tree.map(lambda a, axis: jnp.take(a, 0, axis), of_batch, axes)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), result, expected)
    y_first, _ = layer.step(x[0], alone[1], reset=True)
    np.testing.assert_allclose(y_first, layer(x[:1])[0][0], rtol=1e-6)


def test_dropout_is_between_layers_in_training_only():
    layer = lstm(num_layers=2, dropout_rate=0.5)
    x = inputs(2, 3, 5)
    assert not np.array_equal(layer(x)[0], layer(x)[0])
    evaluating = nnx.view(layer, deterministic=True)
    np.testing.assert_array_equal(evaluating(x)[0], evaluating(x)[0])
    with pytest.warns(UserWarning, match=r"^dropout_rate: 0\.5 has no effect with num_layers=1"):
        single = lstm(dropout_rate=0.5)
    np.testing.assert_array_equal(single(x)[0], single(x)[0])


def test_weights_start_uniform_as_torchs():
    layer = LSTM(64, 100, rngs=nnx.Rngs(0))
    for array in layer.cells[0].arrays().values():
        assert float(jnp.abs(array).max()) == pytest.approx(0.1, rel=0.02)
        assert float(jnp.std(array)) == pytest.approx(0.1 / 3**0.5, rel=0.1)
        assert float(jnp.mean(array)) == pytest.approx(0, abs=0.01)


def test_linen_model_through_the_bridge():
    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x):
            _, state = bridge.to_linen(LSTM, 5, 6)(x)
            return nn.Dense(2)(state.h[-1])

    x = inputs(3, 4, 5)
    model = Classifier()
    variables = model.init(jax.random.key(0), x)
    gradient = jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2))(variables)
    assert model.apply(variables, x).shape == (3, 2)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["params"]))


def step(x, **options):
    return lstm().step(x, lstm().init_state(2), **options)


X = inputs(2, 3, 5)
STATE = lstm().init_state(2)
REFUSED = [
    *(("x:", partial(lstm(), x)) for x in (X[0, 0], X[..., :4], X.astype(int), None, "abc")),
    *(("x:", partial(lstm(), x)) for x in ({"x": 1.0}, [[1.0], [1.0, 2.0]])),
    ("x:", lambda: lstm()(jax.ShapeDtypeStruct(X.shape, float))),
    ("x:", lambda: step(X)),
    ("state:", lambda: lstm()(X, RNNState(STATE.h))),
    ("state.h:", lambda: lstm()(X, lstm().init_state(3))),
    ("state.c:", lambda: lstm()(X, STATE._replace(c=None))),
    ("state.h:", lambda: lstm()(X, jax.tree.map(lambda s: s.astype(int), STATE))),
    *(
        ("lengths:", partial(lstm(), X, lengths=np.array(lengths)))
        for lengths in ([1, 2, 3], [1.0, 2.0], [1, 4])
    ),
    *(
        ("starts:", partial(lstm(), X, lengths=np.array([3, 1]), starts=np.array(starts)))
        for starts in ([1, 2, 3], [1.0, 1.0], [0, 2], [-1, 0])
    ),
    ("reset:", lambda: step(X[:, 0], reset=np.zeros((2, 1), bool))),
    ("reset:", lambda: lstm()(X, reset=np.zeros((3, 2), bool))),
    ("reset:", lambda: lstm()(X, reset=np.zeros((2, 3)))),
    ("LSTM.step: a bidirectional layer", lambda: lstm(bidirectional=True).step(X[:, 0], None)),
    ("HyenaBlock: time_major: .*only RNN, LSTM and GRU", lambda: hyena(time_major=True)),
    ("LSTM:", lambda: nnx.eval_shape(lstm)(X)),
    ("layer:", lambda: state_batch_axes(None)),
    ("layers:", lambda: Stack(lstm())),
    ("layers:", lambda: Stack([lstm(), lstm()])),
    ("layers:", lambda: Stack([RNN(5, 5, rngs=nnx.Rngs(0)), CausalConv1D(1, 3, rngs=nnx.Rngs(0))])),
    (
        "layers:",
        lambda: nnx.eval_shape(lambda: Stack([lstm(bidirectional=True), Reversed(lstm())])),
    ),
    ("time_major=False, got True", lambda: Stack([lstm(time_major=True)])),
    ("time_major=False, got True", lambda: Bidirectional(*[lstm(time_major=True)] * 2)),
    ("forward:", lambda: Bidirectional(lstm(bidirectional=True), lstm())),
    ("backward:", lambda: Bidirectional(lstm(), LSTM(4, 6, rngs=nnx.Rngs(0)))),
    (
        "Bidirectional: reset: a long convolution cannot",
        lambda: Bidirectional(hyena(), hyena())(X, reset=np.zeros((2, 3), bool)),
    ),
    ("Reversed.step:", lambda: Reversed(lstm()).step(X[:, 0], STATE)),
]


@pytest.mark.parametrize(("argument", "call"), REFUSED)
def test_refuses(argument, call):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=argument):
        call()


@pytest.mark.parametrize("build", [lambda *parts: Stack(parts), Bidirectional, Reversed])
def test_layers_of_layers_have_their_layout_and_dtypes(build):
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    parts = 1 if build is Reversed else 2
    layer = build(*(LSTM(5, 5, **dtypes, rngs=nnx.Rngs(0)) for _ in range(parts)))
    assert (layer.dtype, layer.param_dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert Reversed(lstm(time_major=True)).time_major


@pytest.mark.parametrize(("dtype", "x64"), [(np.int64, False), (np.int32, True), (np.uint8, True)])
def test_lengths_of_any_integers_inside_and_outside_jit(dtype, x64):
    with jax.enable_x64(x64):
        layer, x, lengths = lstm(bidirectional=True), inputs(2, 3, 5), np.array([3, 1], dtype)
        given = jnp.asarray(lengths)
        for y in (
            layer(x, lengths=lengths)[0],
            jax.jit(lambda x, lengths: layer(x, lengths=lengths)[0])(x, lengths),
            jax.jit(lambda x: layer(x, lengths=given)[0])(x),
        ):
            np.testing.assert_array_equal(y[1, 1:], 0)
            assert np.abs(y[1, 0]).min() > 0


def test_a_reversed_hyena_starts_without_a_state_at_the_end_of_each_row():
    with jax.enable_x64(True):
        layer, x, lengths = hyena(param_dtype=jnp.float64), np.zeros((2, 2, 4, 5)), (4, 3)
        for row, length in enumerate(lengths):
            x[0, row, :length] = inputs(length, 5)
            x[1, row, :length] = inputs(length, 5)[::-1]
        y, y_reversed = (
            jax.jit(of.__call__)(x_of, lengths=np.array(lengths))[0]
            for of, x_of in zip((layer, Reversed(layer)), x, strict=True)
        )
        for row, length in enumerate(lengths):
            assert_same(y_reversed[row, :length], y[row, :length][::-1], "outputs")
            assert (y_reversed[row, length:] == 0).all()
    assert Reversed(layer).start(2) is None


@pytest.mark.parametrize(
    "build",
    [
        partial(LSTM, 6, 6),
        partial(SelfAttentionBlock, 6, 2, max_length=9),
        partial(HyenaBlock, 6, 9),
        RNNLanguageModelConfig().build,
    ],
)
def test_traced_lengths_and_starts_outside_make_their_rows_nan(build):
    """`tests/ops/test_op_arguments.py` tests the operators and their states."""
    layer = build(rngs=nnx.Rngs(0))
    x = inputs(4, 3, 6) if isinstance(layer, SequenceLayer) else np.ones((4, 3), int)
    run = jax.jit(lambda lengths: layer(x, lengths=lengths)[0])
    y = run(np.array([4, -1, 2, 3]))
    np.testing.assert_array_equal(y[2:], run(np.array([3, 0, 2, 3]))[2:])
    assert np.isnan(y[:2]).all()
    ends = np.array([3, 1, 2, 3])
    y = jax.jit(lambda starts: layer(x, lengths=ends, starts=starts)[0])(np.array([-1, 2, 2, 1]))
    assert np.isnan(y[:2]).all()
    assert np.isfinite(y[2:]).all()


def test_a_layer_of_ones_own_takes_rows():
    with pytest.raises(TypeError, match=r"Old.sequence: expected \(self, x, state, rows\), got"):

        class Old(SequenceLayer):
            def sequence(self, x, state, lengths, reset): ...


def test_a_residual_block_can_do_what_its_mixer_can():
    class Block(ResidualBlock):
        parts = ("norm", "mixer", "norm", "mlp")

        def __init__(self, mixer):
            super().__init__(5)
            self.norm, self.mixer, self.mlp = jnp.sin, mixer, jnp.cos

    x, reset = jnp.ones((2, 4, 5)), jnp.zeros((2, 4), bool)
    both_ways = Block(Bidirectional(*(LSTM(5, n, rngs=nnx.Rngs(0)) for n in (2, 3))))
    with pytest.raises(NotImplementedError, match="needs the whole sequence"):
        both_ways.step(x[:, 0], both_ways.init_state(2))
    convolving = Block(HyenaBlock(5, 16, rngs=nnx.Rngs(0)))
    with pytest.raises(NotImplementedError, match="reset: a long convolution"):
        convolving(x, reset=reset)
    causal = Block(LSTM(5, 5, rngs=nnx.Rngs(0)))
    assert causal(x, reset=reset)[0].shape == x.shape
