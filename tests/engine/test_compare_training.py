"""Pairs of optimizers that people use, and differences between their definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from test_references import Attention, attention
from test_training_mode import train as train_pair
from torch import optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from jax_models.weights import linear, same, transposed
from parity_tests import TrainingReport, compare_training
from train.trainer.optimizer import clip_by_global_norm, scale_by_amsgrad

STEPS = 6


pytestmark = pytest.mark.usefixtures("standard_promotion")


def train(optimizer, optimizer_twin, **options) -> TrainingReport:
    rng, rngs, steps = np.random.default_rng(0), nnx.Rngs(0), options.pop("steps", STEPS)
    return train_pair(
        lambda: torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
        nnx.Sequential(nnx.Linear(5, 8, rngs=rngs), jnp.tanh, nnx.Linear(8, 3, rngs=rngs)),
        [*linear("layers.0", "0"), *linear("layers.2", "2")],
        batches=[(rng.standard_normal((4, 5)), rng.integers(0, 3, 4)) for _ in range(steps)],
        optimizer=optimizer,
        optimizer_twin=optimizer_twin,
        **options,
    )


def matrices_decay(twin: torch.nn.Module) -> optim.Optimizer:
    """An optimizer that decays matrices but not biases."""
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=1e-2)


def of(cls, **options):
    return lambda twin: cls(twin.parameters(), **options)


def warm_up_and_cosine(optimizer):
    return SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, 1.0, 3), CosineAnnealingLR(optimizer, STEPS - 3)],
        milestones=[3],
    )


RATE = optax.join_schedules(
    [optax.linear_schedule(1e-3, 1e-2, 3), optax.cosine_decay_schedule(1e-2, STEPS - 3)], [3]
)
PAIRS = {
    "SGD with momentum": (optax.sgd(0.1, momentum=0.9), of(optim.SGD, lr=0.1, momentum=0.9)),
    "SGD with Nesterov's momentum": (
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "Adam with L2": (
        optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)),
        of(optim.Adam, lr=1e-2, weight_decay=0.1),
    ),
    "AdamW": (optax.adamw(1e-2, weight_decay=1e-2), of(optim.AdamW, lr=1e-2)),
    "AdamW, matrices alone decay": (
        optax.adamw(1e-2, weight_decay=0.1, mask=partial(jax.tree.map, lambda p: p.ndim > 1)),
        matrices_decay,
    ),
    "Adam with AMSGrad": (
        optax.chain(scale_by_amsgrad(), optax.scale(-1e-2)),
        of(optim.Adam, lr=1e-2, amsgrad=True),
    ),
    "NAdam whose momentum does not grow": (
        optax.nadam(1e-2),
        of(optim.NAdam, lr=1e-2, momentum_decay=1e9),
    ),
    "RMSprop": (
        optax.rmsprop(1e-2, decay=0.99, eps=1e-8, eps_in_sqrt=False),
        of(optim.RMSprop, lr=1e-2),
    ),
    "Adagrad": (
        optax.chain(optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0), optax.scale(-1e-2)),
        of(optim.Adagrad, lr=1e-2, eps=0.0),
    ),
    "clipping by the global norm": (
        optax.chain(clip_by_global_norm(0.1), optax.sgd(0.1)),
        of(optim.SGD, lr=0.1),
        {"clip_twin": partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)},
    ),
    "clipping by value": (
        optax.chain(optax.clip(0.05), optax.sgd(0.1)),
        of(optim.SGD, lr=0.1),
        {"clip_twin": partial(torch.nn.utils.clip_grad_value_, clip_value=0.05)},
    ),
    "warm-up and cosine": (
        optax.adamw(lambda count: RATE(jnp.asarray(count, float)), weight_decay=0.01),
        of(optim.AdamW, lr=1e-2),
        {"scheduler_twin": warm_up_and_cosine},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_stay_together(pair):
    optimizer, optimizer_twin, *options = PAIRS[pair]
    report = train(optimizer, optimizer_twin, **dict(*options))
    assert report.passed, f"\n{report}"
    assert all(len(errors) == STEPS for errors in report.steps.values())
    assert all(e.jax > 0 for e in report.steps["float32"])


DIFFERENCES = {
    "clipping by the global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "RMSprop": optax.rmsprop(1e-2, decay=0.99),
    "AdamW": optax.adamw(1e-2),
    "Adagrad": optax.adagrad(1e-2),
    "warm-up and cosine": optax.adamw(RATE, weight_decay=0.01),
    "Adam with AMSGrad": optax.amsgrad(1e-2),
}
"""What optax calls by the same name, with another definition, default or dtype."""


@pytest.mark.slow
@pytest.mark.parametrize("pair", DIFFERENCES)
def test_differences_of_definition_are_found(pair):
    """AMSGrad differs from the first step in which a second moment falls."""
    _, optimizer_twin, *options = PAIRS[pair]
    report = train(DIFFERENCES[pair], optimizer_twin, dtypes="float64", steps=2, **dict(*options))
    assert not report.passed
    step = 2 if "AMSGrad" in pair else 1
    assert report.parting["float64"][0] == step
    assert f"FAIL: float64: they part at step {step}" in str(report)
    assert "at that step the loss agrees; the gradient agrees" in str(report)


def test_an_optimizer_is_made_in_each_dtype():
    """Its accumulators therefore have that dtype."""
    made = []

    def optimizer():
        made.append(jnp.zeros(()).dtype)
        return optax.MultiSteps(optax.adam(1e-2), 4, accumulator_dtype=float)

    assert train(optimizer, of(optim.Adam, lr=1e-2), accumulate=4, steps=8).passed
    assert {*made} == {jnp.dtype("float64"), jnp.dtype("float32")}


def test_a_training_in_float32_has_no_float64():
    seen = []

    def loss(model, batch):
        seen.append((batch[0].dtype, (jnp.zeros(3) / np.float64(3.0)).dtype))
        return (model(batch[0]) ** 2).mean()

    report = train(
        optax.sgd(0.1),
        of(optim.SGD, lr=0.1),
        loss=loss,
        loss_twin=lambda twin, batch: twin(batch[0]).square().mean(),
    )
    assert report.passed
    assert {a == b for a, b in seen} == {True}


@pytest.mark.slow
def test_multi_steps_accumulate_in_float32_by_default():
    optimizer = optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation()
    report = train(optimizer, of(optim.Adam, lr=1e-2), accumulate=4, steps=8)
    assert report.parting.keys() == {"float64"}


def test_a_fault_that_comes_late_is_found_when_it_comes():
    """The learning rate falls one step too early."""
    report = train(
        optax.sgd(optax.piecewise_constant_schedule(0.1, {4: 0.5})),
        of(optim.SGD, lr=0.1),
        scheduler_twin=lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 5, 0.5),
    )
    assert report.parting["float64"][0] == report.parting["float32"][0] == 5


@pytest.mark.parametrize("rate", [1e-2, 1.00001e-2])
def test_steps_along_rounding_errors_are_explained(rate):
    """Adam changes the key's bias, whose gradient is only rounding errors."""
    report = compare_training(
        Attention(),
        attention,
        list(np.random.default_rng(0).standard_normal((5, 7, 5))),
        loss=lambda weights, x: (attention(weights, x) ** 2).mean(),
        loss_twin=lambda twin, x: twin(x).square().mean(),
        optimizer=optax.adam(rate),
        optimizer_twin=of(optim.Adam, lr=1e-2),
        weights=dict,
    )
    assert report.passed == (rate == 1e-2), str(report)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"loss": lambda model, x: model(x).mean(0)}, "loss:"),
        ({"loss": lambda model, x: (model(x).sum(), 0)}, "loss:"),
        ({"loss": "mse"}, "loss:"),
        ({"loss_twin": lambda twin, x: twin(x).mean(0)}, "loss_twin:"),
        ({"loss_twin": lambda twin, x: twin(x).sum().item()}, "loss_twin:"),
        ({"loss_twin": lambda twin, x: twin(x).sum().detach()}, "loss_twin:"),
        ({"loss_twin": torch.nn.MSELoss()}, "loss_twin:"),
        ({"optimizer": of(optim.SGD, lr=0.1)}, "optimizer:"),
        ({"optimizer_twin": optax.sgd(0.1)}, "optimizer_twin:"),
        ({"optimizer_twin": optim.SGD}, "optimizer_twin:"),
        ({"optimizer_twin": lambda twin: None}, "optimizer_twin:"),
        ({"scheduler_twin": lambda optimizer: None}, "scheduler_twin:"),
        ({"clip_twin": 1.0}, "clip_twin:"),
        ({"batches": np.array(3.0)}, "batches:"),
        ({"batches": None}, "batches:"),
        ({"batches": []}, "batches:"),
        ({"batches": {"x": 3}}, r"batches\[0\]:"),
        ({"dtypes": ()}, "dtypes:"),
        ({"accumulate": 2}, "accumulate:"),
        ({"weights": None}, "weights:"),
        ({"weights": None, "model": (linen.Dense(4), {"params": {}})}, "weights:"),
    ],
)
def test_what_does_not_train(option, message):
    options = {
        "batches": [np.ones((2, 3))],
        "loss": lambda model, x: model(x).sum(),
        "loss_twin": lambda twin, x: twin(x).sum(),
        "optimizer": optax.sgd(0.1),
        "optimizer_twin": of(optim.SGD, lr=0.1),
        "weights": [transposed("kernel", "weight"), same("bias", "bias")],
        "dtypes": "float64",
        "model": nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
    }
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        compare_training(torch.nn.Linear(3, 4), **options | option)


def test_a_training_that_changes_nothing_shows_nothing():
    report = train(optax.sgd(0.0), of(optim.SGD, lr=0.0), dtypes="float64")
    assert not report.passed
    assert "no weight of the torch side changed" in str(report)
