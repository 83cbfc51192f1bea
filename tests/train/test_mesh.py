"""A run on a mesh of devices is the run of one device, to rounding."""

import os
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jax_models import (
    GPModelConfig,
    GriffinLanguageModelConfig,
    HawkLanguageModelConfig,
    HippogriffLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    RNNLanguageModelConfig,
    RWKV6LanguageModelConfig,
    RWKV7LanguageModelConfig,
    RWKVLanguageModelConfig,
)
from train.mesh import MeshConfig, build_mesh
from train.optimizer import OptimizerConfig, build_optimizer
from train.step import Trainer

STEPS, ROWS, WINDOW, VOCABULARY = 20, 8, 32, 64
SMALL = {"vocab_size": VOCABULARY, "features": 32, "num_layers": 2}
RNN = {"vocab_size": VOCABULARY, "embedding_features": 16, "hidden_features": 32}
DROPS = {"context_length": None, "num_layers": 2, "dropout_rate": 0.3}
MODELS = {
    "hawk": HawkLanguageModelConfig(**SMALL, mlp_features=96),
    "hawk, remat": HawkLanguageModelConfig(
        **SMALL | {"vocab_size": VOCABULARY + 1},
        mlp_features=96,
        remat="full",
        parameterization="softplus",
    ),
    "griffin": GriffinLanguageModelConfig(
        **SMALL | {"num_layers": 3}, mlp_features=96, recurrent_features=48, window=9
    ),
    "hippogriff": HippogriffLanguageModelConfig(
        **SMALL, mlp_features=96, hidden_features=48, window=9
    ),
    "rwkv": RWKVLanguageModelConfig(**SMALL, hidden_features=64),
    "rwkv6": RWKV6LanguageModelConfig(**SMALL, head_size=8, hidden_features=64),
    "rwkv7": RWKV7LanguageModelConfig(**SMALL, head_size=8, hidden_features=64),
    "lstm": RNNLanguageModelConfig(**RNN, **DROPS, cell="lstm"),
    "min-gru": RNNLanguageModelConfig(**RNN, **DROPS, cell="min_gru"),
    "hyena": GPModelConfig(**SMALL, context_length=WINDOW, embedding_dropout_rate=0.2),
    "hyena-dna": HyenaDNALanguageModelConfig(
        **SMALL, mlp_features=64, context_length=WINDOW, embedding_dropout_rate=0.2
    ),
    "attention": GPModelConfig(
        **SMALL, block="attention", num_heads=4, context_length=WINDOW, block_dropout_rate=0.2
    ),
}
MESHES = {
    "8×1×1": MeshConfig(data=8),
    "8×1×1, fully sharded": MeshConfig(data=8, fully_sharded=True),
    "4×2×1, fully sharded": MeshConfig(data=4, model=2, fully_sharded=True),
    "1×2×1": MeshConfig(data=1, model=2),
    "2×2×2": MeshConfig(data=2, model=2, sequence=2),
    "2×2×2, fully sharded": MeshConfig(data=2, model=2, sequence=2, fully_sharded=True),
    "1×1×8, fully sharded": MeshConfig(data=1, sequence=8, fully_sharded=True),
}
WITHOUT_MODEL, WITHOUT_TIME = {"hyena", "lstm"}, {"lstm", "attention"}
"""An LSTM's devices meet in every step: XLA may have too few threads for 8 CPU devices."""
WITHOUT_RESET = {"hyena", "hyena-dna"}

ON_EIGHT_DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
from tests.train.test_mesh import compare
compare({model!r}, {meshes!r})
"""


def meshes_of(model: str) -> list[str]:
    """Those that the model can be divided over."""
    return [
        name
        for name, mesh in MESHES.items()
        if not (mesh.model > 1 and model in WITHOUT_MODEL)
        and not (mesh.sequence > 1 and model in WITHOUT_TIME)
    ]


def run(model: str, config: MeshConfig, devices):
    """Losses, weights and evaluated losses of some steps in float64; the share of a device."""
    mesh = build_mesh(config, rows=ROWS, window=WINDOW, devices=devices)
    trainer = Trainer(
        MODELS[model].build(param_dtype=jnp.float64, rngs=nnx.Rngs(0)),
        build_optimizer(OptimizerConfig(clip_norm=1.0), STEPS),
        mesh=mesh,
        fully_sharded=config.fully_sharded,
        seed=0,
        end_of_text=None if model in WITHOUT_RESET else 0,
    )
    state, losses = trainer.initial_state(), []
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS, ROWS, WINDOW + 1))
    for batch in rows:
        state, loss = trainer.step(state, trainer.put(batch))
        losses.append(loss)
    leaves = jax.tree.leaves(state)
    share = sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)
    evaluated = trainer.evaluate(state.params, rows[:2])
    return jax.device_get((losses, jax.tree.leaves(state.params), evaluated)), share


def compare(model: str, meshes: list[str]) -> None:
    """Assert that the meshes' results are one device's."""
    expected, _ = run(model, MeshConfig(), jax.devices()[:1])
    for name in meshes:
        found, share = run(model, MESHES[name], jax.devices())
        chex.assert_trees_all_close(found, expected, rtol=1e-7, atol=1e-8)
        assert not MESHES[name].fully_sharded or share < 0.3, share


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("lstm", ["8×1×1, fully sharded"]),
        *(pytest.param(model, meshes_of(model), marks=pytest.mark.slow) for model in MODELS),
    ],
)
def test_runs_as_on_one_device(model, meshes):
    """20 steps of Adam, with dropout where there is any, on documents where states are reset."""
    script = ON_EIGHT_DEVICES.format(model=model, meshes=meshes)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_one_cpu_becomes_the_devices_of_the_mesh(tmp_path):
    """Of a new run, of one that is resumed, whose config says how many, and not where told."""

    def start(*args: str, **env: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "train", "--eval-batches", "1", *args]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)

    folder = str(tmp_path / "run")
    first = start("--out", folder, "--num-steps", "2", "--mesh.data", "4")
    assert "4 × cpu" in first.stdout, first.stderr
    second = start("--resume", folder, "--num-steps", "4")
    assert "4 × cpu" in second.stdout, second.stderr
    told = start("--resume", folder, "--num-steps", "6", JAX_NUM_CPU_DEVICES="2")
    assert "error: --mesh: expected data × model × sequence to divide the 2 devices" in told.stderr


@pytest.mark.optimized
def test_more_devices_than_cores_do_not_wait_for_each_other_forever(tmp_path):
    """As compiled for users: many collectives of a device at once."""
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
    ("model", "config", "message"),
    [
        ("lstm", MeshConfig(sequence=2), "mesh.sequence: expected 1, got 2: LSTM: time_axis: "),
        (
            "hyena",
            MeshConfig(model=2),
            "mesh.model: expected 1, since no layer of GPModel declares",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused(model, config, message):
    sizes = config.data or 1, config.sequence, config.model
    devices = np.full(sizes, jax.devices()[0])
    mesh = Mesh(devices, ("data", "sequence", "model"))
    with pytest.raises((NotImplementedError, ValueError), match=message):
        Trainer(
            nnx.eval_shape(lambda: MODELS[model].build(rngs=nnx.Rngs(0))),
            optax.sgd(1.0),
            mesh=mesh,
            seed=0,
        )
