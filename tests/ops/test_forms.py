"""Every form of an operator equals its definition, and the right one runs."""

import importlib
import pkgutil
import re
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_models import GRU, LSTM, RNN, entry_points, ops
from jax_models.entry_points import DuplicateNameError
from jax_models.ops import forms
from jax_models.ops.attention import tiles
from jax_models.ops.forms import Form, Operator
from jax_models.ops.grouped import GROUPED_OUTER
from jax_models.ops.grouped.definition import Groups, OuterProducts
from jax_models.ops.removed_forms import REMOVED_FORMS
from jax_models.ops.rows import Rows
from parity_tests.engine.bounds.tolerance import assert_same


def operators() -> dict[str, Operator]:
    """All operators that choose among forms, by name."""
    modules = pkgutil.walk_packages(ops.__path__, "jax_models.ops.")
    values = (vars(importlib.import_module(module.name)).values() for module in modules)
    return {each.name: each for found in values for each in found if isinstance(each, Operator)}


OPERATORS = operators()

# Random calls


def norms(size: str) -> dict[str, str]:
    """The shapes of the norms of an LSTM, under the names of their fields."""
    wide = f"4*{size}"
    return {"gate_scale": wide, "gate_bias": wide, "cell_scale": size, "cell_bias": size}


def cell(gates: int, **others) -> dict[str, str]:
    """The shapes of the weights of a cell with I inputs and H hidden units."""
    return {"kernel_ih": f"I {gates}*H", "kernel_hh": f"H {gates}*H", **others}


def biased(gates: int, **others) -> dict[str, str]:
    return cell(gates, bias_ih=f"{gates}*H", bias_hh=f"{gates}*H", **others)


PROJECTION = {"kernel_hh": "P 4*H", "kernel_hr": "H P", "bias_hr": "P"}
STACKED = {
    "lstm": (ops.lstm, ops.LSTMState, "H H", biased(4)),
    "lstm without bias": (ops.lstm, ops.LSTMState, "H H", cell(4)),
    "lstm with one bias": (ops.lstm, ops.LSTMState, "H H", cell(4, bias_ih="4*H")),
    "lstm with peepholes": (ops.lstm, ops.LSTMState, "H H", biased(4, peephole="3*H")),
    "projected lstm": (ops.lstm, ops.LSTMState, "P H", biased(4) | PROJECTION),
    "gru": (ops.gru, ops.GRUState, "H", biased(3)),
    "gru without bias": (ops.gru, ops.GRUState, "H", cell(3)),
    "gru with the reset before": (
        partial(ops.gru, reset_after=False), ops.GRUState, "H", biased(3)
    ),
    "rnn": (ops.rnn, ops.RNNState, "H", biased(1)),
    "rnn of relu": (partial(ops.rnn, nonlinearity="relu"), ops.RNNState, "H", biased(1)),
}  # fmt: skip
"""Recurrences: the operator, the type of the state, its sizes, and the shapes of the weights."""
CELLS = STACKED | {
    "layer_norm_lstm": (
        ops.layer_norm_lstm, ops.LSTMState, "H H", cell(4, bias="4*H", norms=norms("H"))
    ),
    "hyper_lstm": (
        ops.hyper_lstm, ops.HyperLSTMState, "H H Y Y", cell(
            4, norms=norms("H"), hyper_norms=norms("Y"), hyper_kernel_ih="H+I 4*Y",
            hyper_kernel_hh="Y 4*Y", hyper_bias="4*Y", z_kernel="Y 12*E", z_bias="8*E",
            d_kernel="E 12*H", d_bias="4*H",
        ),
    ),
}  # fmt: skip


