"""Frozen parameters keep their values, and the others are trained as with optax's masks."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import train.command.train as train_command
from jax_models import HawkLanguageModelConfig, LanguageModel
from train.process.digest import leaves_by_path
from train.run.folder import Run, build_trainer
from train.trainer.freeze import trainable
from train.trainer.mesh import MeshConfig, build_mesh
from train.trainer.optimizer import OptimizerConfig, apply_gradient, build_optimizer
from train.trainer.step import Trainer, TrainState, token_losses

FREEZE = ("embedding", r"blocks\.0\.")
ONE = MeshConfig(data=1)
ROWS = np.random.default_rng(0).integers(0, 20, (3, 4, 9))


def is_frozen(path: str) -> bool:
    return any(re.search(pattern, path) for pattern in FREEZE)


def model() -> LanguageModel:
    config = HawkLanguageModelConfig(
        20, features=8, num_layers=2, mlp_features=12, parameterization="softplus"
    )
    return config.build(rngs=nnx.Rngs(0))


def trained(optimizer, model: LanguageModel, mesh: MeshConfig = ONE, **options) -> TrainState:
    """The state after a step on each batch."""
    on = build_mesh(mesh, rows=4, window=8, devices=jax.devices()[: mesh.data])
    trainer = Trainer(
        lambda: model, optimizer, mesh=on, fully_sharded=mesh.fully_sharded, seed=0, **options
    )
    state = trainer.initial_state()
    for rows in ROWS:
        state, _ = trainer.step(state, trainer.put(rows))
    return jax.device_get(state)


@pytest.mark.slow
def test_the_others_are_trained_as_with_a_mask():
    """`optax.multi_transform` on the whole model gives the same parameters."""
    config = OptimizerConfig(clip_norm=0.1, weight_decay=0.3)
    state = trained(build_optimizer(config, 9), model(), freeze=FREEZE, accumulate=2)

    def labels(params):
        names = ["frozen" if is_frozen(path) else "trained" for path in leaves_by_path(params)]
        return jax.tree.unflatten(jax.tree.structure(params), names)

    parts = {"frozen": optax.set_to_zero(), "trained": build_optimizer(config, 9)}
    masked = optax.multi_transform(parts, labels)
    graphdef, params = nnx.split(model())
    initial, optimizer_state = leaves_by_path(params), masked.init(params)

    @jax.jit
    def gradient(params, rows):
        return jax.grad(
            lambda params: token_losses(
                nnx.merge(graphdef, params), rows[:, :-1], rows[:, 1:]
            ).mean()
        )(params)

    for rows in ROWS:
        params, optimizer_state = apply_gradient(
            masked, gradient(params, rows), optimizer_state, params
        )
    chex.assert_trees_all_close(state.params, params, rtol=1e-5, atol=1e-7)
    for path, value in leaves_by_path(state.params).items():
        assert np.array_equal(value, initial[path]) == is_frozen(path), path


@pytest.mark.slow
def test_frozen_parameters_have_no_gradients_moments_or_averages():
    config = OptimizerConfig(ema_decay=0.9, clip_norm=0.01)
    state = trained(build_optimizer(config, 9), model(), freeze=FREEZE)
    arrays = leaves_by_path(state.optimizer_state)
    assert len(arrays) > 9
    assert not [path for path in arrays if is_frozen(path)]
    averaged = leaves_by_path(state.averaged_params)
    for path, value in leaves_by_path(state.params).items():
        assert np.array_equal(averaged[path], value) == is_frozen(path), path
    # The program computes no gradient for them: only the trained ones enter the norm, which is that
    # before clipping.
    trainer = Trainer(
        model,
        build_optimizer(config, 9),
        mesh=build_mesh(MeshConfig(), rows=4, window=8, devices=jax.devices()[:1]),
        seed=0,
        freeze=("^(?!norm)",),
    )
    _, measures = trainer.step(trainer.initial_state(), trainer.put(ROWS[0]))
    losses = partial(trainer.losses, inputs=ROWS[0][:, :-1], targets=ROWS[0][:, 1:])
    gradient = nnx.grad(lambda model: jnp.mean(losses(model)))(model())
    norm = optax.tree.norm(nnx.state(gradient["norm"]))
    np.testing.assert_allclose(measures.gradient_norm, norm, rtol=1e-5)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("head", "nix"), "that match the path of a parameter, got 'nix'"),
        (("(",), "regular expressions, got '\\('"),
        ((".",), "patterns that leave parameters to train, got ., "),
    ],
)
def test_patterns_that_cannot_be_used_are_refused(patterns, message):
    params = nnx.eval_shape(lambda: nnx.state(model(), nnx.Param))
    with pytest.raises(ValueError, match=f"^freeze: expected .*{message}"):
        trainable(params, patterns)


@pytest.mark.slow
def test_low_rank_additions_are_trained_alone():
    """`nnx.LoRA` wraps the projections of the blocks, and starts as the model itself."""
    lm = model()
    for _, module in [*nnx.iter_modules(lm.blocks)]:
        for name, layer in [*vars(module).items()]:
            if name.endswith("_proj"):
                sizes = layer.in_features, 2, layer.out_features
                setattr(module, name, nnx.LoRA(*sizes, base_module=layer, rngs=nnx.Rngs(1)))
    tokens = ROWS[0]
    np.testing.assert_allclose(lm(tokens)[0], model()(tokens)[0], rtol=1e-6, atol=1e-6)
    state = trained(build_optimizer(OptimizerConfig(), 9), lm, freeze=("^(?!.*lora_)",))
    before, after = leaves_by_path(nnx.state(lm, nnx.Param)), leaves_by_path(state.params)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {path for path in before if "lora_" in path}
    assert len(changed) >= 2 * 2 * 4


@pytest.mark.slow
def test_a_run_keeps_its_frozen_parameters(tmp_path, monkeypatch, unreported):
    """Also when it is resumed with an average and with clipping.

    Its lines have no MFU, because that counts the gradients of all parameters.
    """
    monkeypatch.setattr("train.run.monitor.peak_flops", lambda *_: 1e12)
    folder = tmp_path / "run"
    short = ["--eval-batches", "1", "--eval-every", "2"]
    train_command.main(
        ["--out", str(folder), *short, "--num-steps", "2", "--freeze", "embedding", "head.kernel"]
    )
    first = leaves_by_path(nnx.state(Run.open(folder).model(), nnx.Param))
    train_command.main([
        *["--resume", str(folder), "--num-steps", "4"],
        *["--optimizer.ema-decay", "0.9", "--optimizer.clip-norm", "1"],
    ])  # fmt: skip
    run = Run.open(folder)
    assert run.config.freeze == ("embedding", "head.kernel")
    assert not any("mfu" in line for line in run.metrics("training"))
    initial = leaves_by_path(build_trainer(run.config, run.vocabulary).initial_state().params)
    for path, value in leaves_by_path(nnx.state(run.model(), nnx.Param)).items():
        kept = bool(re.search(r"embedding|head\.kernel", path))
        assert np.array_equal(value, initial[path]) == kept, path
        assert np.array_equal(value, first[path]) == kept, path


def compare_meshes() -> None:
    """Asserts that two devices give the results of one."""
    results = [
        trained(build_optimizer(OptimizerConfig(), 9), model(), mesh, freeze=FREEZE).params
        for mesh in (ONE, MeshConfig(data=2, fully_sharded=True))
    ]
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_devices_divide_frozen_parameters(on_eight_devices):
    on_eight_devices(compare_meshes)
