"""The operators' own kernels, on a machine that has neither TPU nor GPU."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_models.ops import WKVState, delta_rule, wkv
from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.kernels.row_scan import row_scan
from jax_models.ops.linear_recurrence import linear_recurrence
from parity_tests.engine.bounds.tolerance import K, assert_same, rms, ulp
from parity_tests.engine.problem import in_every_dtype

POISONED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
WHOLE = [(1, 1, 5), (3, 2, 130), (1, 127, 130)]
RAGGED = [(3, 127, 5, 256), (1, 70, 130, 128)]
"""Of batch, time and features, in blocks of as few steps as there can be, 32: the first of 2 rows
by all features, the second of 1 by 128."""


def numbers(batch: int, time: int, features: int) -> dict[str, np.ndarray]:
    """Inputs of both operators, exact in bfloat16; some factors are 0."""
    rng = np.random.default_rng(0)
    sequences = {name: rng.standard_normal((batch, time, features)) for name in ("b", "k", "v")}
    a = rng.uniform(0, 1, (batch, time, features))
    rows = {name: rng.standard_normal((batch, features)) for name in ("h0", "num", "max")}
    vectors = {"w": rng.uniform(0.01, 2, features), "u": rng.standard_normal(features)}
    others = {"a": np.where(a < 0.1, 0, a), "den": 1 + np.abs(rows["num"])}
    return {name: in_every_dtype(x) for name, x in (sequences | rows | vectors | others).items()}


def recurrence(x, **options):
    return linear_recurrence(x["a"], x["b"], x["h0"], **options)


def sums(x, **options):
    state = WKVState(x["num"], x["den"], x["max"])
    return wkv(x["k"], x["v"], state, w=x["w"], u=x["u"], **options)


def corrected(x, **options):
    names = ("r", "log_w", "k", "v", "a", "b", "state")
    return delta_rule(*(x[name] for name in names), **options)


def bounded(x, **options):
    return corrected(x, min_log_w=-1.0, **options)


def with_bonus(x, **options):
    others = {name: x[name] for name in ("state", "u")}
    return delta_rule(x["r"], x["log_w"], x["k"], x["v"], **others, **options)


DELTA_RULES = {
    corrected: ("r", "log_w", "k", "v", "a", "b", "state"),
    bounded: ("r", "log_w", "k", "v", "a", "b", "state"),
    with_bonus: ("r", "log_w", "k", "v", "state", "u"),
}
DELTA_SIZES = [(1, 1, 1, 5, 5), (3, 37, 2, 5, 4), (1, 32, 1, 3, 20)]
"""Of batch, time, heads, keys and values: in blocks of 4 rows, so that the second one is ragged."""


def delta_numbers(batch: int, time: int, heads: int, key: int, value: int) -> dict[str, np.ndarray]:
    """Inputs of the delta rule, exact in bfloat16; corrections of keys of length 1."""
    rng = np.random.default_rng(0)
    of_key = {name: rng.standard_normal((batch, time, heads, key)) for name in ("r", "k", "a")}
    a = of_key["a"] / np.linalg.norm(of_key["a"], axis=-1, keepdims=True)
    others = {
        "log_w": -(rng.uniform(0, 1, a.shape) ** 2),
        "a": a,
        "b": -a * rng.uniform(0, 1, (*a.shape[:3], 1)),
        "v": rng.standard_normal((batch, time, heads, value)),
        "state": rng.standard_normal((batch, heads, value, key)),
        "u": rng.standard_normal((heads, key)),
    }
    return {name: in_every_dtype(x) for name, x in (of_key | others).items()}


OPERATORS = {recurrence: ("a", "b", "h0"), sums: ("k", "v", "w", "u", "num", "den", "max")}


def assert_exact_in_poisoned_memory(run, capfd):
    """The TPU's kernel in float32 errs as step by step, against float64, and races nowhere."""
    plain = run(jnp.float32, method="sequential")
    with pltpu.force_tpu_interpret_mode(POISONED):
        ours = run(jnp.float32, method="pallas_interpreted")
    with jax.enable_x64(True):
        exact = run(jnp.float64, method="sequential")
    for name, expected in exact.items():
        bound = K * (rms(plain[name] - expected) + ulp(np.float32) * rms(expected))
        assert rms(ours[name] - expected) <= bound, name
    assert "RACE DETECTED" not in capfd.readouterr().out


