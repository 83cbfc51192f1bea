"""The operators' own kernels, on a machine without a TPU or a GPU."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_models.ops import WKVState, linear_recurrence, wkv
from jax_models.ops.linear import pallas
from jax_models.ops.linear.kernels import row_scan_gpu, row_scan_tpu
from parity_tests.engine.bounds.tolerance import K, assert_same, rms, ulp
from parity_tests.engine.problem import in_every_dtype

POISONED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
needs_no_plugin = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="Triton is compiled as it is lowered, by jax's plugin"
)


def numbers(batch: int, time: int, features: int) -> dict[str, np.ndarray]:
    """Inputs of both operators that are exact in bfloat16. Some factors are 0."""
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


OPERATORS = {recurrence: ("a", "b", "h0"), sums: ("k", "v", "w", "u", "num", "den", "max")}


def results_and_gradients(operator, x, dtype, **options):
    """All results, and the gradients of the inputs for random cotangents, in float64."""
    names = OPERATORS[operator]
    x = {name: jnp.asarray(x[name], dtype) for name in names}

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


ROW_SCANS = [(1, 1, 5, 0), (3, 37, 130, 0), (1, 70, 130, 128)]
MASKED_ROW_SCAN = (3, 127, 5, 256)
"""Batch, time, features and, if not 0, the width of a block.

Those with a width are cut into blocks of 32 steps: the first into blocks of 1 row with 128
features, the masked one into blocks of 2 rows with all features."""


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("operator", "size", "masked"),
    [
        *itertools.product(OPERATORS, ROW_SCANS, [False]),
        *itertools.product(OPERATORS, [MASKED_ROW_SCAN], [True]),
    ],
)
def test_tpu_kernel_in_poisoned_memory(operator, size, masked, monkeypatch, capfd):
    """It is as exact in float32 as the sequential method, and has no race conditions.

    Results, gradients and a first state are included. With `masked`, there are resets and lengths,
    one of which is 0.
    """
    batch, time, features, width = size
    if width:
        monkeypatch.setattr(row_scan_tpu, "BLOCK_BYTES", 1)
        monkeypatch.setattr(row_scan_tpu, "REGISTER_SIZE", width)
    x = numbers(batch, time, features)
    options = {"reverse": batch == 3} if operator is recurrence else {}
    if masked:
        reset = np.random.default_rng(2).uniform(size=(batch, time)) < 0.2
        options |= {"lengths": jnp.arange(batch) * time // batch, "reset": jnp.asarray(reset)}
    run = partial(results_and_gradients, operator, x, **options)
    plain = run(jnp.float32, method="sequential")
    with pltpu.force_tpu_interpret_mode(POISONED):
        ours = run(jnp.float32, method="pallas")
    with jax.enable_x64(True):
        exact = run(jnp.float64, method="sequential")
    active = np.arange(time) < np.asarray(options.get("lengths", [time] * batch))[:, None]
    for name, expected in exact.items():
        kept = active if expected.shape[:2] == (batch, time) else ...
        bound = K * (rms((plain[name] - expected)[kept]) + ulp(np.float32) * rms(expected[kept]))
        assert rms((ours[name] - expected)[kept]) <= bound, name
    assert "RACE DETECTED" not in capfd.readouterr().out


def total_and_product(state, x, y):
    """A recurrence with two states and one output."""
    total, product = state
    total, product = total + x * y, product * x
    return (total, product), (total - product,)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [1, 37])
def test_kernels_interpreted(x64, time, reverse):
    rng = np.random.default_rng(0)
    start, xs = [*rng.standard_normal((2, 2, 40))], [*rng.standard_normal((2, 2, time, 40))]
    options = {"outputs": 1, "reverse": reverse}
    scans = [partial(each.row_scan, total_and_product) for each in (row_scan_gpu, row_scan_tpu)]
    results = [jax.jit(partial(scan, interpret=True, **options))(start, xs) for scan in scans]
    state, ys = start, np.empty((2, time, 40))
    for t in range(time)[:: -1 if reverse else 1]:
        state, (ys[:, t],) = total_and_product(state, *(x[:, t] for x in xs))
    for (outputs,), last in results:
        assert_same(outputs, ys, "outputs")
        assert_same(np.stack(last), np.stack(state), "last state")


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gpu_scans_few_rows_in_chunks(x64, reverse, monkeypatch):
    """Runs forward and backward with a remainder of steps. Triton's kernel is interpreted."""
    x = numbers(2, 75, 5)
    interpreted = partial(row_scan_gpu.row_scan, interpret=True)
    monkeypatch.setattr(row_scan_gpu, "row_scan", interpreted)
    monkeypatch.setattr(pallas, "TARGET_PARALLEL", 20)  # two chunks
    monkeypatch.setattr(pallas, "SCAN", pallas.scan_gpu)
    ours, expected = (
        results_and_gradients(recurrence, x, jnp.float64, method=method, reverse=reverse)
        for method in ("pallas", "sequential")
    )
    for name in expected:
        assert_same(ours[name], expected[name], name)


