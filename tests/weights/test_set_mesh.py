"""Loading under `jax.set_mesh` shards each parameter by its axis names, or replicates it."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from published import GRIFFIN, HYENA_DNA, RWKV, assert_same_weights, build
from safetensors.numpy import save_file

import train.command.evaluate
import train.command.export
import train.command.generate
import train.command.train
from jax_models import (
    LSTM,
    Experts,
    SileroVAD,
    from_onnx,
    from_torch,
    from_weights,
    load_pretrained,
    to_torch,
)
from jax_models.weights.checkpoint import open_checkpoint
from jax_models.weights.layouts import params_of
from train.trainer.mesh import THREADS_OF_DEVICE

COLUMNS = P(None, "model")
NAMED = {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), COLUMNS)}
EIGHT = {
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    "NPROC": str(8 * THREADS_OF_DEVICE),
}
"""Eight devices, which run one program after the other, so that no two wait for each other."""


only_on_eight = pytest.mark.skipif(
    not EIGHT.items() <= os.environ.items(), reason="`test_on_eight_devices` runs it"
)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    """A mesh of all devices: one, or eight in `test_on_eight_devices`."""
    return jax.make_mesh((jax.device_count(),), ("model",), axis_types=(request.param,))


def lstm(options):
    return LSTM(8, 16, rngs=nnx.Rngs(0), **options)


def assert_placed(layer, mesh, specs=None):
    for path, param in params_of(layer).items():
        expected = NamedSharding(mesh, (specs or {}).get(path, P()))
        assert param.get_value().sharding.is_equivalent_to(expected, param.ndim), path


@pytest.mark.slow
@only_on_eight
@pytest.mark.parametrize("options", [{}, NAMED], ids=["no names", "names"])
@pytest.mark.parametrize("build", [lstm, lambda options: nnx.eval_shape(lambda: lstm(options))])
@pytest.mark.parametrize("mesh_set_for", ["build", "load", "both"])
def test_a_layer_is_placed(mesh, options, build, mesh_set_for):
    def context(step):
        if mesh_set_for in (step, "both"):
            return jax.set_mesh(mesh)
        return nnx.use_eager_sharding(False)  # keeps the names

    weights = torch.nn.LSTM(8, 16).state_dict()
    with context("build"):
        layer = build(options)
    with context("load"):
        layer = from_torch(layer, weights)
    assert_placed(layer, mesh, {"cells.0.kernel_ih": COLUMNS} if options else {})
    for key, array in to_torch(layer).items():
        np.testing.assert_array_equal(array, weights[key].numpy())


@pytest.mark.slow
@only_on_eight
@pytest.mark.parametrize("options", [{}, {"time_major": True, "dropout_rate": 0.5}], ids=str)
def test_a_placed_layer_runs(mesh, options):
    """It computes as on one device, eagerly and compiled. Dropout draws new masks."""
    rows = P(None, "model") if options else P("model")
    x = np.random.default_rng(0).standard_normal((8, 8, 8), np.float32)
    weights = torch.nn.LSTM(8, 16, num_layers=2).state_dict()

    def build(**names):
        layer = LSTM(8, 16, num_layers=2, rngs=nnx.Rngs(0), **options, **names)
        layer = from_torch(layer, weights)
        return layer, nnx.view(layer, deterministic=True)

    _, expected = build()
    y, state = expected(x)
    with jax.set_mesh(mesh):
        dropping, layer = build(**NAMED)
        sharded = jax.device_put(x, NamedSharding(mesh, rows))
        for call in (layer, nnx.jit(lambda x: layer(x))):
            found = call(sharded)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((y, state)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6)
            if AxisType.Explicit in mesh.axis_types:
                assert [jax.typeof(a).sharding.spec.index("model") for a in found[1]] == [1, 1]
                assert jax.typeof(found[0]).sharding.spec == P(*rows, *[None] * (3 - len(rows)))
        assert not options or (dropping(sharded)[0] != dropping(sharded)[0]).any()


def loads_a_file(folder):
    save_file(to_torch(SileroVAD(rngs=nnx.Rngs(0))), folder / "vad.safetensors")
    return lambda: load_pretrained(folder / "vad.safetensors")


def loads_onnx(folder):
    helper = pytest.importorskip("onnx").helper
    node = helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=4)
    model = helper.make_model(helper.make_graph([node], "a", [], []))
    weights = {"W": np.ones((1, 12, 3), np.float32), "R": np.ones((1, 12, 4), np.float32)}
    return lambda: from_onnx(model, weights=weights)


WITH_DROPOUT = replace(HYENA_DNA, block_dropout_rate=0.1)
LOADERS = {
    "load_pretrained": loads_a_file,
    "from_onnx": loads_onnx,
    **{
        name: lambda folder, load=load, config=config: partial(load, to_torch(build(config)))
        for name, load, config in (
            ("from_weights", from_weights, RWKV),
            ("its own config", partial(from_weights, config=GRIFFIN), GRIFFIN),
            ("dropout", partial(from_weights, config=WITH_DROPOUT), HYENA_DNA),
        )
    },
}


@pytest.mark.slow
@only_on_eight
@pytest.mark.parametrize(
    ("file", "inputs", "count"),
    [
        ("experts.pt", ("gate_up", "gate_up"), 16),
        ("experts.safetensors", ("gate_up", "gate_up"), 8),
        ("experts.safetensors", ("{}.gate", "{}.up"), 16),
        ("orbax", ("gate_up", "gate_up"), 8),
    ],
)
def test_devices_read_their_experts(mesh, file, inputs, count, tmp_path):
    """Each expert is read once, and those of one device at a time, except from orbax."""
    experts = Experts(5, 4, count, 2, rngs=nnx.Rngs(0))
    table = experts.rows("router", *inputs, "down")
    weights, path = to_torch(experts, table), tmp_path / file
    if file.endswith(".pt"):  # not contiguous
        torch.save({k: torch.from_numpy(np.asfortranarray(a)) for k, a in weights.items()}, path)
    elif file == "orbax":
        ocp.PyTreeCheckpointer().save(path, weights)
    else:
        save_file(weights, path)
    reads = []

    def recorded(key, stored):
        def read(part):
            reads.append((key, part if part is ... else (part.start, part.stop)))
            return stored.read(part)

        return replace(stored, read=read)

    layer = nnx.eval_shape(lambda: Experts(5, 4, count, 2, rngs=nnx.Rngs(0)))
    divided = {path: P("model") for path in ("gate_kernel", "up_kernel", "down_kernel")}
    for name, param in params_of(layer).items():
        like, sharding = param.get_value(), NamedSharding(mesh, divided.get(name, P()))
        param.set_value(jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding))
    from_torch(
        layer, {key: recorded(key, a) for key, a in open_checkpoint(path).weights.items()}, table
    )

    assert_placed(layer, mesh, divided)
    assert_same_weights(to_torch(layer, table), weights)
    of_devices = [(start, start + count // 8) for start in range(0, count, count // 8)]
    stacks = {*()} if file == "orbax" else {"gate_up", "down"}
    expected = [(key, part) for key in weights.keys() & stacks for part in of_devices]
    expected += [(key, ...) for key in weights.keys() - stacks]
    assert sorted(reads, key=str) == sorted(expected, key=str)


@pytest.mark.slow
@only_on_eight
@pytest.mark.parametrize("name", LOADERS)
def test_whatever_loads_is_placed(name, mesh, tmp_path):
    load = LOADERS[name](tmp_path)
    expected = to_torch(load())
    with jax.set_mesh(mesh):
        model = load()
    assert_placed(model, mesh)
    assert_same_weights(to_torch(model), expected)


def test_an_array_stays_where_somebody_put_it(mesh):
    weights = torch.nn.LSTM(8, 16).state_dict()
    graph, params = nnx.split(lstm({}))
    place = NamedSharding(mesh, P("model"))
    layer = nnx.merge(graph, jax.device_put(params, place))
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context:
            layer = from_torch(layer, weights)
        assert {param.get_value().sharding for param in params_of(layer).values()} == {place}
    with jax.default_device(jax.devices()[-1]):
        layer = from_torch(lstm({}), weights)
    assert from_torch(layer, weights).cells[0].bias_ih.devices() == {jax.devices()[-1]}
    assert not from_torch(lstm({}), weights).cells[0].bias_ih.get_value().committed


def test_what_does_not_fit_the_mesh_is_named(mesh):
    weights = torch.nn.LSTM(8, 16).state_dict()
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(lambda: lstm(NAMED))
    with (
        jax.set_mesh(jax.make_mesh((1,), ("other",))),
        pytest.raises(ValueError, match=r"^layer: cells.0.kernel_ih cannot be put on .*'model'"),
    ):
        from_torch(abstract, weights)
    many = AbstractMesh((4096,), ("model",), axis_types=mesh.axis_types)
    with jax.sharding.use_abstract_mesh(many):
        abstract = nnx.eval_shape(lambda: lstm({}))
    with pytest.raises(ValueError, match=r"^layer: it was built for a mesh of 4096 devices, got "):
        from_torch(abstract, weights)
    with pytest.raises(ValueError, match=r"^layer: its parameters are traced, as under jax.jit"):
        jax.eval_shape(lambda: nnx.state(from_torch(lstm({}), weights)))


@pytest.mark.slow
@only_on_eight
def test_a_command_builds_its_own_mesh(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.command.train, "report", lambda *_: None)

    def printed(context, run):
        with context:
            train.command.train.main(["--out", run, "--num-steps", "2", "--eval-batches", "1"])
            capsys.readouterr()
            train.command.evaluate.main(["--run", run])
            train.command.generate.main(["--run", run, "--num-tokens", "9"])
            train.command.export.main(["--run", run])
        return capsys.readouterr().out.replace(run, "")

    expected = printed(contextlib.nullcontext(), str(tmp_path / "without"))
    mesh = jax.make_mesh((jax.device_count(),), ("model",))
    assert printed(jax.set_mesh(mesh), str(tmp_path / "with")) == expected


@pytest.mark.slow
@pytest.mark.skipif(EIGHT.items() <= os.environ.items(), reason="there are eight")
def test_on_eight_devices():
    """Runs in another process, because the number of devices must be set before JAX starts."""
    command = [sys.executable, "-m", "pytest", "-q", "--capture=no", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=os.environ | EIGHT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
