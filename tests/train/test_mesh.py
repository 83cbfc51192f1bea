"""A run on a mesh of devices equals the run on one device up to rounding, or is refused."""

import dataclasses
import gc
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from safetensors.numpy import load_file, save_file

import train.command.train as train_command
from jax_models import (
    MLSTM,
    GatedDeltaNet,
    GatedMLP,
    GriffinRecurrence,
    Hawk,
    HawkLanguageModelConfig,
    HippogriffHawk,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    LocalAttention,
    to_torch,
)
from jax_models.mesh_axes import declared_mesh_axes, last_axis, whole
from jax_models.models.decoder import Decoder
from jax_models.weights import checkpoint, transfer
from parity_tests.registry import CASES
from train.data.vocabulary import Characters
from train.process.digest import leaves_by_path
from train.run.config import TrainConfig
from train.run.folder import EXPORTED, Run, build_trainer
from train.trainer import initialization
from train.trainer.mesh import MODEL, MeshConfig, build_mesh, param_specs
from train.trainer.optimizer import OptimizerConfig, build_optimizer
from train.trainer.step import Trainer

STEPS, ROWS, WINDOW, VOCABULARY = 4, 8, 32, 64
MODELS = {name: case for name, case in CASES.items() if case.config is not None}
MESHES = {
    "8×1×1": MeshConfig(data=8),
    "8×1×1, fully sharded": MeshConfig(data=8, fully_sharded=True),
    "4×2×1, fully sharded": MeshConfig(data=4, model=2, fully_sharded=True),
    "2×2×2": MeshConfig(data=2, model=2, sequence=2),
    "2×2×2, fully sharded": MeshConfig(data=2, model=2, sequence=2, fully_sharded=True),
    "1×1×8, fully sharded": MeshConfig(data=1, sequence=8, fully_sharded=True),
}
MIN_GRU = "RNNLanguageModel of minGRU"
MESHES_OF = {
    MIN_GRU: (*MESHES,),
    "GPModel of attention": ("4×2×1, fully sharded",),
    "RNNLanguageModel of LSTM": ("8×1×1, fully sharded",),
    **dict.fromkeys(
        (
            "FalconH1LanguageModel",
            "GriffinLanguageModel",
            "HyenaDNALanguageModel",
            "MambaLanguageModel",
            "Qwen35LanguageModel, experts",
            "RWKV7LanguageModel",
        ),
        ("2×2×2, fully sharded",),
    ),
}
"""The meshes to compare for some models, which have each kind of mixer.

Layers that divide time are compared one by one in `test_time_axis.py`, and the declarations of all
models below.
"""


def config_of(name: str, scale: int, **options):
    """The config of a registered model, with more features, and with the options that it has."""
    config = MODELS[name].config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    wide = {
        field: scale * size
        for field, size in fields.items()
        # The number of position features of a filter must stay odd.
        if field.endswith("features") and field != "embed_features" and size
    }
    known = {field: value for field, value in options.items() if fields.get(field) is not None}
    return dataclasses.replace(config, **wide, **known)


def run(name: str, config: MeshConfig, devices):
    """The losses and weights of some float64 steps, and a device's share.

    One model is evaluated, too.
    """
    mesh = build_mesh(config, rows=ROWS, window=WINDOW, devices=devices)
    rates = dict.fromkeys(("dropout_rate", "block_dropout_rate", "embedding_dropout_rate"), 0.2)
    remat = "full" if config.fully_sharded else "none"
    # Dropout between layers needs two of them, Griffin's attention three.
    layers = min(max(MODELS[name].config.num_layers, 2), 3)
    sizes = {"vocab_size": VOCABULARY, "context_length": WINDOW, "num_layers": layers}
    balance = {"balance_experts": True, "balance_coefficient": 0.5}
    model = config_of(name, 8, remat=remat, **sizes, **rates, **balance)
    trainer = Trainer(
        lambda: model.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0)),
        build_optimizer(OptimizerConfig(clip_norm=1.0), STEPS),
        mesh=mesh,
        fully_sharded=config.fully_sharded,
        seed=0,
        end_of_text=0 if MODELS[name].resettable else None,
    )
    state, losses = trainer.initial_state(), []
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS, ROWS, WINDOW + 1))
    for batch in rows:
        state, loss = trainer.step(state, trainer.put(batch))
        losses.append(loss)
    leaves = jax.tree.leaves(state)
    share = sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)
    evaluated = trainer.evaluate(state.params, rows[:2]) if name == MIN_GRU else []
    return jax.device_get((losses, jax.tree.leaves(state.params), evaluated)), share


