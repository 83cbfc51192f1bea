"""The kernels of twinscan-native equal XLA's form in every transformation.

`test_forms.py` compares them with the definition, and exports them.
"""

import importlib.util
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from stack_problem import loss, problem, with_gradients

from jax_models import GRU, LSTM, RNN, ops
from jax_models.ops import forms
from parity_tests.engine.bounds.tolerance import assert_same

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("twinscan_native") is None, reason="twinscan-native is not installed"
)

FEATURES = 3
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN, "relu": partial(RNN, nonlinearity="relu")}
every_layer = pytest.mark.parametrize("name", LAYERS)
lstm_and_gru = pytest.mark.parametrize("name", ["LSTM", "GRU"])
"""For code that all kernels share. Only the GRU's gradients need some of their own."""
LENGTHS = np.array([6, 0, 1, 4])
RESET = np.random.default_rng(3).random((4, 6)) < 0.3


def build(name, method, in_features=FEATURES, hidden=5, dtype=jnp.float64, **options):
    return LAYERS[name](
        in_features, hidden, method=method, param_dtype=dtype, rngs=nnx.Rngs(0), **options
    )


def assert_equals_xla(name: str, transform, *args, options=None, **masks):
    """`transform(function)(weights, x, state)` is the same with the kernels as without."""
    results = []
    for method in ("native", "xla"):
        function, arguments = problem(build(name, method, **options or {}), *args, **masks)
        results.append(jax.jit(transform(function))(*arguments))
    jax.tree.map(partial(assert_same, what="the kernels and XLA"), *results)


def forward_mode(function):
    return lambda *args: jax.jvp(function, args, jax.tree.map(jnp.cos, args))


def second_derivatives(function):
    """Hessian-vector products in both orders of the modes, forward and reverse."""

    def found(*args):
        def of_args(args):
            return loss(function(*args))

        def gradient(args):
            return jax.grad(of_args)(args)

        directions = jax.tree.map(jnp.cos, args)
        forward_over_reverse = jax.jvp(gradient, (args,), (directions,))[1]
        reverse_over_reverse = jax.grad(lambda args: loss(gradient(args)))(args)
        return forward_over_reverse, reverse_over_reverse

    return found


def of_ensemble(function):
    """Elements with their own weights, inputs and states, each with its own gradients."""

    def found(weights, x, state):
        stacked = jax.tree.map(lambda w: jnp.stack([w, 1.5 * w]), (weights, x, state))
        return jax.vmap(with_gradients(function))(*stacked)

    return found


def per_example(function):
    """Elements with the same weights and states along another axis, each with its own gradients."""

    def found(weights, x, state):
        xs = jnp.stack([x, 2 * x, x + 1], axis=2)
        return jax.vmap(with_gradients(function), in_axes=(None, 2, None))(weights, xs, state)

    return found


def rematerialized(function):
    return with_gradients(jax.checkpoint(function))


def in_a_scan(function):
    """Truncated pieces of a sequence in a `lax.scan` that carries the state."""

    def found(weights, x, state):
        def body(state, x):
            y, state = function(weights, x, state)
            return state, y

        return jax.lax.scan(body, state, jnp.stack([x, -x]))

    return with_gradients(found)


TRANSFORMS = [
    forward_mode,
    second_derivatives,
    of_ensemble,
    per_example,
    rematerialized,
    in_a_scan,
]


@pytest.mark.slow
@needs_kernels
@lstm_and_gru
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_transformed_equals_xla(name, transform, x64):
    masks = {"lengths": LENGTHS, "reset": RESET}
    assert_equals_xla(name, transform, options={"bidirectional": True}, **masks)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    ("sizes", "bidirectional"),
    [
        ((5, 40, 200, 192), False),
        ((24, 40, 64, 64), False),
        ((5, 40, 200, 192), True),
        ((17, 40, 99, 150), True),
        ((200, 40, 1, 13), True),
        ((1, 150, 97, 70), True),
    ],
)
def test_divided_over_threads_equals_xla(name, sizes, bidirectional, x64):
    """The work of these calls is worth several threads, which divide units or rows."""
    batch, time, in_features, hidden = sizes
    lengths = np.arange(batch) % (time + 1) if batch > 1 else None
    options = {"in_features": in_features, "hidden": hidden, "bidirectional": bidirectional}
    assert_equals_xla(name, with_gradients, batch, time, options=options, lengths=lengths)


