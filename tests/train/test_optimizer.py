"""What the optimiser of a run can do, against torch and against its definition."""

import dataclasses
import math
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

import train.__main__ as train_command
from jax_models import HawkLanguageModelConfig
from train.accumulation import accumulated
from train.config import PRESETS, TrainConfig
from train.optimizer import (
    AveragedState,
    OptimizerConfig,
    apply_gradient,
    build_optimizer,
    build_schedule,
    is_matrix,
)
from train.run import Run, build_trainer
from twinscan.command_line import CommandLineError

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
    """Up from zero, then down to the last rate at the last step."""
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


def test_matrices_are_what_multiplies():
    """By name, of models that have parameters of two axes of every sort."""
    found = set()
    for preset in ("all-work", "hawk", "rwkv6", "rwkv7", "annotated-hyena", "authentic-hyena"):
        config = dataclasses.replace(PRESETS[preset].model, num_layers=2)
        params = nnx.state(nnx.eval_shape(lambda c=config: c.build(rngs=nnx.Rngs(0))), nnx.Param)
        for path, param in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if param.ndim >= 2 and not is_matrix(path, param):
                found.add(name.removesuffix(".value").split(".")[-1])
            if "kernel" in name:
                assert is_matrix(path, param) == (param.ndim >= 2)
            if param.ndim < 2:
                assert not is_matrix(path, param)
    assert found == {"embedding", "pos_emb", "B", "r_k", "time_faaaa"}


def test_the_average_is_the_weighted_mean_of_what_the_steps_made():
    averaged = dataclasses.replace(CONFIG, ema_decay=0.7)
    made = [trained(CONFIG, 9)[0]]
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


ARGS = ["--num-steps", "10", "--eval-every", "5", "--eval-batches", "4", "--batch-size", "8"]


def test_a_run_evaluates_and_exports_the_average(tmp_path):
    """And goes on to the same one; its training goes on from the last weights."""
    averaging = [*ARGS, "--optimizer.ema-decay", "0.9"]
    for name, args in {"with": averaging, "without": ARGS}.items():
        train_command.main(["--out", str(tmp_path / name), *args])
    run = Run.open(tmp_path / "with")
    trainer = build_trainer(run.config)
    state = run.restore(trainer)
    of_without = Run.open(tmp_path / "without").restore(build_trainer(TrainConfig(batch_size=8)))
    chex.assert_trees_all_equal(state.params, of_without.params)
    average = state.optimizer_state.params
    assert not np.array_equal(*(np.asarray(jax.tree.leaves(p)[0]) for p in (average, state.params)))
    chex.assert_trees_all_equal(nnx.state(run.model(), nnx.Param), average)
    exported = load_file(run.folder / "twin.safetensors")
    kernel = average["head"]["kernel"].get_value()
    assert any(np.array_equal(weight, np.asarray(kernel).T) for weight in exported.values())
    first, last = (run.metrics()[i]["val"] for i in (0, -1))
    of_others = [record["val"] for record in Run.open(tmp_path / "without").metrics()]
    assert first == of_others[0]
    assert first > last != of_others[-1]


@pytest.mark.slow
@pytest.mark.parametrize("model", [TrainConfig().model, HawkLanguageModelConfig(features=12)])
def test_parts_make_the_gradient_of_the_whole(model, x64):
    """In float64, where nothing but the order of the sums differs."""
    model = dataclasses.replace(model, vocab_size=20, num_layers=1)
    tokens = np.random.default_rng(0).integers(0, 20, (8, 9))
    made = model.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(made, nnx.Param, ...)

    def loss(params, key, tokens):
        logits, _ = nnx.merge(graphdef, params, rest)(tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value_and_grad = jax.value_and_grad(loss)
    key = jax.random.key(0)
    whole = value_and_grad(params, key, jnp.asarray(tokens))
    for parts in (2, 8):
        rows = jnp.asarray(tokens).reshape(parts, -1, 9)
        in_parts = accumulated(value_and_grad)(params, key, rows)
        chex.assert_trees_all_close(in_parts, whole, rtol=1e-11, atol=1e-14)


def test_each_part_has_a_key_of_its_own():
    def draw(params, key, rows):
        return jax.random.uniform(key), rows.sum()

    key, rows = jax.random.key(0), jnp.arange(12).reshape(2, 2, 3)
    mean, _ = accumulated(draw)(None, key, rows)
    keys = [jax.random.fold_in(key, i) for i in range(2)]
    assert mean == (jax.random.uniform(keys[0]) + jax.random.uniform(keys[1])) / 2
    assert accumulated(draw)(None, key, rows[None])[0] == jax.random.uniform(key)


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--accumulate", "3"], "--accumulate:"),
        (["--optimizer.ema-decay", "1"], "--optimizer.ema-decay:"),
        (["--optimizer.schedule", "step"], "--optimizer.schedule:"),
    ],
)
def test_refuses(args, fault, tmp_path: Path):
    with pytest.raises(CommandLineError, match=re.escape(fault)):
        train_command.main(["--out", str(tmp_path / "run"), *args])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unreported")
def test_a_run_in_parts_is_the_whole_one_to_rounding(tmp_path):
    losses = []
    for parts in ("1", "4"):
        train_command.main(["--out", str(tmp_path / parts), *ARGS, "--accumulate", parts])
        run = Run.open(tmp_path / parts)
        losses.append([record["val"] for record in run.metrics()])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