def compare(name: str, meshes: Sequence[str]) -> None:
    """Asserts that the results on each mesh are those of one device."""
    expected, _ = run(name, MeshConfig(), jax.devices()[:1])
    for config in map(MESHES.__getitem__, meshes):
        found, share = run(name, config, jax.devices())
        chex.assert_trees_all_close(found, expected, rtol=1e-7, atol=1e-8)
        assert not config.fully_sharded or share < 0.3, share


@pytest.mark.slow
@pytest.mark.parametrize(("model", "meshes"), MESHES_OF.items())
def test_runs_as_on_one_device(on_eight_devices, model, meshes):
    """Takes some steps of Adam with dropout, if the model has it, on documents with resets."""
    on_eight_devices(compare, model, meshes)


def start_and_end_divided(source: str, folder: Path) -> None:
    """Asserts that no device holds a whole matrix at any time while a run starts and reports.

    The parameters must be those that the model has when it is built on one device, and so must the
    exported ones.
    """
    config = TrainConfig(
        config_of("GriffinLanguageModel", 8, vocab_size=VOCABULARY),
        optimizer=OptimizerConfig(ema_decay=0.9),
        mesh=MESHES["8×1×1, fully sharded"],
        batch_size=8,
        init=None if source == "scratch" else folder / source,
    )
    vocabulary, model = Characters("ab"), config.model.build(rngs=nnx.Rngs(config.seed))
    expected = jax.device_get(nnx.state(model, nnx.Param))
    sizes = [x.size for x in jax.tree.leaves(expected)]
    smallest, largest = min(x.size for x in jax.tree.leaves(expected) if x.ndim > 1), max(sizes)
    save_file(to_torch(model), folder / "a.safetensors")
    run = Run.create(folder / "run", TrainConfig(config.model), vocabulary, "")
    run.checkpoints.save(0, build_trainer(run.config).initial_state(), None)
    run.checkpoints.close()
    earlier = {id(array): array for array in jax.live_arrays()}

    looks: list[int] = []

    def check(least: int) -> int:
        """Returns the number of arrays that are at least so large."""
        new = [x for x in jax.live_arrays() if id(x) not in earlier]
        large = [x for x in new if x.size >= least and jnp.issubdtype(x.dtype, jnp.floating)]
        # To read an array, JAX makes an array of each of its shards, in the same memory.
        divided = [x for x in large if len(x.devices()) > 1]
        shards = [shard.data for x in divided for shard in x.addressable_shards]
        memory = {shard.unsafe_buffer_pointer() for shard in shards}
        large = [
            x for x in large if len(x.devices()) > 1 or x.unsafe_buffer_pointer() not in memory
        ]
        for array in large:
            part = array.sharding.shard_shape(array.shape)
            assert 8 * math.prod(part) == array.size, array.shape
        looks.append(len(large))
        return len(large)

    def checked(function, least: int):
        def call(*args):
            check(least)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        # Look before each operation of the initialization, before each read of a weight, and before
        # the state is made of the parameters.
        for place in (
            (initialization, "jaxpr_as_fun"),
            (checkpoint, "_read"),
            (Trainer, "initial_state"),
        ):
            patch.setattr(*place, checked(getattr(*place), smallest))
        plan = train_command.Plan(config, vocabulary, {}, "", folder / "new")
        trainer, state = train_command.build_trainer_of_plan(plan)
        state = state or trainer.initial_state()
        # The state has each matrix, its average and its two moments. The trainer has none of them.
        assert check(smallest) == 4 * sum(size >= smallest for size in sizes)
        # Look before each weight is written, before each call of a program that draws tokens, and
        # before the twin runs. The state of a text is smaller than the largest matrices.
        new = Run.create(folder / "new", config, vocabulary, "")
        for place in (
            (transfer, "_exported"),
            (Decoder, "first"),
            (Decoder, "steps"),
            (train_command, "describe_errors"),
        ):
            patch.setattr(*place, checked(getattr(*place), largest))
        looks.clear()
        params = trainer.addressable(state.averaged_params)
        train_command.report(new, trainer.model(params), Console(quiet=True))
        assert len(looks) > len(sizes)
        assert {*looks} == {4 * sizes.count(largest)}
    chex.assert_trees_all_equal(jax.device_get(state.params), expected)
    chex.assert_trees_all_equal(jax.device_get(state.averaged_params), expected)
    chex.assert_trees_all_equal(load_file(new.folder / EXPORTED), to_torch(model))
    del state, params
    gc.collect()  # of arrays in cycles of references
    assert check(smallest) == 0