class Draw:
    """Draws random sizes, masks and arrays of a call."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        most = {"B": 5, "T": 20, "I": 8, "H": 30, "P": 4, "Y": 5, "E": 3}
        self.sizes = {name: int(self.rng.integers(1, most[name] + 1)) for name in most}

    def array(self, shape: str | dict[str, str]):
        """An array, or the norms of an LSTM. Each letter stands for a size."""
        if isinstance(shape, dict):
            return ops.LSTMNorms(**{name: self.array(each) for name, each in shape.items()})
        sizes = [eval(axis, {}, self.sizes) for axis in shape.split()]
        return jnp.asarray(0.5 * self.rng.standard_normal(sizes))

    def flag(self, probability: float = 0.5) -> bool:
        """True or False."""
        return bool(self.rng.random() < probability)

    def masks(self) -> dict[str, np.ndarray]:
        """Mostly lengths and resets."""
        batch, time = self.sizes["B"], self.sizes["T"]
        masks = {
            "lengths": self.rng.integers(0, time + 1, batch),
            "reset": self.rng.random((batch, time)) < 0.3,
        }
        return {name: mask for name, mask in masks.items() if self.flag(0.8)}


def draw_recurrence(cell: str, draw: Draw):
    operator, state_type, state, shapes = CELLS[cell]
    reverse, masks = draw.flag(), draw.masks()
    weights = {name: draw.array(shape) for name, shape in shapes.items()}
    state = state_type(*(draw.array(f"B {size}") for size in state.split()))

    def run(method, x, state, weights):
        return operator(x, state, **weights, **masks, reverse=reverse, method=method)

    return run, (draw.array("B T I"), state, weights), masks


def draw_recurrent_stack(cell: str, draw: Draw):
    recurrence, state_type, state, shapes = STACKED[cell]
    directions, masks = 1 + draw.flag(), draw.masks()
    count, inputs = directions * (1 + draw.flag()), draw.sizes["I"]
    state = state_type(*(draw.array(f"{count} B {size}") for size in state.split()))
    x, cells = draw.array("B T I"), []
    for index in range(count):
        draw.sizes["I"] = inputs if index < directions else directions * state.h.shape[2]
        cells.append({name: draw.array(shape) for name, shape in shapes.items()})

    def run(method, x, state, cells):
        options = {"num_directions": directions, "method": method}
        return ops.recurrent_stack(recurrence, x, state, cells, **masks, **options)

    return run, (x, state, cells), masks


DELTA_RULES = {
    "any decay": {},
    "a least log decay": {"min_log_w": -0.6},
    "no correction": {},
    "a bonus": {},
}
"""Kinds of calls of `delta_rule`, with their options."""


def draw_delta_rule(kind: str, draw: Draw):
    draw.sizes["T"] *= 8  # several chunks
    masks = draw.masks()
    removal = ops.l2_normalize(draw.array("B T E I"))
    arrays = {"r": draw.array("B T E I"), "k": draw.array("B T E I")}
    arrays |= {"log_w": -jnp.exp(3 * draw.array("B T E I")), "state": draw.array("B E Y I")}
    if kind == "a bonus":
        arrays["u"] = draw.array("E I")
    elif kind != "no correction":
        arrays |= {"a": -removal, "b": draw.array("B T E I") * removal}

    def run(method, v, arrays):
        return ops.delta_rule(v=v, **arrays, **DELTA_RULES[kind], **masks, method=method)

    return run, (draw.array("B T E Y"), arrays), masks


GATED_DELTA_RULES = {
    "corrected": {"normalize": True, "scale": 0.3},
    "not corrected": {},
    "not corrected, normalized": {"normalize": True, "scale": 0.3},
    "a decay for each feature": {"normalize": True, "scale": 0.3},
    "a decay for each feature, not corrected": {},
}
"""Kinds of calls of `gated_delta_rule`, with their options."""


def draw_gated_delta_rule(kind: str, draw: Draw):
    draw.sizes["T"] *= 8
    masks, beta = draw.masks(), "not corrected" not in kind
    arrays = {"q": draw.array("B T E I"), "k": draw.array("B T E I")}
    decays = "B T 2*E I" if "feature" in kind else "B T 2*E"
    arrays |= {"log_decay": -jnp.exp(3 * draw.array(decays)), "state": draw.array("B 2*E Y I")}
    arrays["beta"] = jax.nn.sigmoid(draw.array("B T 2*E")) if beta else None

    def run(method, v, arrays):
        options = GATED_DELTA_RULES[kind]
        return ops.gated_delta_rule(v=v, **arrays, **options, **masks, method=method)

    return run, (draw.array("B T 2*E Y"), arrays), masks


def draw_linear_recurrence(kind: str, draw: Draw):
    reverse, masks = draw.flag(), draw.masks()
    arrays = [draw.array(shape) for shape in ("B T H", "B T H", "B H")]
    if kind == "complex":
        arrays = [jax.lax.complex(a, draw.array(" ".join(map(str, a.shape)))) for a in arrays]

    def run(method, a, b, h0):
        return ops.linear_recurrence(a, b, h0, **masks, reverse=reverse, method=method)

    return run, arrays, masks


def draw_wkv(kind: str, draw: Draw):
    masks = draw.masks()
    arrays = [draw.array(shape) for shape in ("B T H", "B T H", "H", "H", "B H", "B H", "B H")]

    def run(method, k, v, log_w, u, num, log_den, largest):
        state = ops.WKVState(num, jnp.exp(log_den), largest)
        w = jnp.exp(log_w)
        y, (num, den, largest) = ops.wkv(k, v, state, w=w, u=u, **masks, method=method)
        return y, (num / den, jnp.log(den) + largest)  # the forms may scale the sums differently

    return run, arrays, masks


def draw_modal_conv(kind: str, draw: Draw):
    draw.sizes["T"] *= 5  # several chunks
    masks = {name: mask for name, mask in draw.masks().items() if name == kind}
    v, modes, poles, residues, skip = (
        draw.array(shape) for shape in ("B T I", "B I H 2", "I H 2", "I H 2", "I")
    )

    def run(method, v, modes, poles, residues, skip):
        poles = 0.7 * jnp.tanh(poles)  # inside the unit circle
        weights = {"poles": poles, "residues": residues, "skip": skip}
        return ops.modal_conv(v, ops.ModalConvState(modes), **weights, **masks, method=method)

    return run, (v, modes, poles, residues, skip), masks


def draw_selective_scan(kind: str, draw: Draw):
    draw.sizes["T"] *= 5  # several chunks
    masks = {name: mask for name, mask in draw.masks().items() if kind == "masked"}
    shapes = "B T H", "B T H", "H I", "B T I", "B T I", "B H I"

    def run(method, u, dt, A, B, C, state):
        dt, A = jax.nn.softplus(dt), -jnp.exp(A)
        return ops.selective_scan(u, dt, A, B, C, state, **masks, method=method)

    return run, [draw.array(shape) for shape in shapes], masks


def draw_attention(kind: str, draw: Draw):
    draw.sizes["T"] += 20  # several tiles
    masks = {} if kind == "whole" else draw.masks()
    position = draw.rng.integers(0, 60, draw.sizes["B"]).astype(np.int32)
    heads = 16 if kind == "whole" else 2  # the kernels divide many heads among threads as a whole
    of_keys = f"B T {heads} P", f"B T {heads} I", f"B H {heads} P", f"B H {heads} I"
    shapes = f"B T {2 * heads} P", *of_keys

    def run(method, q, k, v, keys, values):
        if kind == "whole":
            return ops.attention(q, k, v, method=method), ()
        state = ops.LocalAttentionState(position, keys, values)
        empty = kind == "empty"
        y, last = ops.local_attention(q, k, v, state, **masks, empty=empty, method=method)
        return y, (last.keys, last.values)

    return run, [draw.array(shape) for shape in shapes], masks


def draw_long_conv(kind: str, draw: Draw):
    def run(method, v, h, skip):
        y = ops.long_conv(jnp.swapaxes(v, 1, 2), h, skip, method=method)
        return jnp.swapaxes(y, 1, 2), ()

    return run, [draw.array(shape) for shape in ("B T I", "I T", "I")], {}


GROUPS = {"rows after the last group": (100, 0, 41, 7), "no other rows": (3, 80, 0, 0)}
"""The sizes of the groups of rows. The smallest block has 32 rows."""


def draw_grouped_dot(kind: str, draw: Draw):
    sizes = np.array(GROUPS[kind])
    rows = sizes.sum() + (9 if kind == "rows after the last group" else 0)

    def run(method, x, kernels):
        is_member = np.arange(rows)[:, None] < sizes.sum()
        x = jnp.where(is_member, x, jnp.nan)  # the other rows are not read
        return ops.grouped_dot(x, kernels, sizes, method=method), ()

    return run, (draw.array(f"{rows} I"), draw.array("4 I H")), {}


def draw_grouped_outer(kind: str, draw: Draw):
    _, (x, _), masks = draw_grouped_dot(kind, draw)
    groups = Groups.of(jnp.array(GROUPS[kind]))

    def run(method, x, y):
        return GROUPED_OUTER(OuterProducts(x, y, groups), method), ()

    return run, (x, draw.array(f"{len(x)} H")), masks


CALLS = {
    "recurrence": (draw_recurrence, CELLS),
    "recurrent_stack": (draw_recurrent_stack, STACKED),
    "delta_rule": (draw_delta_rule, DELTA_RULES),
    "gated_delta_rule": (draw_gated_delta_rule, GATED_DELTA_RULES),
    "linear_recurrence": (draw_linear_recurrence, ("real", "complex")),
    "wkv": (draw_wkv, ("real",)),
    "modal_conv": (draw_modal_conv, ("whole", "lengths", "reset")),
    "selective_scan": (draw_selective_scan, ("whole", "masked")),
    "attention": (draw_attention, ("whole", "local", "empty")),
    "long_conv": (draw_long_conv, ("real",)),
    "grouped_dot": (draw_grouped_dot, GROUPS),
    "grouped_outer": (draw_grouped_outer, GROUPS),
}
"""For each operator, a function that draws a call, and the kinds of calls to draw.

