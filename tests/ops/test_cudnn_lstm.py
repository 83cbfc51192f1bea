"""LSTMs through cuDNN. Without a GPU, JAX's reference of cuDNN's LSTM takes its place."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.experimental import rnn
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from stack_problem import loss, problem, with_gradients

from jax_models import LSTM, ops
from jax_models.ops import forms, gated
from parity_tests.engine.bounds.tolerance import assert_same

BATCH, TIME, FEATURES, HIDDEN = 4, 6, 3, 5
LENGTHS = np.array([TIME, 0, 1, 4])


def stand_in_forward(
    *operands, input_size, hidden_size, num_layers, dropout, bidirectional, cudnn_allow_tf32
):
    """Computes cuDNN's results, but NaN if a row has no step."""
    *primals, weights, ends = operands
    sizes = (input_size, hidden_size, num_layers)
    unpacked = rnn.unpack_lstm_weights(weights, *sizes, bidirectional)
    y, h, c = rnn.lstm_ref(*primals, *unpacked, ends, *sizes, dropout, bidirectional)
    return jnp.where((ends < 1).any(), jnp.nan, y), h, c, jnp.zeros(8, jnp.float32)


def stand_in_backward(dy, dh, dc, x, h, c, weights, y, reserve, ends, **options):
    """Computes cuDNN's gradients, but NaN in the padding."""

    def forward(*primals):
        return stand_in_forward(*primals, ends, **options)[:3]

    dx, *others = jax.vjp(forward, x, h, c, weights)[1]((dy, dh, dc))
    padding = jnp.arange(x.shape[1], dtype=ends.dtype)[None, :, None] >= ends[:, None, None]
    return jnp.where(padding, jnp.nan, dx), *others


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """Lowers cuDNN's calls to the stand-ins, for the CPU and in programs for CUDA."""
    library = types.SimpleNamespace(compute_rnn_workspace_reserve_space_sizes=lambda *_: (8, 8))
    functions = {rnn.rnn_fwd_p: stand_in_forward, rnn.rnn_bwd_p: stand_in_backward}
    for primitive, function in functions.items():
        options = ("input_size", "hidden_size", "num_layers", "dropout", "bidirectional")
        compiled = jax.jit(function, static_argnames=(*options, "cudnn_allow_tf32"))
        for platform in ("cpu", "cuda"):
            rule = mlir.lower_fun(compiled, multiple_results=True)
            mlir.register_lowering(primitive, rule, platform=platform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rnn, "gpu_rnn", library)
        yield


@pytest.fixture
def one_gpu(monkeypatch):
    """Makes JAX seem to have a GPU."""
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda name=None: [0] if name == "cuda" else devices(name))


@pytest.fixture
def in_float64(monkeypatch, x64):
    """Allows cuDNN for every dtype, because the stand-in computes in all of them."""
    cudnn = gated.CUDNN._replace(refusal=forms.never_refuses)
    own_forms = cudnn, *gated.RECURRENT_STACK.own_forms[1:]
    operator = gated.RECURRENT_STACK._replace(own_forms=own_forms)
    monkeypatch.setattr(gated, "RECURRENT_STACK", operator)


def build(method: str, dtype=jnp.float32, **options) -> LSTM:
    return LSTM(FEATURES, HIDDEN, **options, method=method, param_dtype=dtype, rngs=nnx.Rngs(0))


def assert_cudnn_equals_xla(transform, lengths, **options):
    results = []
    for method in ("cudnn", "xla"):
        function, arguments = problem(build(method, jnp.float64, **options), lengths=lengths)
        results.append(jax.jit(transform(function))(*arguments))
    jax.tree.map(partial(assert_same, what="cuDNN and XLA"), *results)


def chosen(layer: LSTM, x=None, **kwargs) -> str:
    """The form that runs on a GPU."""
    x = jnp.ones((BATCH, TIME, FEATURES)) if x is None else x
    [table] = ops.forms_of(layer, x, platform="cuda", **kwargs)
    return table.chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"num_layers": 3, "use_bias": False}, LENGTHS),
        ({"num_layers": 2, "bidirectional": True}, LENGTHS),
        ({"num_layers": 2, "dropout_rate": 0.5}, None),
    ],
    ids=["3 layers, no bias", "2 layers, both ways", "dropout between 2 layers"],
)
def test_cudnn_equals_xla(options, lengths, in_float64):
    assert_cudnn_equals_xla(with_gradients, lengths, **options)


@pytest.mark.slow
def test_vmap_and_second_derivatives_equal_those_of_xla(in_float64):
    def second(function):
        def gradient(*args):
            return jax.grad(lambda args: loss(function(*args)))(args)

        def of_ensemble(weights, *args):
            ensemble = jax.tree.map(lambda w: jnp.stack([w, 1.5 * w]), weights)
            mapped = jax.vmap(with_gradients(gradient), in_axes=(0, None, None))
            return mapped(ensemble, *args)

        return of_ensemble

    assert_cudnn_equals_xla(second, LENGTHS)