@pytest.mark.slow
@pytest.mark.parametrize("source", ["scratch", "a.safetensors", "run"])
def test_no_device_holds_a_whole_matrix_as_a_run_starts_and_ends(
    on_eight_devices, source, tmp_path
):
    on_eight_devices(start_and_end_divided, source, tmp_path)


@pytest.mark.slow
def test_one_cpu_becomes_the_devices_of_the_mesh(tmp_path):
    """The run takes the number from its config, unless the environment sets it."""

    def start(*args: str, **env: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "train", "--eval-batches", "1", *args]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)

    folder = str(tmp_path / "run")
    first = start("--out", folder, "--num-steps", "2", "--mesh.data", "4")
    assert "4 × cpu" in first.stdout, first.stderr
    other = start("--resume", folder, "--num-steps", "4", JAX_NUM_CPU_DEVICES="2")
    assert "error: --mesh: expected data × model × sequence to divide the 2 devices" in other.stderr


@pytest.mark.optimized
def test_more_devices_than_cores_do_not_wait_for_each_other_forever(tmp_path):
    """Compiled as for users, a device starts many collectives at once."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question.\n" * 200)
    options = "--preset hawk --optimizer.warmup-steps 0 --batch-size 8 --eval-batches 1"
    mesh = "--mesh.data 4 --mesh.model 2 --mesh.fully-sharded --num-steps 4 --eval-every 4"
    command = [sys.executable, "-m", "train", "--text", str(text), "--out", str(tmp_path / "run")]
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    run = subprocess.run(
        [*command, *options.split(), *mesh.split()], capture_output=True, text=True, env=env
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        ({"model": 3}, {}, "mesh: expected model × sequence to divide the 8 devices, got 3 × 1"),
        ({"data": 3}, {}, "mesh: expected data × model × sequence to divide the 8 devices, got 3"),
        ({"data": 8}, {"rows": 12}, "mesh.data: expected a divisor of the 12 rows of a batch"),
        ({"sequence": 4}, {"window": 6}, "mesh.sequence: expected a divisor of the window of 6"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(config, sizes, message):
    sizes = {"rows": 8, "window": 8, **sizes}
    with pytest.raises(ValueError, match=re.escape(message)):
        build_mesh(MeshConfig(**config), **sizes, devices=[*range(8)])


@pytest.mark.parametrize(
    ("model", "axis", "message"),
    [
        ("RNNLanguageModel of LSTM", "sequence", "expected 1, got 2: LSTM: time_axis: "),
        ("GPModel of attention", "sequence", "expected 1, got 2: "),
        ("GPModel of hyena", "model", "expected 1, since no layer of GPModel "),
        ("RNNLanguageModel of LSTM", "model", "expected 1, since no layer"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(model, axis, message):
    shape = [1 + (name == axis) for name in ("data", "sequence", "model")]
    mesh = Mesh(np.full(shape, jax.devices()[0]), ("data", "sequence", "model"))

    def build():
        return MODELS[model].config.build(rngs=nnx.Rngs(0))

    with pytest.raises((NotImplementedError, ValueError), match=f"^mesh.{axis}: {message}"):
        Trainer(build, optax.sgd(1.0), mesh=mesh, seed=0)


MESH = AbstractMesh((1, 1, 2), ("data", "sequence", "model"))


def specs(model):
    """The sharding of each parameter on a mesh of two devices."""
    found = param_specs(model, MESH, fully_sharded=False)
    return {path.removesuffix(".value"): spec for path, spec in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_large_parameter_is_declared_and_divided(name):
    """Large means more than half the size of a (features, features) matrix."""
    config = config_of(name, 32)  # so that heads, ranks and taps are small
    model = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))
    declared, features = declared_mesh_axes(model), model.embedding.features
    params = leaves_by_path(nnx.state(model, nnx.Param))
    large = {path.removesuffix(".value") for path, x in params.items() if 2 * x.size > features**2}
    assert large
    assert large <= declared.keys()
    if divided := {path for path in large if declared[path] is not None}:
        assert divided == {path for path, spec in specs(model).items() if MODEL in spec} & large


griffin = partial(GriffinRecurrence, 32, num_blocks=4, hidden_features=48)
attention = partial(LocalAttention, 32, 4, window=9)
delta = partial(
    GatedDeltaNet, 32, num_key_heads=2, num_value_heads=4, key_features=8, value_features=6
)
kimi = partial(KimiDeltaAttention, 32, num_heads=4, head_features=8)
lightning = partial(LightningAttention, 32, num_heads=4)
mlstm = partial(MLSTM, 32, num_heads=4)
latent = partial(
    LatentAttention,
    32,
    num_heads=4,
    latent_features=6,
    key_features=5,
    shared_features=3,
    value_features=4,
)


@pytest.mark.parametrize(
    ("layer", "path", "axis"),
    [
        (partial(Hawk, 32), "rglru.input_gate.kernel", 1),
        (partial(Hawk, 32), "rglru.a_param", 0),
        (griffin, "rglru.input_gate.kernel", 0),
        (griffin, "rglru.a_param", 0),
        (griffin, "conv.kernel", 1),
        (griffin, "out_proj.kernel", 0),
        (griffin, "out_proj.bias", None),
        (partial(HippogriffHawk, 32), "rglru.input_gate.kernel", 2),
        (partial(HippogriffHawk, 32), "rglru.a_param", 0),
        (attention, "q_proj.kernel", 1),
        (attention, "k_proj.kernel", None),
        (partial(attention, num_kv_heads=4), "k_proj.kernel", 1),
        (delta, "q_proj.kernel", 1),
        (delta, "A_log", 0),
        (delta, "conv.kernel", None),
        (delta, "out_proj.kernel", 0),
        (kimi, "f_proj.a_proj.kernel", None),
        (kimi, "f_proj.b_proj.kernel", 1),
        (partial(kimi, low_rank=False), "g_proj.kernel", 1),
        (kimi, "dt_bias", 0),
        (lightning, "g_proj.kernel", 1),
        (lightning, "out_proj.kernel", 0),
        (mlstm, "i_proj.bias", 0),
        (mlstm, "norm.scale", 0),
        (mlstm, "out_proj.kernel", 0),
        (latent, "q_proj.kernel", 1),
        (latent, "latent_proj.kernel", None),
        (latent, "kv_proj.kernel", 1),
        (latent, "out_proj.kernel", 0),
    ],
)
def test_a_layer_is_divided_by_features_blocks_of_gates_or_heads(layer, path, axis):
    spec = specs(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0))))[path]
    assert [i for i, name in enumerate(spec) if name == MODEL] == [*{axis} - {None}]


def test_a_width_that_does_not_divide_is_refused():
    mlp = nnx.eval_shape(lambda: GatedMLP(4, 5, rngs=nnx.Rngs(0)))
    message = "^mesh.model: expected a divisor of 5, the size of axis 'hidden' of down_proj.kernel"
    with pytest.raises(ValueError, match=message):
        specs(mlp)


@pytest.mark.parametrize(("size", "axis"), [(64, MODEL), (65, None)])
def test_a_vocabulary_is_divided_where_it_divides(size, axis):
    config = HawkLanguageModelConfig(vocab_size=size, features=8, num_layers=1, mlp_features=8)
    found = specs(nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0))))
    assert found["embedding.embedding"] == P(axis, None)


def test_a_submodules_declaration_counts():
    class Outer(nnx.Module):
        mesh_axes = last_axis("features", "mlp") | whole("other")

        def __init__(self, rngs):
            self.mlp = GatedMLP(4, 8, use_bias=True, rngs=rngs)
            self.other = nnx.Linear(4, 4, rngs=rngs)

    declared = declared_mesh_axes(nnx.eval_shape(lambda: Outer(nnx.Rngs(0))))
    assert declared["mlp.down_proj.kernel"] == ("hidden", 0)
    assert declared["mlp.down_proj.bias"] == ("features", -1)
    assert declared["other.bias"] is None
