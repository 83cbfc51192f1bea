"""Faults on purpose: each must be found by the check that is there to find it."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import LSTM, GPModel, LSTMState, ops
from parity_tests import checks
from parity_tests.cases import CASES, Case
from parity_tests.checks import CHECKS, Subject
from parity_tests.measure import Report, measure
from parity_tests.problem import problem
from train import optimizer

CELLS = ("RNNScratch tanh", "LSTMScratch", "GRUScratch", "torch.nn.LSTM proj, 1 layer")
lstm_op = importlib.import_module("jax_models.ops.lstm")
layer_norm_lstm_op = importlib.import_module("jax_models.ops.layer_norm_lstm")
masked_scan = lstm_op.masked_scan
online_conv_op = importlib.import_module("jax_models.ops.online_conv")
long_conv_op = importlib.import_module("jax_models.ops.long_conv")
fft_conv = long_conv_op.fft_conv


def swap_first_gates(layer):
    """The first two gates change places."""
    for param in (layer.cells[0].kernel_ih, layer.cells[0].kernel_hh, layer.cells[0].bias_ih):
        first, second, *rest = jnp.split(param[...], len(layer.gate_names), axis=-1)
        param[...] = jnp.concatenate([second, first, *rest], axis=-1)


def drop_bias(layer):
    """The recurrent bias is forgotten."""
    layer.cells[0].bias_hh[...] = jnp.zeros_like(layer.cells[0].bias_hh[...])


def fold_bias(layer):
    """The recurrent bias moves to the input's: the same, but in a GRU's candidate."""
    cell = layer.cells[0]
    cell.bias_ih[...] = cell.bias_ih[...] + cell.bias_hh[...]
    drop_bias(layer)


def transpose_square(layer):
    """A square recurrent matrix is not transposed, or once too often."""
    kernel = layer.cells[0].kernel_hh
    side = kernel.shape[0]
    kernel[...] = kernel[...].at[:, :side].set(kernel[...][:, :side].T)


FAULTY_WEIGHTS = [
    *((name, swap_first_gates) for name in ("LSTMScratch", "GRUScratch", CELLS[-1])),
    *((name, drop_bias) for name in CELLS),
    ("GRUScratch", fold_bias),
    *((name, transpose_square) for name in (*CELLS, "RNN U W b")),
]


def failures(report: Report) -> set[str]:
    return {dtype for dtype, _, _ in report.failures}


@pytest.mark.parametrize(("name", "fault"), FAULTY_WEIGHTS)
def test_faulty_weights_are_found(monkeypatch, name, fault):
    build = Case.build_layer

    def build_faulty(self, *args):
        layer = build(self, *args)
        fault(layer)
        return layer

    monkeypatch.setattr(Case, "build_layer", build_faulty)
    assert failures(measure(problem(CASES[name]), ["float64", "float32"])) == {"float64", "float32"}


def test_cell_for_hidden_state_is_found(monkeypatch):
    sequence = LSTM.sequence

    def swapped(self, x, state, lengths, reset):
        return sequence(self, x, LSTMState(h=state.c, c=state.h), lengths, reset)

    monkeypatch.setattr(LSTM, "sequence", swapped)
    assert failures(measure(problem(CASES["LSTMScratch"]), ["float64"]))


def scan_with(**changes):
    """The scan, with other masks than it is given."""
    return lambda step, state, xs, **masks: masked_scan(step, state, xs, **{**masks, **changes})


def forget_state(step, state, xs, **masks):
    return masked_scan(step, jax.tree.map(jnp.zeros_like, state), xs, **masks)


def mix_rows(step, state, xs, **masks):
    return masked_scan(step, state, xs + 1e-6 * jnp.roll(xs, 1, axis=0), **masks)


def forget_far_past(step, state, xs, **masks):
    def short_step(state, x):
        new, y = step(jax.tree.map(jnp.zeros_like, state), x)
        return new, y

    return masked_scan(short_step, state, xs, **masks)


def leak_future(step, state, xs, **masks):
    return masked_scan(step, state, xs + 1e-6 * jnp.roll(xs, -1, axis=1), **masks)


def leak_padding(step, state, xs, *, lengths=None, **masks):
    longer = None if lengths is None else jnp.minimum(lengths + 1, xs.shape[1])
    return masked_scan(step, state, xs, lengths=longer, **masks)


FAULTY_SCANS = [
    ("steps equal sequence", forget_state),
    ("cut equals uncut", forget_state),
    ("batch rows are independent", mix_rows),
    ("future has no influence and far past has", leak_future),
    ("future has no influence and far past has", forget_far_past),
    ("padding has no influence", leak_padding),
    ("padding has no influence", scan_with(lengths=None)),
    ("documents in a row stay apart", scan_with(reset=None)),
]


@pytest.mark.parametrize(("check", "fault"), FAULTY_SCANS)
def test_faulty_scan_is_found(monkeypatch, check, fault):
    subject = Subject(CASES["torch.nn.LSTM, 1 layer"])
    CHECKS[check](subject)
    monkeypatch.setattr(lstm_op, "masked_scan", fault)
    with pytest.raises(AssertionError):
        CHECKS[check](Subject(CASES["torch.nn.LSTM, 1 layer"]))


def no_reversal(x, lengths):
    return x


def reversal_of_the_padding_too(x, lengths):
    return jnp.flip(x, axis=1)


def without(function, mask: str):
    """The function, deaf to one of its masks."""
    return lambda *args, **kwargs: function(*args, **{**kwargs, mask: None})


@pytest.mark.parametrize("module", ["causal_conv", "rg_lru", "rwkv"])
@pytest.mark.parametrize(
    ("check", "mask"),
    [("documents in a row stay apart", "reset"), ("padding has no influence", "lengths")],
)
def test_a_forgotten_mask_is_found(monkeypatch, module, check, mask):
    conv = importlib.import_module("jax_models.ops.causal_conv")
    rg_lru = importlib.import_module("jax_models.ops.rg_lru")
    name, owner, function = {
        "causal_conv": ("CausalConv1D, kernel 4", conv, "delayed"),
        "rg_lru": ("RGLRU", rg_lru, "linear_recurrence"),
        "rwkv": ("RWKVTimeMix", ops, "wkv"),
    }[module]
    monkeypatch.setattr(owner, function, without(getattr(owner, function), mask))
    with pytest.raises(AssertionError):
        CHECKS[check](Subject(CASES[name]))


def test_cancellation_close_to_one_is_found(monkeypatch):
    """√(1 − a²) as it is printed loses its digits in float32."""

    def printed(a, exponent):
        p = jnp.broadcast_to(a, exponent.shape) ** exponent
        return p, jnp.sqrt(1 - p**2)

    monkeypatch.setattr(importlib.import_module("jax_models.ops.rg_lru"), "decay", printed)
    assert failures(measure(problem(CASES["RGLRU close to a = 1"]), ["float32"])) == {"float32"}


@pytest.mark.parametrize("fault", ["bonus", "decay", "shift"])
def test_faulty_time_mix_is_found(monkeypatch, fault):
    right = ops.wkv

    def faulty(k, v, state, *, w, u, **options):
        if fault == "bonus":
            return right(k, v, state, w=w, u=jnp.zeros_like(u), **options)
        if fault == "decay":
            return right(k, v, state, w=w + 1e-9, u=u, **options)
        return right(k, jnp.roll(v, 1, axis=1), state, w=w, u=u, **options)

    monkeypatch.setattr(ops, "wkv", faulty)
    assert failures(measure(problem(CASES["RWKVTimeMix"]), ["float64"])) == {"float64"}


def x_before_h(x, kernel_ih):
    """The hyper network's kernel, as if it read [x, h]."""
    return jnp.roll(kernel_ih, -x.shape[-1], axis=0)