PRINT_ISA = """
import ctypes, twinscan_native
isa = ctypes.CDLL(str(twinscan_native.path())).twinscan_isa
isa.restype = ctypes.c_char_p
print(isa().decode())
"""


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("without", ["avx512", "avx512,avx2"])
def test_kernels_of_older_processors_equal_xla(without):
    """A processor with AVX-512 runs the other kernels only without it."""

    def python(*arguments):
        env = os.environ | {"TWINSCAN_WITHOUT": without}
        command = [sys.executable, *arguments]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    assert python("-c", PRINT_ISA).strip() in {"avx2", "baseline"} - {*without.split(",")}
    tests = f"native and equals_the_definition or {test_divided_over_threads_equals_xla.__name__}"
    files = __file__, str(Path(__file__).with_name("test_forms.py"))
    assert " passed" in python("-m", "pytest", "-q", "-n", "0", *files, "-k", tests)


@needs_kernels
@lstm_and_gru
def test_runs_without_jit(name, x64):
    """As in the traces of `compare`."""
    function, arguments = problem(build(name, "native"), lengths=LENGTHS)
    with jax.disable_jit():
        found = with_gradients(function)(*arguments)
    expected = with_gradients(function)(*arguments)
    jax.tree.map(partial(assert_same, what="without jit and with it"), found, expected)


@needs_kernels
def test_misspelled_weights_are_refused():
    layer = build("LSTM", "native", dtype=jnp.float32)
    cells = [{name.replace("bias_hh", "bias_h"): w for name, w in layer.cells[0].arrays().items()}]
    with pytest.raises(TypeError, match="bias_h: no such argument"):
        ops.lstm_stack(X, layer.init_state(4), cells, num_directions=1, method="native")


@needs_kernels
@every_layer
def test_gradients_can_be_pulled_back_twice(name, x64):
    """The kernel overwrites arrays that it reads, so XLA must copy them for the second call."""
    function, arguments = problem(build(name, "native"))

    def twice(*arguments):
        results, pull_back = jax.vjp(function, *arguments)
        once = pull_back(results)
        return once, pull_back(results)

    for pulled_back in (twice, jax.jit(twice)):
        jax.tree.map(partial(assert_same, what="two gradients"), *pulled_back(*arguments))


@needs_kernels
def test_nan_in_padding_changes_no_result(x64):
    """Layers zero the padding of x, but the operators are given it as it is."""
    layer = build("LSTM", "native", hidden=70, in_features=120)
    cells = [cell.arrays() for cell in layer.cells]
    lengths = np.arange(17) % 7
    x = np.random.default_rng(0).standard_normal((17, 6, 120))
    with_nan = np.where((np.arange(6) < lengths[:, None])[..., None], x, np.nan)
    found = [
        ops.lstm_stack(
            jnp.asarray(x),
            layer.init_state(17),
            cells,
            num_directions=1,
            method="native",
            lengths=lengths,
        )
        for x in (x, with_nan)
    ]
    jax.tree.map(partial(assert_same, what="padding"), *found)


@needs_kernels
@lstm_and_gru
def test_elements_with_the_same_weights_are_one_batch(name, x64):
    """The gradient of the sum needs as many products as that of one element, and two kernels."""
    function, (weights, x, state) = problem(build(name, "native"))

    def total(weights, x, state):
        return loss(function(weights, x, state))

    def mapped(weights, x, state):
        return jax.vmap(total, in_axes=(None, 0, 0))(weights, x, state).sum()

    def hlo(loss, *args) -> str:
        return jax.jit(jax.grad(loss)).lower(weights, *args).as_text()

    one = hlo(total, x, state)
    many = hlo(mapped, *jax.tree.map(lambda a: jnp.stack([a, 2 * a, a]), (x, state)))
    for part, count in {"stablehlo.dot_general": 3, "custom_call @twinscan": 2}.items():
        assert one.count(part) == many.count(part) == count
    assert "stablehlo.while" not in many