@pytest.mark.slow
def test_auto_is_cudnn_where_the_program_runs_on_a_gpu(one_gpu):
    def lowered(method: str, platform: str) -> str:
        function, arguments = problem(build(method, num_layers=2), lengths=LENGTHS)
        traced = jax.jit(with_gradients(function)).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for platform, method in {"cpu": "xla", "tpu": "xla", "cuda": "cudnn"}.items():
        chosen, expected = (lowered(name, platform) for name in ("auto", method))
        for part in ("stand_in_forward", "stand_in_backward"):
            assert (part in chosen) == (part in expected) == (platform == "cuda")
        assert chosen.count("stablehlo.while") == expected.count("stablehlo.while")


def test_auto_leaves_what_cudnn_cannot_or_should_not_do_to_xla(one_gpu, monkeypatch):
    x = jnp.ones((BATCH, TIME, FEATURES))
    assert chosen(build("auto")) == "cudnn"
    for options, call in (
        ({"method": "xla"}, {}),
        ({"proj_features": 2}, {}),
        ({}, {"reset": jnp.zeros((BATCH, TIME), bool)}),
        ({}, {"x": x[:, :1]}),
        ({}, {"x": x[:1]}),
        ({"dtype": jnp.bfloat16}, {"x": x.astype("bfloat16")}),
    ):
        assert chosen(build(**{"method": "auto", **options}), **call) != "cudnn"
    monkeypatch.setattr(jax, "devices", lambda name: [0, 1])
    assert chosen(build("auto")) == "xla"
    assert chosen(build("cudnn")) == "cudnn"


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_of_a_shard_map_has_its_cudnn(check_vma, one_gpu, monkeypatch):
    """With check_vma, cuDNN is not used, because its call does not declare what varies."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    monkeypatch.setattr(jax, "devices", lambda name: [0, 1])
    layer = build("auto")
    cells, served = [cell.arrays() for cell in layer.cells], []

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)
    def forward(x):
        state = layer.init_state(len(x))
        [table] = ops.forms_of(ops.lstm_stack, x, state, cells, num_directions=1, platform="cuda")
        served.append(table.chosen == "cudnn")
        return ()

    jax.eval_shape(forward, jnp.ones((BATCH, TIME, FEATURES)))
    assert served == [not check_vma]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [None, "tensorfloat32", "highest"])
def test_products_are_as_precise_as_was_asked_for(setting, one_gpu, monkeypatch):
    """The backward pass keeps the precision, even if it is traced after the setting has ended."""
    precisions = []

    def spied(function):
        def spy(*args):
            precisions.append((function, *(a for a in args if isinstance(a, jax.lax.Precision))))
            return function(*args)

        return spy

    forward, backward = rnn.lstm_fwd, rnn.lstm_bwd
    monkeypatch.setattr(rnn, "lstm_fwd", spied(forward))
    monkeypatch.setattr(rnn, "lstm_bwd", spied(backward))
    function, arguments = problem(build("cudnn"))
    with jax.default_matmul_precision(setting):
        results, pull_back = jax.vjp(function, *arguments)
    pull_back(results)
    high = jax.lax.Precision.HIGHEST if setting == "highest" else jax.lax.Precision.HIGH
    assert {*precisions} == {(forward, high), (backward, high)}


def test_is_exported_without_cudnn(one_gpu):
    function, arguments = problem(build("auto"), lengths=LENGTHS)
    run = jax.jit(with_gradients(function))
    exported = export.export(run, platforms=("cpu", "cuda"))(*arguments)
    assert "stand_in" not in exported.mlir_module()


@pytest.mark.parametrize(
    ("reason", "options", "kwargs"),
    [
        ("needs an NVIDIA GPU, and JAX finds none", {}, {}),
        ("supports float32, not bfloat16", {"dtype": jnp.bfloat16}, {}),
        ("not support projections", {"proj_features": 2}, {}),
        ("does not support reset", {}, {"reset": np.zeros((BATCH, TIME), bool)}),
        ("not support empty batches", {}, {"x": np.zeros((BATCH, 0, FEATURES), np.float32)}),
        ("65,535 steps, not 65,536", {}, {"x": np.zeros((1, 65_536, FEATURES), np.float32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_with_the_reason_and_the_way_out(reason, options, kwargs):
    layer = build("cudnn", **options)
    x = kwargs.pop("x", np.ones((BATCH, TIME, FEATURES), np.float32))
    with pytest.raises(NotImplementedError, match=f"{reason}.*method='auto'"):
        layer(jnp.asarray(x, options.get("dtype")), **kwargs)