`draw(kind, Draw(seed))` returns `run(method, *arrays)`, its arrays, and the masks.
"""
FORMS = [
    pytest.param(
        *(operator, form, kind, seed),
        id=f"{name}, {form.name}, {kind}",
        marks=[pytest.mark.slow] if seed else [],
    )
    for name, operator in OPERATORS.items()
    for form in operator.forms.values()
    if form not in (*operator.other_forms, operator.own_forms[-1])
    for seed, kind in enumerate(CALLS[name][1])
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("operator", "form", "kind", "seed"), FORMS)
def test_equals_the_definition(operator, form, kind, seed, x64, monkeypatch):
    """Results and gradients agree in float64. Results in the padding do not matter."""
    monkeypatch.setattr(tiles, "TILE", 16)
    monkeypatch.setattr(tiles, "SMALL_TILE", 8)
    monkeypatch.setattr(tiles, "MAX_SCORES", 64)  # one head of keys of one row of the batch
    run, arrays, masks = CALLS[operator.name][0](kind, Draw(seed))
    rows = Rows.of(arrays[0].shape[1], masks.get("lengths"))

    @partial(jax.jit, static_argnums=0)
    def with_gradients(method, *arrays):
        def function(*arrays):
            y, last = run(method, *arrays)
            return rows.masked(y), last

        results, pull_back = jax.vjp(function, *arrays)
        return results, pull_back(jax.tree.map(lambda y: jnp.cos(y + 0.1), results))

    try:
        found = with_gradients(form.name, *arrays)
    except NotImplementedError as error:
        pytest.skip(str(error))
    expected = with_gradients(operator.own_forms[-1].name, *arrays)
    jax.tree.map(partial(assert_same, what=f"{form.name} and the definition"), found, expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("operator", "form", "kind", "seed"), [f for f in FORMS if not f.marks])
def test_takes_an_empty_batch(operator, form, kind, seed):
    draw = Draw(seed)
    draw.sizes["B"] = 0
    run, arrays, _ = CALLS[operator.name][0](kind, draw)
    try:
        jax.eval_shape(lambda *arrays: jax.vjp(partial(run, form.name), *arrays)[0], *arrays)
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("operator", "form", "kind", "seed"), [f for f in FORMS if not f.marks])
def test_runs_under_a_set_mesh(operator, form, kind, seed, x64):
    """Results are those without a mesh, also inside a `shard_map`.

    The axes are Explicit, as `jax.make_mesh` makes them. An operator runs with Auto axes then.
    """
    run, arrays, _ = CALLS[operator.name][0](kind, Draw(seed))
    run = partial(run, form.name)
    try:
        expected = jax.jit(run)(*arrays)
    except NotImplementedError as error:
        pytest.skip(str(error))
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))):
        by_hand = jax.shard_map(run, in_specs=P(), out_specs=P(), check_vma=False)
        for function in (run, by_hand):
            found = jax.jit(function)(*arrays)
            jax.tree.map(partial(assert_same, what=form.name), found, expected)
        jax.eval_shape(lambda *arrays: jax.vjp(run, *arrays)[1](expected), *arrays)


def test_results_are_sharded_as_by_the_definition():
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))):
        x = jax.device_put(jnp.ones((4, 3)), P(None, "data"))
        for run in (scale, jax.jit(scale), jax.grad(lambda x: scale(x).sum())):
            assert jax.typeof(run(x)).sharding.spec == P(None, "data")


# The choice among forms


def refuses_many(call) -> str | None:
    return "it takes 2 numbers" if len(call.x) > 2 else None


class Scale(NamedTuple):
    """A call of `SCALE`."""

    x: jax.Array
    count: jax.Array


def by(factor: float):
    return lambda call: factor * call.x


SCALE = Operator(
    "scale",
    (
        Form("on a tpu", by(7.0), ("tpu",)),
        Form("small", by(5.0), refusal=refuses_many),
        Form("derived", by(3.0), pays=lambda call, platform, differentiated: differentiated),
        Form("on a cpu", by(2.0), ("cpu",)),
        Form("definition", by(1.0)),
    ),
    (forms.not_installed("elsewhere", "scales", "pip install scales"),),
)
"""An operator whose forms differ in their results, so that one sees which of them ran."""


def scale(x, method="auto"):
    return SCALE(Scale(x, jnp.zeros((), jnp.int32)), method)


def test_auto_chooses_by_platform_call_and_derivative():
    x = jnp.arange(3.0)
    for run in (scale, jax.jit(scale), jax.vmap(lambda x: scale(x[None].repeat(3))[0])):
        np.testing.assert_array_equal(run(x), 2 * x)
    np.testing.assert_array_equal(scale(x[:2]), 5 * x[:2])
    loss = lambda x: (scale(x) ** 2).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(x), 18 * x)
    np.testing.assert_array_equal(jax.jvp(scale, (x,), (x,))[1], 3 * x)
    np.testing.assert_array_equal(jax.hessian(loss)(x), 18 * jnp.eye(3))
    np.testing.assert_array_equal(jax.vmap(jax.grad(loss))(x[None]), 18 * x[None])
    with jax.disable_jit():
        np.testing.assert_array_equal(scale(x), 2 * x)


def test_all_forms_but_the_definition_share_a_derivative(compilations):
    def derivative(operator, method, call, d_call):
        return operator(call, method), 100 * d_call.x  # so that one sees where it is used

    shared = SCALE._replace(derivative=derivative)
    x = jnp.arange(3.0)
    for method, factor, slope in (("auto", 2, 100), ("derived", 3, 100), ("definition", 1, 1)):
        run = lambda x: shared(Scale(x, jnp.zeros((), jnp.int32)), method).sum()  # noqa: B023, E731
        np.testing.assert_array_equal(run(x), 3 * factor)
        np.testing.assert_array_equal(jax.grad(run)(x), np.full(3, slope))
        compilations.clear()
        jax.grad(run)(x + 1)
        assert len(compilations) <= 1  # the sum


def test_a_program_for_another_platform_has_the_form_for_that_platform():
    traced = jax.jit(scale).trace(jnp.ones(3))
    for platform, factor in {"cpu": 2, "tpu": 7, "cuda": 1}.items():
        assert f"dense<{factor}.0" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_equal_calls_outside_of_jit_compile_once(compilations):
    x = jnp.arange(3.0)
    for gradient in (scale, jax.grad(lambda x: scale(x).sum())):
        gradient(x)
        compilations.clear()
        gradient(x + 1)
        assert len(compilations) <= 1  # the sum


def test_a_method_is_a_form_or_an_error():
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(scale(x, "derived"), 3 * x)
    with pytest.raises(NotImplementedError, match="'small': it takes 2 numbers; use method='auto'"):
        scale(x, "small")
    with pytest.raises(
        NotImplementedError, match=r"needs the package scales \(pip install scales\)"
    ):
        scale(x, "elsewhere")
    with pytest.raises(ValueError, match=r"^method: .* 'definition', 'elsewhere'\], got 'large'"):
        scale(x, "large")
    with pytest.raises(ValueError, match=r"^method: expected one of \['auto', .*, got 'large'"):
        LSTM(3, 4, method="large", rngs=nnx.Rngs(0))


MIGRATION = (Path(__file__).parents[2] / "docs" / "migration.md").read_text().replace("`", "")
FORMS_ON_THE_PAGE = [
    (operator, form)
    for row in re.findall(r"^\| (method=.*) \| .* \|$", MIGRATION, re.MULTILINE)
    for operator in OPERATORS
    if re.search(rf"\bops\.{operator}\b", row)
    for form in re.findall(r'method="(\w+)"', row)
]


@pytest.mark.parametrize(("operators", "removed", "reason"), REMOVED_FORMS)
def test_a_removed_form_is_answered_as_on_the_page_of_migration(operators, removed, reason):
    for operator in operators.split():
        for form in removed.split():
            assert (operator, form) in FORMS_ON_THE_PAGE
            with pytest.raises(ValueError, match=r"^method: expected one of .*, got") as error:
                OPERATORS[operator].checked_method(form)
            advice = f"got {form!r}, which was removed: leave method out: {reason}"
            assert str(error.value).endswith(advice)
            assert re.search(
                rf"ops\.{operator}\b.* leave method out: {re.escape(reason)}", MIGRATION
            )


@pytest.mark.parametrize(("operator", "form"), FORMS_ON_THE_PAGE)
def test_a_form_on_the_page_of_migration_is_one_or_was_removed(operator, form):
    removed = [forms.split() for names, forms, _ in REMOVED_FORMS if operator in names.split()]
    assert form in OPERATORS[operator].forms or any(form in forms for forms in removed)


def test_layers_answer_removed_forms_too():
    for layer in (RNN, GRU, LSTM):
        with pytest.raises(ValueError, match="'joined', which was removed: leave method out"):
            layer(3, 4, method="joined", rngs=nnx.Rngs(0))


def test_forms_of_shows_the_choice_and_its_reasons():
    [table] = ops.forms_of(scale, jnp.arange(3.0), platform="cuda")
    assert str(table).splitlines() == [
        "scale on cuda",
        "  definition  runs",
        "  on a tpu    it runs on tpu",
        "  small       it takes 2 numbers",
        "  derived     it is not likely to be faster",
        "  on a cpu    it runs on cpu",
        "  elsewhere   it needs the package scales (pip install scales)",
    ]
    [table] = ops.forms_of(scale, jnp.arange(3.0), differentiated=True)
    assert (table.platform, table.chosen) == ("cpu", "derived")
    assert ("definition", '"derived" is preferred') in table.reasons
    # A layer that runs an operator several times has one table, also if it was traced before.
    layer = LSTM(3, 4, num_layers=2, method="definition", rngs=nnx.Rngs(0))
    for _ in range(2):
        [table] = ops.forms_of(layer, jnp.ones((2, 5, 3)))
        assert table[0] == "recurrent_stack"
        assert table.chosen == "definition"


@pytest.mark.parametrize("platform", forms.PLATFORMS)
def test_a_modal_conv_whose_time_is_divided_runs_in_chunks(platform):
    """The other form refuses, so chunks run on a CPU too, where they would not be faster."""
    mesh = jax.make_mesh((1,), ("time",), axis_types=(AxisType.Auto,))
    spec = P(None, "time")
    _, (v, *arrays), _ = draw_modal_conv("whole", Draw(0))

    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(v):
        modes, poles, residues, skip = arrays
        weights = {"poles": poles, "residues": residues, "skip": skip}
        return ops.modal_conv(v, ops.ModalConvState(modes), **weights, time_axis="time")[0]

    tables = ops.forms_of(run, v, platform=platform)
    assert [table.chosen for table in tables] == ["chunked"]


@pytest.mark.parametrize(
    ("rows", "groups", "features", "form"),
    [(130, 64, 16, "definition"), (1024, 64, 64, "blocks"), (17, 3, 128, "blocks")],
)
def test_few_rows_with_small_matrices_run_by_the_definition(rows, groups, features, form):
    arrays = jnp.ones((rows, features)), jnp.ones((groups, features, features))
    sizes = jnp.ones(groups, jnp.int32)
    [table] = ops.forms_of(ops.grouped_dot, *arrays, sizes, platform="cpu")
    assert table.chosen == form


# Forms of other packages

PACKAGE = """
from jax_models import ops