def f_before_i(x, kernel_ih):
    """The hyper network's kernel, its first two gates in each other's place."""
    i, f, g, o = jnp.split(kernel_ih, 4, axis=1)
    return jnp.concatenate([f, i, g, o], axis=1)


@pytest.mark.parametrize("fault", [x_before_h, f_before_i])
def test_faulty_hyper_network_is_found(monkeypatch, fault):
    right = ops.hyper_lstm

    def faulty(x, state, *, hyper_kernel_ih, **options):
        return right(x, state, hyper_kernel_ih=fault(x, hyper_kernel_ih), **options)

    monkeypatch.setattr(ops, "hyper_lstm", faulty)
    assert failures(measure(problem(CASES["HyperLSTM 1 layer"]), ["float64"])) == {"float64"}


@pytest.mark.parametrize(
    ("name", "module"), [("LayerNormLSTM", "layer_norm_lstm"), ("HyperLSTM 1 layer", "hyper_lstm")]
)
def test_a_carried_cell_that_is_normalised_is_found(monkeypatch, name, module):
    op = importlib.import_module(f"jax_models.ops.{module}")
    cell, norm = op.layer_norm_cell, layer_norm_lstm_op.layer_norm

    def faulty(gates, c, norms):
        state = cell(gates, c, norms)
        return state._replace(c=norm(state.c, norms.cell_scale, norms.cell_bias))

    monkeypatch.setattr(op, "layer_norm_cell", faulty)
    assert failures(measure(problem(CASES[name]), ["float64"])) == {"float64"}


def over_the_features(method, v, h):
    """Along the wrong axis: no step sees another."""
    return jnp.swapaxes(fft_conv(method, jnp.swapaxes(v, 1, 2), jnp.swapaxes(h, 0, 1)), 1, 2)


def over_the_circle(method, v, h):
    """Without room for what wraps around: the end reaches the beginning."""
    return jnp.fft.irfft(jnp.fft.rfft(v) * jnp.fft.rfft(h)[None], v.shape[-1])


