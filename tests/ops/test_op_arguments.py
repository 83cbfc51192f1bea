"""Every operator with one wrong argument at a time raises a one-line error that names it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_models import ops
from jax_models.ops.linear import LINEAR_RECURRENCE

BATCH, TIME, IN, HIDDEN, OUT, HYPER, EMBEDDING, TAPS, MAX_LENGTH = 2, 3, 5, 6, 4, 7, 8, 3, 40
SIZES = dict(zip("BTIHOYEK", (BATCH, TIME, IN, HIDDEN, OUT, HYPER, EMBEDDING, TAPS), strict=True))
MASKS = {"lengths": np.array([3, 1], np.int32), "reset": np.zeros((BATCH, TIME), bool)}
POSITIONS = np.arange(BATCH * TIME, dtype=np.int32).reshape(BATCH, TIME)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.9, shape), jnp.float32)


def arrays(**shapes: str) -> dict[str, jax.Array]:
    """Arrays by name. A letter of `SIZES` stands for an axis."""
    return {
        name: array(*(eval(axis, {}, SIZES) for axis in shape.split()))
        for name, shape in shapes.items()
    }


def norms(size: str) -> ops.LSTMNorms:
    return ops.LSTMNorms(**arrays(
        gate_scale=f"4*{size}", gate_bias=f"4*{size}", cell_scale=size, cell_bias=size
    ))  # fmt: skip


def gated(gates: int) -> dict[str, jax.Array]:
    width = f"{gates}*H"
    return arrays(
        kernel_ih=f"I {width}", kernel_hh=f"H {width}", bias_ih=width, bias_hh=width, x="B T I"
    )


CONV = {
    "taps": lambda params, length: params[:, :length],
    "params": array(IN, MAX_LENGTH),
    "max_length": MAX_LENGTH,
}
OPS = {
    "rnn": gated(1) | MASKS | {"state": ops.RNNState(array(BATCH, HIDDEN))},
    "gru": gated(3) | MASKS | {"state": ops.GRUState(array(BATCH, HIDDEN))},
    "lstm": MASKS | arrays(
        x="B T I", kernel_ih="I 4*H", kernel_hh="O 4*H", bias_ih="4*H", bias_hh="4*H",
        kernel_hr="H O", bias_hr="O", peephole="3*H",
    ) | {"state": ops.LSTMState(array(BATCH, OUT), array(BATCH, HIDDEN))},
    "layer_norm_lstm": MASKS
    | arrays(x="B T I", kernel_ih="I 4*H", kernel_hh="H 4*H", bias="4*H")
    | {"state": ops.LSTMState(*array(2, BATCH, HIDDEN)), "norms": norms("H")},
    "hyper_lstm": MASKS | arrays(
        x="B T I", kernel_ih="I 4*H", kernel_hh="H 4*H", hyper_kernel_ih="H+I 4*Y",
        hyper_kernel_hh="Y 4*Y", hyper_bias="4*Y", z_kernel="Y 12*E", z_bias="8*E",
        d_kernel="E 12*H", d_bias="4*H",
    ) | {
        "state": ops.HyperLSTMState(*array(2, BATCH, HIDDEN), *array(2, BATCH, HYPER)),
        "norms": norms("H"), "hyper_norms": norms("Y"),
    },
    "rg_lru": MASKS
    | arrays(x="B T H", a="H", input_kernel="H H", recurrence_kernel="H H")
    | {"state": ops.RGLRUState(array(BATCH, HIDDEN))},
    "rg_lru in blocks": MASKS | arrays(
        x="B T 3*I", a_param="3*I", input_kernel="3 I I", input_bias="3 I",
        recurrence_kernel="3 I I", recurrence_bias="3 I",
    ) | {"state": ops.RGLRUState(array(BATCH, 3 * IN)), "first": MASKS["reset"]},
    "decay": arrays(a="H", exponent="B T H"),
    "softplus_decay": arrays(a_param="H", exponent="B T H"),
    "rotary": {"x": array(BATCH, TIME, 2, 4), "positions": POSITIONS, "rotated": 4},
    "local_attention": MASKS | {
        "q": array(BATCH, TIME, 4, IN), "k": array(BATCH, TIME, 2, IN),
        "v": array(BATCH, TIME, 2, IN),
        "state": ops.LocalAttentionState(POSITIONS[:, 0], *array(2, BATCH, 3, 2, IN)),
    },
    "linear_recurrence": MASKS | arrays(a="B T H", b="B T H", h0="B H"),
    "modal_conv": MASKS
    | arrays(v="B T H", poles="H O 2", residues="H O 2", skip="H")
    | {"state": ops.ModalConvState(array(BATCH, HIDDEN, OUT, 2))},
    "selective_scan": MASKS
    | arrays(u="B T H", dt="B T H", A="H O", B="B T O", C="B T O", state="B H O"),
    "wkv": MASKS
    | arrays(k="B T H", v="B T H", w="H", u="H")
    | {"state": ops.WKVState(*array(3, BATCH, HIDDEN))},
    "causal_conv": MASKS
    | arrays(x="B T H", kernel="K H", bias="H")
    | {"state": ops.CausalConv1DState(array(BATCH, HIDDEN, TAPS - 1))},
    "delayed": MASKS
    | arrays(x="B T H")
    | {"state": ops.CausalConv1DState(array(BATCH, HIDDEN, TAPS - 1))},
    "long_conv": arrays(v="B I T", h="I T", skip="I"),
    "long_conv_state": arrays(v="B I T") | CONV | {"lengths": MASKS["lengths"]},
    "online_conv": arrays(v="B I T", skip="I") | CONV | {
        "lengths": MASKS["lengths"], "state": ops.empty_long_conv_state(BATCH, IN, MAX_LENGTH),
    },
    "attention": arrays(q="B T O E", k="B H O E", v="B H O E")
    | {"mask": np.ones((BATCH, TIME, HIDDEN), bool)},
    "affine": arrays(x="B I", kernel="I H", bias="H"),
    "affine in blocks": arrays(x="B 3*I", kernel="3 I H", bias="3*H"),
    "document_ends": {"reset": MASKS["reset"]},
    "delta_rule": MASKS
    | arrays(r="B T E O", log_w="B T E O", k="B T E O", v="B T E H", a="B T E O", b="B T E O")
    | {"state": array(BATCH, EMBEDDING, HIDDEN, OUT)},
    "gated_delta_rule": MASKS
    | arrays(q="B T O//2 I", k="B T O//2 I", v="B T O H", log_decay="B T O", beta="B T O")
    | {"state": array(BATCH, OUT, HIDDEN, IN)},
    "grouped_dot": arrays(x="B I", kernels="T I O") | {"sizes": np.array([1, 0, 1], np.int32)},
}  # fmt: skip
FAULTS = {
    "another kind of dtype": lambda a: a.astype(np.float32 if a.dtype != np.float32 else np.int32),
    "a complex dtype": lambda a: a.astype(np.complex64),
    "an axis more": lambda a: a[None],
    "no axis": lambda a: a.ravel()[0],
    "one more along the last axis": lambda a: jnp.concatenate([a, a[..., :1]], -1),
    "one along the last axis": lambda a: a[..., :1],
    "a list": lambda a: a.tolist(),
    "a tensor of torch": lambda a: torch.from_numpy(np.array(a)),
    "a shape alone": lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
}
ALLOWED = {
    ("affine", "x", "an axis more"), ("affine in blocks", "x", "an axis more"),
    ("affine", "kernel", "an axis more"), ("affine in blocks", "kernel", "an axis more"),
    ("decay", "exponent", "an axis more"), ("softplus_decay", "exponent", "an axis more"),
    ("rotary", "x", "one more along the last axis"),
    ("linear_recurrence", "a", "a complex dtype"), ("linear_recurrence", "b", "a complex dtype"),
    ("document_ends", "reset", "one more along the last axis"),
    ("document_ends", "reset", "one along the last axis"),
    ("long_conv_state", "v", "one more along the last axis"),
    ("long_conv_state", "v", "one along the last axis"),
    ("online_conv", "v", "one more along the last axis"),
    ("online_conv", "v", "one along the last axis"),
    ("delayed", "state.inputs", "one more along the last axis"),
    ("delayed", "state.inputs", "one along the last axis"),
    ("attention", "v", "one more along the last axis"),
    ("attention", "v", "one along the last axis"),
    ("grouped_dot", "kernels", "one more along the last axis"),
    ("grouped_dot", "kernels", "one along the last axis"),
}  # fmt: skip
"""Cases that are allowed, because a size is free or more axes are possible."""
ONE_LINE = r"[\w.]+: expected .+, got .+"


def operator(name: str):
    return getattr(ops, name.removesuffix(" in blocks"))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPS)
def test_an_operator_refuses(name, fault):
    arrays = {
        k: v for k, v in OPS[name].items() if k not in ("taps", "params", "max_length", "rotated")
    }
    others = {k: v for k, v in OPS[name].items() if k not in arrays}
    leaves, structure = jax.tree_util.tree_flatten_with_path(arrays)
    for wrong, (path, leaf) in enumerate(leaves):
        argument = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
        if (name, argument, fault) in ALLOWED:
            continue
        values = [FAULTS[fault](leaf) if i == wrong else a for i, (_, a) in enumerate(leaves)]
        with pytest.raises((TypeError, ValueError)) as error:  # noqa: PT012
            operator(name)(**jax.tree.unflatten(structure, values), **others)
            pytest.fail(f"{argument}: {fault}: accepted")
        assert re.match(ONE_LINE, str(error.value))


def tanh_step(state, now):
    return ops.RNNState(jnp.tanh(now.product("z", state.h)))


RECURRENCE = {
    "step": tanh_step,
    "state": ops.RNNState(array(2, 4)),
    "products": {"z": ops.Product(array(4, 4), kernel_x=array(5, 4))},
    "x": array(BATCH, TIME, 5),
}
CELL = {"kernel_ih": array(4, 16), "kernel_hh": array(4, 16)}
STACK = {
    "x": array(BATCH, TIME, 4),
    "state": ops.LSTMState(*array(2, 2, BATCH, 4)),
    "cells": [CELL, CELL],
    "num_directions": 1,
}
OTHERS = {"recurrence": RECURRENCE, "lstm_stack": STACK}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("l2_normalize", {"x": array(3), "epsilon": 0}, "epsilon:"),
        ("lstm", {"lengths": np.array([4, -1])}, "lengths:"),
        ("lstm", {"state": ops.RNNState(array(2, 4))}, "state:"),
        ("lstm", {"params": array(4)}, "lstm: params: no such"),
        ("lstm", {"starts": np.array([0, 1])}, "lstm: starts: .* padding only at the end"),
        ("lstm", {"num_layers": 2}, "lstm: num_layers: .*; ops.recurrent_stack"),
        ("gru", {"bidirectional": True}, "gru: bidirectional: .*; ops.recurrent_stack"),
        ("gru", {"kernel_init": None}, "gru: kernel_init: .* weights themselves"),
        ("wkv", {"dtype": jnp.float32}, "wkv: dtype: .* dtypes of the arrays"),
        ("linear_recurrence", {"state": array(2, 3)}, "linear_recurrence: state: .* h0"),
        ("lstm_stack", {"bidirectional": True}, "bidirectional: .* num_directions"),
        ("lstm_stack", {"num_layers": 2}, "num_layers: .* cells"),
        ("lstm", {"reverse": "no"}, "reverse:"),
        ("rnn", {"nonlinearity": "gelu"}, "nonlinearity:"),
        ("rg_lru", {"a": None}, "a, a_param:"),
        ("rotary", {"rotated": 3}, "rotated:"),
        ("local_attention", {"q": array(BATCH, TIME, 3, IN)}, "k:"),
        ("attention", {"q": array(BATCH, TIME, 4, 0)}, "q:"),
        ("causal_conv", {"kernel": array(0, HIDDEN)}, "kernel:"),
        ("rg_lru", {"c": -1}, "c:"),
        ("lstm", {"kernel_hr": None, "bias_hr": array(4)}, "bias_hr:"),
        ("attention", {"dropout": 0.5}, "dropout:"),
        ("online_conv", {"taps": None}, "taps:"),
        ("online_conv", {"params": array(IN + 1, MAX_LENGTH)}, r"taps\(.*:"),
        ("long_conv_state", {"params": array(IN, 9)}, r"taps\(params, length\):"),
        ("wkv", {"method": "chunked"}, "method:"),
        ("delta_rule", {"b": None}, "a, b:"),
        ("delta_rule", {"u": array(EMBEDDING, OUT)}, "u:"),
        ("delta_rule", {"state": array(BATCH, EMBEDDING, OUT, HIDDEN)}, "state:"),
        ("delta_rule", {"min_log_w": -np.inf}, "min_log_w:"),
        ("delta_rule", {"min_log_w": 0.5}, "min_log_w:"),
        ("delta_rule", {"method": "parallel"}, "method:"),
        ("grouped_dot", {"sizes": np.zeros(4, np.int32)}, "sizes:"),
        ("grouped_dot", {"method": "dense"}, "method:"),
        ("gated_delta_rule", dict.fromkeys("qk", array(BATCH, TIME, 3, IN)), "v:"),
        ("gated_delta_rule", {"log_decay": array(BATCH, TIME, OUT, IN + 1)}, "log_decay:"),
        ("causal_conv", {"kernel": array(2, 6)}, "state.inputs:"),
        ("online_conv", {"max_length": 0}, "max_length:"),
        ("lstm_stack", {"method": "cuda"}, "method:"),
        ("lstm_stack", {"num_directions": 3}, "num_directions"),
        ("lstm_stack", {"cells": []}, "cells:"),
        ("lstm_stack", {"state": ops.LSTMState(*array(2, 3, BATCH, 4))}, "cells:"),
        ("recurrence", {"step": None}, "step:"),
        ("recurrence", {"state": ops.LSTMState(array(2, 4), array(2, 4))}, "step:"),
        ("recurrence", {"state": (array(2, 4),)}, "state:"),
        ("recurrence", {"state": ops.RNNState(array(3, 4))}, "state.h:"),
        ("recurrence", {"inputs": array(TIME, BATCH)}, "inputs:"),
        ("recurrence", {"params": "tanh"}, "params:"),
        ("recurrence", {"x": array(BATCH, TIME, 6)}, r"products\['z'\].kernel_x:"),
        *(
            ("recurrence", {"products": products}, message)
            for products, message in (
                ({}, "products:"),
                ([ops.Product(array(4, 4))], "products:"),
                ({"z": array(4, 4)}, r"products\['z'\]:"),
                ({"q": ops.Product(array(4, 4))}, r"products \['q'\] once, .* for \['z'\]"),
                ({"z": ops.Product(array(4, 4), bias_x=array(4))}, r"products\['z'\].bias_x"),
            )
        ),
    ],
)  # fmt: skip
def test_the_message_names_the_argument(name, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        operator(name)(**(OPS | OTHERS).get(name, {}) | change)


@pytest.mark.parametrize("empty_state", [ops.empty_wkv_state, ops.empty_long_conv_state])
@pytest.mark.parametrize("wrong", [{"batch_size": -1}, {"features": 2.5}, {"dtype": int}], ids=str)
def test_an_empty_state_names_the_argument(empty_state, wrong):
    sizes = {"batch_size": 1, "features": 3, "dtype": "float32"}
    sizes |= {"max_length": 16} if empty_state is ops.empty_long_conv_state else {}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        empty_state(**sizes | wrong)


def test_a_state_is_taken_in_the_dtype_of_the_loop():
    narrow = ops.RNNState(RECURRENCE["state"].h.astype(jnp.bfloat16))
    wide = ops.RNNState(narrow.h.astype(jnp.float32))
    found, expected = (ops.recurrence(**RECURRENCE | {"state": s}) for s in (narrow, wide))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPS if "lengths" in OPS[name]])
def test_rows_of_traced_lengths_outside_are_nan(name):
    given = {k: v for k, v in OPS[name].items() if k != "lengths"}
    call = jax.jit(lambda lengths: operator(name)(**given, lengths=lengths))
    expected = call(np.array([TIME, 0]))
    for outside, (wrong, right) in (([300, 0], (0, 1)), ([TIME, -5], (1, 0))):
        for found, array in zip(
            *map(jax.tree.leaves, (call(np.array(outside)), expected)), strict=True
        ):
            np.testing.assert_array_equal(found[right], array[right])
            if array.dtype == jnp.int32:
                np.testing.assert_array_equal(found[wrong], array[wrong])
            else:
                assert jnp.isnan(found[wrong]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_a_batch_without_rows(name):
    """The first axis of an argument has the size BATCH only if it is the batch.

    All arguments of `OPS` are right, before `test_an_operator_refuses` makes one wrong.
    """
    empty = jax.tree.map(
        lambda a: a[:0] if getattr(a, "shape", ())[:1] == (BATCH,) else a, OPS[name]
    )
    assert {len(array) for array in jax.tree.leaves(operator(name)(**empty))} == {0}


@pytest.mark.parametrize("method", ["auto", *LINEAR_RECURRENCE.forms])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_a_size_of_0(shape, method):
    batch, _, features = shape
    h, last = ops.linear_recurrence(array(*shape), array(*shape), method=method)
    assert h.shape == shape and last.shape == (batch, features)  # noqa: PT018
    y = ops.affine(array(*shape), array(features, 5), array(5))
    np.testing.assert_array_equal(y, jnp.broadcast_to(array(5), y.shape) + 0 * y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_without_a_key_is_zero(dtype):
    q, k, v = (array(1, 3, 2, 4).astype(dtype) for _ in range(3))
    mask = jnp.tri(3, k=-1, dtype=bool)[None]  # the first query sees no key
    attend = jax.jit(lambda q, k, v: ops.attention(q, k, v, mask))
    y, gradients = attend(q, k, v), jax.grad(lambda *a: attend(*a).sum(), (0, 1, 2))(q, k, v)
    assert jnp.all(y[:, 0] == 0)
    np.testing.assert_array_equal(y[:, 1], v[:, 0])
    for gradient in gradients:
        assert jnp.isfinite(gradient).all()