@pytest.mark.slow
@needs_no_plugin
@pytest.mark.parametrize("operator", OPERATORS)
def test_gpu_kernel_is_lowered(operator):
    x = {name: jnp.asarray(numbers(2, 40, 130)[name], jnp.float32) for name in OPERATORS[operator]}
    gradient = jax.grad(lambda x: jnp.sum(operator(x, method="pallas")[0]))
    lowered = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") >= 2


@pytest.mark.slow
@needs_no_plugin
@pytest.mark.parametrize(
    ("shape", "divided", "kernels"),
    [
        ((32, 64, 1024), False, 1),
        ((4, 256, 1024), False, 2),  # two scans, in chunks
        ((1, 64, 64), False, 0),
        ((32, 64, 1024), True, 0),
    ],
)
def test_auto_on_a_gpu(shape, divided, kernels):
    """Many rows take one kernel. Few rows, or a program that XLA divides, take none."""
    mesh = AbstractMesh((2,), ("data",))
    sharding = NamedSharding(mesh, P("data")) if divided else None
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    traced = jax.jit(lambda a, b: linear_recurrence(a, b)[0]).trace(x, x)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == kernels


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_auto_without_a_kernel_is_associative(x64, operator, monkeypatch):
    """Tests the fallback with masks and `vmap`: the program for a TPU, run on a CPU."""
    x = numbers(2, 40, 5)
    options = {"lengths": jnp.array([40, 11]), "reset": jnp.arange(80).reshape(2, 40) % 17 == 0}
    expected = results_and_gradients(operator, x, jnp.float64, method="associative", **options)
    form = lambda forms, platform: dict(forms)["tpu"]  # noqa: E731
    monkeypatch.setattr("jax_models.ops.by_platform._form", form)
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
    """Tracing the associative form would take longer than compiling the CPU's loop."""
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
@pytest.mark.parametrize("operator", OPERATORS)
def test_mapped_operators_are_one_kernel(operator):
    """Some arrays have the mapped axis, at any place, and others do not."""
    x = {name: jnp.asarray(v, jnp.float32) for name, v in numbers(2, 20, 128).items()}
    several = x | {name: jnp.stack(2 * [x[name]], axis=2) for name in ("b", "v")}
    axes = dict.fromkeys(x) | {"b": 2, "v": 2}
    mapped = jax.jit(jax.vmap(partial(operator, method="pallas"), in_axes=(axes,)))
    lowered = mapped.trace(several).lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("tpu_custom_call") == 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_has_no_kernel(x64, operator):
    x = {name: jnp.asarray(value) for name, value in numbers(2, 3, 5).items()}
    with pytest.raises(NotImplementedError, match='"associative" can: it has no kernel for this'):
        operator(x, method="pallas")
    traced = jax.jit(partial(operator, method="pallas")).trace(x)
    with pytest.raises(NotImplementedError, match="the kernel computes in float32, got float64"):
        traced.lower(lowering_platforms=("tpu",))
    auto = jax.jit(operator).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in auto
