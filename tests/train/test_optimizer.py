"""The options of the optimizer, compared with torch and with their definitions."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import train.command.train as train_command
from jax_models import to_torch
from parity_tests.engine.bounds.tolerance import FLOAT64
from parity_tests.registry import CASES
from train.data.text import ALL_WORK
from train.data.vocabulary import Characters
from train.data.windows import Batches, split
from train.run.config import TrainConfig
from train.run.folder import Run, build_trainer
from train.trainer.accumulation import accumulate_gradients
from train.trainer.mesh import MeshConfig, build_mesh
from train.trainer.optimizer import (
    AveragedState,
    OptimizerConfig,
    add_decayed_weights,
    apply_gradient,
    build_optimizer,
    build_schedule,
    convert_state,
    is_matrix,
)
from train.trainer.step import Trainer

CONFIG = OptimizerConfig(learning_rate=0.1, warmup_steps=3)
PARAMS = {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.3, -0.1])}
GRADIENTS = [jax.tree.map(lambda p, i=i: jnp.sin(p + i), PARAMS) for i in range(9)]


def trained(config: OptimizerConfig, num_steps: int = 9) -> tuple[dict, optax.OptState]:
    optimizer = build_optimizer(config, num_steps)
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in GRADIENTS[:num_steps]:
        params, state = apply_gradient(optimizer, gradient, state, params)
    return params, state


@pytest.mark.parametrize(
    ("schedule", "last"), [("constant", 0.0), ("linear", 0.0), ("linear", 0.02), ("cosine", 0.02)]
)
def test_schedules(schedule, last):
    """The rate rises from zero, and then falls to the final rate at the last step."""
    config = dataclasses.replace(CONFIG, schedule=schedule, final_learning_rate=last)
    rates = [float(build_schedule(config, 9)(step)) for step in range(10)]
    share = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    }[schedule]
    falling = [last + (0.1 - last) * share(i / 6) for i in range(7)]
    if schedule == "constant":
        falling = [0.1] * 7
    np.testing.assert_allclose(rates, [0.0, 0.1 / 3, 0.2 / 3, *falling], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mask", ["all", "matrices"])
def test_decay_is_that_of_torchs_parameter_groups(mask):
    config = dataclasses.replace(CONFIG, weight_decay=0.3, decay_mask=mask)
    ours, _ = trained(config)
    twins = {name: torch.tensor(np.asarray(p), dtype=torch.float64) for name, p in PARAMS.items()}
    groups = [
        {"params": [twins["kernel"]], "weight_decay": 0.3},
        {"params": [twins["bias"]], "weight_decay": 0.3 if mask == "all" else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for step, gradient in enumerate(GRADIENTS):
        for group in optimizer.param_groups:
            group["lr"] = float(build_schedule(config, 9)(step))
        for name, twin in twins.items():
            twin.grad = torch.tensor(np.asarray(gradient[name]), dtype=torch.float64)
        optimizer.step()
    for name, twin in twins.items():
        np.testing.assert_allclose(ours[name], twin.numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_matrices_are_what_multiplies():
    """All kernels are matrices, unless they are vectors. The layers declare what is no matrix."""
    params = [nnx.state(case.abstract(jnp.float32), nnx.Param) for case in CASES.values()]
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, nnx.Param))
    declared = set()
    for path, param in leaves:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if "kernel" in name:
            assert is_matrix(param) == (param.ndim >= 2)
        if param.ndim < 2 or name == "embedding":
            assert not is_matrix(param)
        if param.ndim >= 2 and not is_matrix(param):
            declared.add(name)
    names = {"embedding", "pos_emb", "A_log", "B", "r_k", "time_faaaa"}
    assert declared == names


def test_a_layer_declares_what_does_not_decay():
    params = nnx.Dict(
        w=nnx.Param(jnp.ones((2, 2))), table=nnx.Param(jnp.ones((2, 2)), is_matrix=False)
    )
    params, still = nnx.state(params), jax.tree.map(jnp.zeros_like, nnx.state(params))
    for mask, decayed in (("matrices", {"w"}), ("all", {"w", "table"})):
        updates, _ = add_decayed_weights(0.5, mask).update(still, optax.EmptyState(), params)
        for name, update in updates.items():
            assert (update.get_value() == 0.5 * (name in decayed)).all(), (mask, name)


def test_the_average_is_the_weighted_mean_of_what_the_steps_made():
    averaged = dataclasses.replace(CONFIG, ema_decay=0.7)
    optimizer = build_optimizer(CONFIG, 9)
    params, state, made = PARAMS, optimizer.init(PARAMS), []
    for gradient in GRADIENTS:
        params, state = apply_gradient(optimizer, gradient, state, params)
        made.append(params)
    weights = 0.7 ** np.arange(8, -1, -1)
    expected = {name: np.average([m[name] for m in made], 0, weights) for name in PARAMS}
    params, state = trained(averaged)
    assert isinstance(state, AveragedState)
    chex.assert_trees_all_equal(params, made[-1])
    chex.assert_trees_all_close(state.params, expected, rtol=1e-5)


def test_the_average_stays_inside_the_bounds():
    params = nnx.State({"a": nnx.Param(jnp.array([0.99]), bounds=(0.0, 1.0))})
    optimizer = build_optimizer(OptimizerConfig(learning_rate=1.0, ema_decay=0.5), 9)
    gradient = jax.tree.map(lambda p: -jnp.ones_like(p), params)
    _, state = apply_gradient(optimizer, gradient, optimizer.init(params), params)
    assert state.params["a"].get_value() == 1.0


FORMS = [
    dataclasses.replace(CONFIG, clip_norm=clip_norm, ema_decay=ema_decay)
    for clip_norm in (None, 0.5)
    for ema_decay in (None, 0.7)
]


def is_adam(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("after", FORMS)
def test_a_state_takes_the_form_of_other_options(before, after):
    """Moments stay, and so does an average. A newly enabled one starts from the parameters."""
    params, state = trained(before)
    like = build_optimizer(after, 9).init(PARAMS)
    found = convert_state(state, params, like)
    chex.assert_trees_all_equal_structs(found, like)
    moments = [
        [node for node in jax.tree.leaves(each, is_leaf=is_adam) if is_adam(node)]
        for each in (state, found)
    ]
    chex.assert_trees_all_equal(*moments)
    if after.ema_decay is not None:
        assert found.num_steps == (0 if before.ema_decay is None else 9)
        average = params if before.ema_decay is None else state.params
        chex.assert_trees_all_equal(found.params, average)


ARGS = ["--num-steps", "10", "--eval-every", "5", "--eval-batches", "4", "--batch-size", "8"]


@pytest.mark.slow
def test_a_run_evaluates_and_exports_the_average(tmp_path, monkeypatch):
    """The training itself equals that without an average."""
    reported = []
    monkeypatch.setattr(train_command, "report", lambda run, model, console: reported.append(model))
    for name, args in {"with": ["--optimizer.ema-decay", "0.9"], "without": []}.items():
        train_command.main(["--out", str(tmp_path / name), *ARGS, *args])
    averaging, without = (Run.open(tmp_path / name) for name in ("with", "without"))
    state, last = (run.restore(build_trainer(run.config)) for run in (averaging, without))
    chex.assert_trees_all_equal(state.params, last.params)
    average = state.optimizer_state.params
    assert not np.array_equal(*(np.asarray(jax.tree.leaves(p)[0]) for p in (average, state.params)))
    for model in (averaging.model(), reported[0]):
        chex.assert_trees_all_equal(nnx.state(model, nnx.Param), average)
    losses, last_losses = ([line["val"] for line in run.metrics()] for run in (averaging, without))
    assert losses[0] == last_losses[0]
    assert losses[0] > losses[-1] != last_losses[-1]


def test_parts_make_the_gradient_of_the_whole_each_with_a_key_of_its_own():
    def loss(params, key, rows):
        noise = jax.random.uniform(key, params.shape)
        return jnp.mean((rows @ (params + noise)) ** 2)

    value_and_grad = jax.value_and_grad(loss)
    params, key = jnp.array([0.3, -0.2, 0.5]), jax.random.key(0)
    rows = jnp.sin(jnp.arange(24.0)).reshape(2, 4, 3)
    parts = [value_and_grad(params, jax.random.fold_in(key, i), rows[i]) for i in range(2)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    chex.assert_trees_all_close(
        accumulate_gradients(value_and_grad)(params, key, rows), mean, rtol=1e-6
    )
    whole = accumulate_gradients(value_and_grad)(params, key, rows[:1])
    chex.assert_trees_all_equal(whole, value_and_grad(params, key, rows[0]))


def test_steps_in_parts_are_the_whole_ones_to_rounding():
    losses = []
    rows = np.random.default_rng(0).integers(0, 20, (3, 8, 9))
    for parts in (1, 4):
        trainer = build_trainer(TrainConfig(batch_size=8, accumulate=parts))
        _, measures = trainer.steps(trainer.initial_state(), trainer.put(rows), 3)
        losses.append(measures.loss)
    np.testing.assert_allclose(*losses, rtol=1e-5)


def torch_losses(twin, rows, *, learning_rate: float, clip_norm: float) -> list[float]:
    """The losses of a plain training loop, step by step."""
    optimizer = torch.optim.AdamW(twin.parameters(), lr=learning_rate)
    losses = []
    for batch in rows:
        tokens = torch.tensor(batch).long()
        logits, _ = twin(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def jax_losses(model, rows, *, learning_rate: float, clip_norm: float):
    """The losses of our training step, and the trained model."""
    config = OptimizerConfig(learning_rate=learning_rate, clip_norm=clip_norm)
    trainer = Trainer(
        lambda: model,
        build_optimizer(config, len(rows)),
        mesh=build_mesh(MeshConfig(), rows=4, window=8, devices=jax.devices()),
        seed=0,
    )
    state, losses = trainer.initial_state(), []
    for batch in rows:
        state, measures = trainer.step(state, trainer.put(batch))
        losses.append(measures.loss)
    return [float(loss) for loss in losses], trainer.model(state.params)


def test_seed_experiment_follows_torch(x64):
    """The same weights and batches give the same losses in both frameworks."""
    vocabulary = Characters.of(ALL_WORK)
    part = split(vocabulary.encode(ALL_WORK), window=8)["train"]
    loader = Batches(part, batch_size=4, seed=7)
    rows = [loader[i] for i in range(60)]
    torch.manual_seed(2001)
    case = CASES["RNNLanguageModel"]
    twin = case.twin().double()
    model = case.build_layer(twin)
    options = {"learning_rate": 1e-3, "clip_norm": 0.2}
    losses, trained = jax_losses(model, rows, **options)
    twin_losses = torch_losses(twin, rows, **options)

    np.testing.assert_allclose(losses, twin_losses, rtol=FLOAT64, atol=0)
    weights = to_torch(trained, case.layout)
    for key, expected in twin.state_dict().items():
        np.testing.assert_allclose(
            weights[key], expected.numpy(), rtol=0, atol=FLOAT64 * expected.abs().max().item()
        )
    assert losses[0] > 2.5
    assert losses[-1] < losses[0] - 0.05