FORMS = {"scale": (ops.Form("tenfold", lambda call: 10 * call.x),)}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package, which is one module, until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(entry_points, "_failures", defaultdict(list))
    for name in ("_packages", "_forms"):
        monkeypatch.setattr(forms, name, cache(getattr(forms, name).__wrapped__))

    def install(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{forms.ENTRY_POINTS}]\na = {name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)

    return install


def test_a_form_of_another_package_comes_first(install):
    install("tenfold", PACKAGE)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(scale(x), 10 * x)
    np.testing.assert_array_equal(scale(x, "tenfold"), 10 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: scale(x).sum())(x), [10, 10, 10])
    [table] = ops.forms_of(scale, x)
    assert table.chosen == "tenfold"


def test_a_broken_package_stops_nothing_else(install):
    install("broken", "import no_such_module")
    x = jnp.arange(3.0)
    with pytest.warns(UserWarning, match="twinscan.forms: broken package broken: ModuleNotFound"):
        np.testing.assert_array_equal(scale(x), 2 * x)
    with pytest.raises(ValueError, match=r"got 'tenfold' \(broken packages: broken: Module"):
        scale(x, "tenfold")
    with pytest.raises(NotImplementedError, match=r"scales\) \(broken packages: broken: Module"):
        scale(x, "elsewhere")