def results_and_gradients(operator, x, dtype, **options):
    """All results and, for random gradients of them, those of the inputs, in float64."""
    x = {name: jnp.asarray(x[name], dtype) for name in (OPERATORS | DELTA_RULES)[operator]}

    @jax.jit
    def run(x):
        results, pullback = jax.vjp(partial(operator, **options), x)
        rng = np.random.default_rng(1)
        cotangents = [
            jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in jax.tree.leaves(results)
        ]
        return results, pullback(jax.tree.unflatten(jax.tree.structure(results), cotangents))

    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree.leaves_with_path(run(x))
    }


def masks(batch: int, time: int):
    reset = np.random.default_rng(2).uniform(size=(batch, time)) < 0.2
    return {"lengths": jnp.arange(batch) * time // batch, "reset": jnp.asarray(reset)}


def in_blocks(monkeypatch, batch, time, features, width):
    """Cut into blocks of 32 steps, and features times rows of at most `width`."""
    monkeypatch.setattr(row_scan_tpu, "BLOCK_BYTES", 1)
    monkeypatch.setattr(row_scan_tpu, "WIDTH", width)


@pytest.mark.slow
@pytest.mark.parametrize("size", [*WHOLE, *RAGGED])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tpu_kernel_in_poisoned_memory(operator, size, monkeypatch, capfd):
    """In float32, forward and backward, from a state, against float64: as exact as step by step."""
    if size in RAGGED:
        in_blocks(monkeypatch, *size)
    reverse = {"reverse": size[0] == 3} if operator is recurrence else {}
    x = numbers(*size[:3])
    run = partial(results_and_gradients, operator, x, **reverse)
    assert_exact_in_poisoned_memory(run, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "reverse"), [(recurrence, False), (recurrence, True), (sums, False)]
)
def test_masks_in_the_tpu_kernel(x64, operator, reverse, monkeypatch):
    """Lengths, one of them 0, and resets; as float64 says step by step."""
    batch, time, features, _ = size = (3, 70, 5, 256)
    in_blocks(monkeypatch, *size)
    reset = np.random.default_rng(2).uniform(size=(batch, time)) < 0.2
    options = {"lengths": jnp.arange(batch) * time // batch, "reset": jnp.asarray(reset)}
    options |= {"reverse": True} if reverse else {}
    run = partial(
        results_and_gradients, operator, numbers(batch, time, features), jnp.float64, **options
    )
    ours, expected = run(method="pallas_interpreted"), run(method="sequential")
    active = np.arange(time) < np.asarray(options["lengths"])[:, None]
    for name in expected:
        if expected[name].shape == (batch, time, features):
            ours[name], expected[name] = ours[name][active], expected[name][active]
        assert_same(ours[name], expected[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_tpu_kernel_takes_bfloat16(operator):
    """It computes what it does from the same numbers in float32."""
    x = numbers(2, 40, 5)
    half, full = (
        results_and_gradients(operator, x, dtype, method="pallas_interpreted")
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    for name, expected in full.items():
        if name.startswith("[0]"):
            np.testing.assert_array_equal(half[name], expected)
        else:
            assert rms(half[name] - expected) <= ulp(jnp.bfloat16) * rms(expected), name


def total_and_product(state, x, y):
    """A recurrence of two states that puts out one thing."""
    total, product = state
    total, product = total + x * y, product * x
    return (total, product), (total - product,)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [1, 37])
def test_gpu_kernel_interpreted(x64, time, reverse):
    rng = np.random.default_rng(0)
    start, xs = [*rng.standard_normal((2, 2, 40))], [*rng.standard_normal((2, 2, time, 40))]
    options = {"outputs": 1, "reverse": reverse}
    ((ours,), last), ((expected,), expected_last) = (
        jax.jit(partial(scan, total_and_product, interpret=True, **options))(start, xs)
        for scan in (row_scan_gpu.row_scan, row_scan)
    )
    state, ys = start, np.empty((2, time, 40))
    for t in range(time)[:: -1 if reverse else 1]:
        state, (ys[:, t],) = total_and_product(state, *(x[:, t] for x in xs))
    for actual in (ours, expected):
        assert_same(actual, ys, "outputs")
    for actual in (last, expected_last):
        assert_same(np.stack(actual), np.stack(state), "last state")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_gpu_scans_few_rows_in_chunks(x64, reverse, monkeypatch):
    """Forward and backward, with steps left over; Triton's kernel is interpreted."""
    x = numbers(2, 75, 5)
    module = sys.modules["jax_models.ops.linear_scan"]
    interpreted = partial(row_scan_gpu.row_scan, interpret=True)
    monkeypatch.setattr(module.row_scan_gpu, "row_scan", interpreted)
    monkeypatch.setattr(module, "BUSY", 20)  # two chunks

    def scan_gpu(*args, interpret, **options):
        return module._scan_gpu(*args, **options)

    monkeypatch.setattr(module._by_kernel, "tpu", scan_gpu)
    ours, expected = (
        results_and_gradients(recurrence, x, jnp.float64, method=method, reverse=reverse)
        for method in ("pallas_interpreted", "sequential")
    )
    for name in expected:
        assert_same(ours[name], expected[name], name)


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="Triton is compiled as it is lowered, by jax's plugin"
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_gpu_kernel_is_lowered(operator):
    x = {name: jnp.asarray(numbers(2, 40, 130)[name], jnp.float32) for name in OPERATORS[operator]}
    gradient = jax.grad(lambda x: jnp.sum(operator(x, method="pallas")[0]))
    lowered = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") >= 2


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="Triton is compiled as it is lowered, by jax's plugin"
)
@pytest.mark.parametrize(
    ("shape", "divided", "kernels"),
    [
        ((32, 64, 1024), False, 1),
        ((4, 256, 1024), False, 2),  # in chunks, by two scans
        ((1, 64, 64), False, 0),
        ((32, 64, 1024), True, 0),
    ],
)
def test_auto_on_a_gpu(shape, divided, kernels):
    """Many rows are one kernel. None serves if the rows are few, or if XLA divides the program."""
    mesh = AbstractMesh((2,), ("data",))
    sharding = NamedSharding(mesh, P("data")) if divided else None
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    traced = jax.jit(lambda a, b: linear_recurrence(a, b)[0]).trace(x, x)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == kernels


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_has_no_kernel(x64, operator):
    x = {name: jnp.asarray(value) for name, value in numbers(2, 3, 5).items()}
    on_cpu = r'"pallas" cannot serve here, "associative" can: it has no kernel for this platform'
    with pytest.raises(NotImplementedError, match=on_cpu):
        operator(x, method="pallas")
    traced = jax.jit(partial(operator, method="pallas")).trace(x)
    with pytest.raises(NotImplementedError, match="the kernel computes in float32, got float64"):
        traced.lower(lowering_platforms=("tpu",))
    auto = jax.jit(operator).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in auto


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_auto_without_a_kernel_is_associative(x64, operator, monkeypatch):
    """The fallback, with masks, and by `vmap`: all of it lowered as for a TPU, run on a CPU."""
    x = numbers(2, 40, 5)
    options = {"lengths": jnp.array([40, 11]), "reset": jnp.arange(80).reshape(2, 40) % 17 == 0}
    expected = results_and_gradients(operator, x, jnp.float64, method="associative", **options)
    for name in ("linear_scan", "wkv"):
        module = sys.modules[f"jax_models.ops.{name}"]
        monkeypatch.setattr(module, "by_platform", lambda *args, tpu, **others: tpu(*args))
    ours = results_and_gradients(operator, x, jnp.float64, **options)
    for name in expected:
        both = [run[name] for run in (ours, expected)]
        if both[0].shape == (2, 40, 5):
            both = [y[np.arange(40) < np.array([[40], [11]])] for y in both]
        assert_same(*both, name)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("rows", ["8", "b"])
def test_an_export_for_all_platforms_has_the_kernel_for_known_sizes(operator, rows):
    x = {name: numbers(8, 16, 128)[name].astype(np.float32) for name in OPERATORS[operator]}
    shapes = export.symbolic_args_specs(
        x, {name: f"{rows}, ..." if array.ndim > 1 else "..." for name, array in x.items()}
    )
    exported = export.export(jax.jit(operator), platforms=("cpu", "cuda", "tpu"))(shapes)
    assert ("tpu_custom_call" in exported.mlir_module()) == (rows == "8")
    for actual, expected in zip(
        jax.tree.leaves(exported.call(x)), jax.tree.leaves(operator(x)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_auto_traces_no_form_that_does_not_run(operator, monkeypatch):
    """The trees of the associative form take longer to trace than the CPU's loop to compile."""
    traced = []
    scan = jax.lax.associative_scan
    monkeypatch.setattr(
        jax.lax,
        "associative_scan",
        lambda *args, **options: traced.append(1) or scan(*args, **options),
    )
    x = numbers(2, 7, 3)
    results_and_gradients(operator, x, jnp.float32)
    assert not traced
    results_and_gradients(operator, x, jnp.float32, method="associative")
    assert traced


@pytest.mark.slow
@pytest.mark.parametrize("size", DELTA_SIZES)
@pytest.mark.parametrize("operator", DELTA_RULES)
def test_delta_rule_in_poisoned_memory(operator, size, capfd):
    """The TPU's kernel in float32, forward and backward, is as exact as step by step."""
    run = partial(results_and_gradients, operator, delta_numbers(*size))
    assert_exact_in_poisoned_memory(run, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("operator", DELTA_RULES)
def test_delta_rule_by_kernel_interpreted(x64, operator, masked):
    """Lengths, one of them 0, and resets; as float64 says step by step."""
    batch, time, *_ = size = (3, 37, 2, 5, 4)
    options = masks(batch, time) if masked else {}
    run = partial(results_and_gradients, operator, delta_numbers(*size), jnp.float64, **options)
    ours, expected = run(method="pallas_interpreted"), run(method="sequential")
    active = np.arange(time) < np.asarray(options.get("lengths", [time] * batch))[:, None]
    for name in expected:
        if expected[name].shape[:2] == (batch, time):
            ours[name], expected[name] = ours[name][active], expected[name][active]
        assert_same(ours[name], expected[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pallas", "pallas_interpreted"])
def test_mapped_delta_rules_are_one_kernel(mode):
    """Some arrays have the mapped axis, anywhere, others have none."""
    x = {name: jnp.asarray(v, jnp.float32) for name, v in delta_numbers(2, 20, 3, 5, 4).items()}
    several = x | {
        "v": jnp.stack([x["v"], 2 * x["v"]], axis=2),
        "log_w": jnp.stack(2 * [x["log_w"]]),
    }
    axes = dict.fromkeys(x) | {"v": 2, "log_w": 0}
    mapped = jax.jit(jax.vmap(partial(corrected, method=mode), in_axes=(axes,)))
    if mode == "pallas":
        lowered = mapped.trace(several).lower(lowering_platforms=("tpu",)).as_text()
        assert lowered.count("tpu_custom_call") == 1
        return
    y, last = mapped(several)
    for i in range(2):
        one = corrected(x | {"v": (1 + i) * x["v"]}, method="sequential")
        for actual, expected in zip((y[i], last[i]), one, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_what_has_no_delta_rule_kernel(x64):
    x = {name: jnp.asarray(value) for name, value in delta_numbers(2, 3, 1, 5, 4).items()}
    on_cpu = r'"pallas" cannot serve here, "chunked" can: it has no kernel for this platform'
    with pytest.raises(NotImplementedError, match=on_cpu):
        corrected(x, method="pallas")
    traced = jax.jit(partial(corrected, method="pallas")).trace(x)
    for platform, reason in (
        ("tpu", "the kernel computes in float32, got float64"),
        ("cuda", "it has no kernel for this platform"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            traced.lower(lowering_platforms=(platform,))
    large = delta_numbers(1, 16, 1, 512, 512).items()
    x = {name: jnp.asarray(value, jnp.float32) for name, value in large}
    traced = jax.jit(partial(corrected, method="pallas")).trace(x)
    with pytest.raises(NotImplementedError, match="a step's matrices are too large"):
        traced.lower(lowering_platforms=("tpu",))

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(corrected(x, method="pallas")[0])))(x)

    with pytest.raises(NotImplementedError, match='"pallas" has first derivatives only'):
        jax.make_jaxpr(lambda x: jax.vjp(gradient, x)[0])(x)