def over_the_rows(method, v, h):
    """Each row's outputs with a little of another's."""
    return fft_conv(method, v + 1e-6 * jnp.roll(v, 1, axis=0), h)


FAULTY_CONVOLUTIONS = [
    ("future has no influence and far past has", over_the_features),
    ("future has no influence and far past has", over_the_circle),
    ("batch rows are independent", over_the_rows),
    ("steps equal sequence", over_the_circle),
]


@pytest.mark.parametrize(("check", "fault"), FAULTY_CONVOLUTIONS)
def test_faulty_convolution_is_found(monkeypatch, check, fault):
    for op in (long_conv_op, online_conv_op):
        monkeypatch.setattr(op, "fft_conv", fault)
    jax.clear_caches()
    with pytest.raises(AssertionError):
        CHECKS[check](Subject(CASES["AuthenticHyenaBlock, explicit, order 2"]))
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("forgotten", ["_ahead", "_tile"])
def test_a_forgotten_part_of_an_online_convolution_is_found(monkeypatch, forgotten):
    right = getattr(online_conv_op, forgotten)
    monkeypatch.setattr(online_conv_op, forgotten, lambda *args: 0 * right(*args))
    jax.clear_caches()
    with pytest.raises(AssertionError):
        CHECKS["steps equal sequence"](Subject(CASES["HyenaBlock, order 1, kernel 4"]))
    monkeypatch.undo()
    jax.clear_caches()


def test_a_head_of_another_matrix_is_found(monkeypatch):
    monkeypatch.setattr(GPModel, "head", lambda self, x: x @ self.pos_embedding.embedding[:11].T)
    assert failures(measure(problem(CASES["GPModel of hyena"]), ["float64"])) == {"float64"}


def test_trained_constants_are_found(monkeypatch):
    hyena_filter = importlib.import_module("jax_models.hyena_filter")
    monkeypatch.setattr(hyena_filter, "Constant", nnx.Param)
    name = "HyenaBlock, order 1, kernel 4"
    case = dataclasses.replace(CASES[name], name=f"{name}, faulty")
    with pytest.raises(AssertionError):
        CHECKS["optimiser follows the same trajectory"](Subject(case))


@pytest.mark.parametrize(
    ("check", "name", "fault"),
    [
        ("padding has no influence", "reverse_time", reversal_of_the_padding_too),
        ("documents in a row stay apart", "document_ends", lambda reset: reset),
        ("future has no influence and far past has", "reverse_time", no_reversal),
    ],
)
def test_faulty_backward_stack_is_found(monkeypatch, check, name, fault):
    bidirectional = importlib.import_module("jax_models.bidirectional")
    monkeypatch.setattr(bidirectional, name, fault)
    with pytest.raises(AssertionError):
        CHECKS[check](Subject(CASES["RNNBidirectional 1 layer"]))


@pytest.mark.parametrize(
    ("check", "forgotten"),
    [("steps equal sequence", "start"), ("documents in a row stay apart", "reset")],
)
def test_faulty_positions_are_found(monkeypatch, check, forgotten):
    language_model = importlib.import_module("jax_models.language_model")
    right = language_model.positions_after

    def faulty(start, time, reset):
        if forgotten == "start":
            return right(jnp.zeros_like(start), time, reset)
        return right(start, time, None)

    monkeypatch.setattr(language_model, "positions_after", faulty)
    with pytest.raises(AssertionError):
        CHECKS[check](Subject(CASES["RNNLanguageModel"]))


def test_nan_from_the_padding_is_found(monkeypatch):
    sequence = importlib.import_module("jax_models.sequence")
    monkeypatch.setattr(sequence, "mask_padding", lambda x, lengths: x)
    with pytest.raises(AssertionError):
        CHECKS["gradients of padding are zero and finite"](Subject(CASES["LSTMScratch"]))


@pytest.mark.parametrize(
    "change", [{"weight_decay": 0.0101}, {"eps": 1e-7}, {"b2": 0.9991}, {"nesterov": True}]
)
def test_another_optimiser_is_found(monkeypatch, change):
    adamw = optimizer.optax.adamw

    def changed(rate, b1, b2, **options):
        return adamw(rate, **{"b1": b1, "b2": b2, **options, **change})

    monkeypatch.setattr(optimizer.optax, "adamw", changed)
    with pytest.raises(AssertionError):
        CHECKS["optimiser follows the same trajectory"](Subject(CASES["RNNScratch tanh"]))


def test_inexact_round_trip_is_found(monkeypatch):
    export = checks.to_torch

    @functools.wraps(export)
    def inexact(*args):
        return {key: np.nextafter(a, a.dtype.type(1)) for key, a in export(*args).items()}

    monkeypatch.setattr(checks, "to_torch", inexact)
    with pytest.raises(AssertionError):
        CHECKS["weights make the round trip bit for bit"](Subject(CASES["RNNScratch tanh"]))