def test_two_forms_of_one_name_are_an_error(install):
    install("tenfold", PACKAGE.replace("tenfold", "small"))
    with pytest.raises(DuplicateNameError, match=r"form of scale small: .* tenfold and twinscan"):
        scale(jnp.arange(3.0))


# Export


@pytest.fixture(params=["with other packages", "without"])
def packages(request, monkeypatch):
    """Finds the forms of other packages, or none."""
    if request.param == "without":
        monkeypatch.setattr(forms, "_forms", forms._forms.__wrapped__)
        monkeypatch.setattr(forms, "_packages", list)


class SymbolicDraw(Draw):
    """Draws a call without masks, one of whose sizes is symbolic."""

    def __init__(self, name: str, size):
        super().__init__(0)
        self.sizes[name] = size

    def array(self, shape):
        return jnp.ones([eval(axis, {}, self.sizes) for axis in shape.split()])

    def masks(self):
        return {}


@pytest.mark.parametrize(
    ("operator", "kind", "sizes"),
    [
        ("recurrent_stack", "lstm", "BTIH"),
        ("gated_delta_rule", "not corrected", "BTEIY"),
        ("selective_scan", "whole", "BTHI"),
        ("attention", "whole", "TPI"),
    ],
)
def test_kernels_refuse_each_symbolic_size(operator, kind, sizes):
    pytest.importorskip("twinscan_native")
    for name in sizes:

        def run(x):
            draw = SymbolicDraw(name, x.shape[0])  # noqa: B023
            run, arrays, _ = CALLS[operator][0](kind, draw)
            return run("native", *arrays)

        x = jax.ShapeDtypeStruct(export.symbolic_shape("n"), jnp.float32)
        with pytest.raises(NotImplementedError, match="takes known sizes"):
            export.export(jax.jit(run))(x)


@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("layer", [LSTM, GRU, RNN])
def test_results_and_gradients_are_exported_for_every_platform(layer):
    """The program runs where a package whose form was chosen is missing."""
    graphdef, weights = nnx.split(layer(3, 5, bidirectional=True, rngs=nnx.Rngs(0)))
    weights, structure = jax.tree.flatten(weights)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 20, 3)), jnp.float32)

    def forward(weights, x):
        layer = nnx.merge(graphdef, structure.unflatten(weights))
        return jax.tree.leaves(layer(x, lengths=jnp.array([20, 0, 1, 9])))

    def gradient(weights, x):
        return jax.grad(lambda *args: sum(y.sum() for y in forward(*args)), (0, 1))(weights, x)

    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for function in map(jax.jit, (forward, gradient)):
        exported = export.export(function, platforms=("cpu", "cuda", "tpu"))(weights, x)
        assert "custom_call @twinscan" not in exported.mlir_module()
        stored = export.deserialize(exported.serialize())
        jax.tree.map(same, stored.call(weights, x), function(weights, x))