@needs_kernels
def test_elements_with_their_own_weights_run_one_after_the_other(x64):
    function, (weights, x, state) = problem(build("LSTM", "native"))
    stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), weights)
    mapped = jax.jit(jax.vmap(function, in_axes=(0, None, None)))
    assert "stablehlo.while" in mapped.lower(stacked, x, state).as_text()


@needs_kernels
def test_a_call_without_gradients_keeps_nothing_for_them():
    function, arguments = problem(build("LSTM", "native", dtype=jnp.float32))
    lowered = jax.jit(function).lower(*arguments).as_text()
    (call,) = (line for line in lowered.splitlines() if "custom_call @twinscan" in line)
    assert "keep = false" in call
    assert call.rsplit("->", 1)[1].count("tensor<") == 3  # y, h and c


def check_on_eight_devices(name: str) -> None:
    """On eight devices, a `shard_map` over rows and a program that XLA divides equal one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    function, arguments = problem(build(name, "native", bidirectional=True), batch=16)
    weights, x, state = arguments
    expected = jax.jit(with_gradients(function))(*arguments)
    rows = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    divided = weights, jax.device_put(x, rows[0]), jax.device_put(state, rows[1])
    found = [jax.jit(with_gradients(function))(*divided)]
    for check_vma in (True, False):
        specs = P(), P("data"), P(None, "data")
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=specs[1:], check_vma=check_vma
        )
        found.append(jax.jit(with_gradients(mapped))(*divided))
    for each in found:
        jax.tree.map(partial(assert_same, what="eight devices and one"), each, expected)


@needs_kernels
@pytest.mark.slow
@lstm_and_gru
def test_eight_devices_equal_one(on_eight_devices, name):
    on_eight_devices(check_on_eight_devices, name)


@needs_kernels
@pytest.mark.parametrize("hidden", [5, 96])
def test_sixteen_threads_call_at_once(hidden, x64):
    function, arguments = problem(build("LSTM", "native", hidden), batch=8, time=20)
    compiled = jax.jit(with_gradients(function)).lower(*arguments).compile()
    expected = compiled(*arguments)
    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(compiled, *arguments) for _ in range(200)]
    for call in calls:
        jax.tree.map(np.testing.assert_array_equal, call.result(), expected)


@needs_kernels
@pytest.mark.parametrize("sizes", [(2, 40, 30, 200), (24, 40, 64, 64)], ids=["units", "rows"])
def test_results_depend_on_the_number_of_threads_only_by_rounding(sizes, num_threads, x64):
    """More threads than cores also make parts whose thread comes too late."""
    batch, time, in_features, hidden = sizes
    layer = build("LSTM", "native", in_features, hidden, bidirectional=True)
    function, arguments = problem(layer, batch, time)
    compiled = jax.jit(with_gradients(function)).lower(*arguments).compile()
    num_threads(1)
    alone = jax.block_until_ready(compiled(*arguments))
    num_threads(8)
    together = compiled(*arguments)
    jax.tree.map(partial(assert_same, what="one thread and eight"), alone, together)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, compiled(*arguments), together)


def selective_scan(u, dt, A, B, C):
    return ops.selective_scan(u, dt**2, -(A**2), B, C, method="native")


def state_space(q, k, v, log_decay):
    return ops.gated_delta_rule(q, k, v, -(log_decay**2), beta=None, method="native")


def attention(q, k, v):
    return ops.attention(q, k, v, method="native")


OPERATORS = [
    (selective_scan, [(2, 40, 150)] * 2 + [(150, 70)] + [(2, 40, 70)] * 2),
    (state_space, [(1, 300, 2, 22)] * 2 + [(1, 300, 10, 99), (1, 300, 10)]),
    (attention, [(2, 340, 6, 12), (2, 340, 2, 12), (2, 340, 2, 12)]),
]


@needs_kernels
@pytest.mark.parametrize(("operator", "shapes"), OPERATORS)
def test_results_in_more_parts_differ_only_by_rounding(operator, shapes, num_threads, x64):
    """These kernels divide the heads or features of a row into parts, if it has several threads."""
    draw = np.random.default_rng(0).standard_normal
    arrays = [jnp.asarray(draw(shape)) for shape in shapes]
    compiled = jax.jit(with_gradients(operator)).lower(*arrays).compile()
    num_threads(1)
    alone = jax.block_until_ready(compiled(*arrays))
    num_threads(5)
    together = compiled(*arrays)
    jax.tree.map(partial(assert_same, what="one thread and five"), alone, together)
    pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True)
    assert any((a != b).any() for a, b in pairs) == (operator is not attention)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, compiled(*arrays), together)


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of this process")
def test_no_thread_has_no_task(num_threads):
    """It would need memory of its own."""
    q = jnp.ones((1, 1500, 2, 64))
    threads = len(os.listdir("/proc/self/task"))
    num_threads(100)
    jax.block_until_ready(jax.jit(with_gradients(attention))(q, q, q))
    assert len(os.listdir("/proc/self/task")) < threads + 80


@needs_kernels
def test_a_state_that_overflows_is_not_finite():
    ones = jnp.ones((1, 64, 1, 4))
    log_decay = jnp.full((1, 64, 1), 2.0)
    _, state = ops.gated_delta_rule(ones, ones, ones, log_decay, beta=None, method="native")
    assert not np.isfinite(state).any()


@needs_kernels
def test_positions_may_be_int64(x64):
    q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 20, 2, 8)))
    past = ops.LocalAttentionState(jnp.zeros(2, jnp.int64), k[:, :3], v[:, :3])
    found = [
        ops.local_attention(q, k, v, past, empty=True, method=method)[0]
        for method in ("native", "definition")
    ]
    assert_same(*found, what="native and the definition")


@pytest.fixture
def num_threads():
    import twinscan_native

    before = twinscan_native.num_threads()
    yield twinscan_native.set_num_threads
    twinscan_native.set_num_threads(before)


@needs_kernels
def test_the_number_of_threads_is_read_from_the_environment_and_checked(num_threads):
    def python(value):
        env = os.environ | {"TWINSCAN_NATIVE_THREADS": value}
        command = [sys.executable, "-c", "import twinscan_native as n; print(n.num_threads())"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert python("3").stdout == "3\n"
    assert python("").returncode == 0
    expected = "expected a positive number of threads, got "
    for value in ("0", "two", "２"):
        assert f"TWINSCAN_NATIVE_THREADS: {expected}'{value}'" in python(value).stderr
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"count: {expected}{count}"):
            num_threads(count)


@needs_kernels
@pytest.mark.slow
@pytest.mark.optimized
def test_kernels_are_not_slower_than_xla_beside_busy_processes():
    """Waiting at each step for a thread that has no core took five times as long as XLA."""

    def runner(method):
        layer = build("LSTM", method, 64, 128, dtype=jnp.float32)
        function, arguments = problem(layer, batch=1, time=512)
        compiled = jax.jit(with_gradients(function)).lower(*arguments).compile()
        return lambda: jax.block_until_ready(compiled(*arguments))

    def seconds(run) -> float:
        start = time.perf_counter()
        for _ in range(3):
            run()
        return time.perf_counter() - start

    runs = [runner("native"), runner("xla")]
    count = [sys.executable, "-S", "-c", "while True: pass"]
    busy = [subprocess.Popen(count) for _ in range(1 + os.cpu_count())]
    try:
        times = np.array([[seconds(run) for run in runs] for _ in range(10)])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    native_median, xla_median = np.median(times, axis=0)
    assert native_median < 2 * xla_median


@pytest.fixture
def always_pays(monkeypatch):
    """Lets "auto" choose the kernels for sequences of every length and dtype."""
    native = importlib.import_module("twinscan_native.forms")
    [form] = native.FORMS["recurrent_stack"]
    patched = {"recurrent_stack": (form._replace(pays=forms.always_pays),)}
    monkeypatch.setattr(forms, "_forms", forms._forms.__wrapped__)
    monkeypatch.setattr(forms, "_packages", lambda: [("twinscan-native", patched)])


@needs_kernels
def test_auto_is_native_only_where_the_program_runs_on_a_cpu(always_pays):
    def lowered(name: str, method: str, platform: str) -> str:
        function, arguments = problem(build(name, method, dtype=jnp.float32), lengths=LENGTHS)
        traced = jax.jit(with_gradients(function)).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for name in LAYERS:
        assert lowered(name, "auto", "cpu").count("custom_call @twinscan") == 2
        assert "stablehlo.while" not in lowered(name, "auto", "cpu")
        assert "twinscan" not in lowered(name, "auto", "tpu")
        with pytest.raises(NotImplementedError, match="runs on a CPU only"):
            lowered(name, "native", "cuda")


@needs_kernels
@pytest.mark.parametrize(("operator", "shapes"), OPERATORS)
def test_operators_are_lowered_for_cpus_only(operator, shapes):
    traced = jax.jit(with_gradients(operator)).trace(*map(jnp.ones, shapes))
    with pytest.raises(NotImplementedError, match="runs on a CPU only"):
        traced.lower(lowering_platforms=("cuda",))


@needs_kernels
@pytest.mark.parametrize(
    ("time", "dtype", "chosen"),
    [(16, jnp.float32, "native"), (15, jnp.float32, "xla"), (16, jnp.float64, "xla")],
)
def test_pays_for_long_sequences_in_float32(time, dtype, chosen, x64):
    layer = build("LSTM", "auto", dtype=dtype)
    [table] = ops.forms_of(layer, jnp.ones((4, time, FEATURES), dtype))
    assert table.chosen == chosen


X = jnp.ones((4, 6, FEATURES))
single = partial(build, dtype=jnp.float32)
REFUSED = {
    "not support projections": (partial(single, "LSTM", proj_features=2), X),
    "not support peepholes": (partial(single, "LSTM", use_peepholes=True), X),
    "gru with reset_after=True": (partial(single, "GRU", reset_after=False), X),
    "float32 and float64, not bfloat16": (
        partial(build, "RNN", dtype=jnp.bfloat16),
        X.astype("bfloat16"),
    ),
}


@needs_kernels
@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_the_reason_and_the_way_out(reason, always_pays):
    """With "auto", XLA runs what the kernels do not support."""
    layer, x = REFUSED[reason]
    with pytest.raises(NotImplementedError, match=f"{reason}.*method='auto'"):
        layer(method="native")(x)
    assert "native" not in str(jax.make_jaxpr(layer(method="auto").__call__)(x))


@needs_kernels
def test_refuses_another_default_device():
    layer = build("LSTM", "native", dtype=jnp.float32)
    state, cells = layer.init_state(4), [cell.arrays() for cell in layer.cells]
    with jax.default_device("gpu"), pytest.raises(NotImplementedError, match="is a gpu"):
        ops.lstm_stack(X, state, cells, num_directions=1, method="native")


def test_says_how_to_install_the_kernels(monkeypatch):
    monkeypatch.setattr(forms, "_forms", forms._forms.__wrapped__)
    monkeypatch.setattr(forms, "_packages", list)
    layer = build("LSTM", "native", dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=r"pip install \./native.*method='auto'"):
        layer(X)
    layer = build("LSTM", "auto", dtype=jnp.float32)
    assert "native" not in str(jax.make_jaxpr(layer.__call__)(X))
