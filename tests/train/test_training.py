"""The seed's own experiment in both frameworks: same weights, same batches, same losses."""

import jax
import numpy as np
import pytest
import torch

from jax_models import to_torch
from parity_tests.engine.bounds.tolerance import FLOAT64, LONG_TRAJECTORY
from parity_tests.registry import CASES
from train.mesh import MeshConfig, build_mesh
from train.optimizer import OptimizerConfig, build_optimizer
from train.step import Trainer
from train.text import ALL_WORK
from train.vocabulary import Characters
from train.windows import Batches, split

pytestmark = pytest.mark.usefixtures("x64")
CASE = CASES["RNNLanguageModel"]


def torch_losses(twin, rows, *, learning_rate: float, clip_norm: float | None) -> list[float]:
    """The losses of the seed's loop."""
    optimizer = torch.optim.AdamW(twin.parameters(), lr=learning_rate)
    losses = []
    for batch in rows:
        tokens = torch.tensor(batch).long()
        logits, _ = twin(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def jax_losses(model, rows, *, learning_rate: float, clip_norm: float | None):
    """The losses of our training step, and the trained model."""
    config = OptimizerConfig(learning_rate=learning_rate, clip_norm=clip_norm)
    trainer = Trainer(
        model,
        build_optimizer(config, len(rows)),
        mesh=build_mesh(MeshConfig(), rows=4, window=8, devices=jax.devices()),
        seed=0,
    )
    state, losses = trainer.initial_state(), []
    for batch in rows:
        state, measures = trainer.step(state, trainer.put(batch))
        losses.append(measures.loss)
    return [float(loss) for loss in losses], trainer.model(state.params)


@pytest.mark.parametrize(
    ("num_steps", "clip_norm", "tolerance"),
    [
        (200, None, FLOAT64),
        (200, 0.2, FLOAT64),
        pytest.param(2000, None, LONG_TRAJECTORY, marks=pytest.mark.slow),
    ],
)
def test_seed_experiment_follows_torch(num_steps, clip_norm, tolerance):
    vocabulary = Characters.of(ALL_WORK)
    part = split(vocabulary.encode(ALL_WORK), window=8)["train"]
    loader = Batches(part, batch_size=4, seed=7)
    rows = [loader[i] for i in range(num_steps)]
    torch.manual_seed(2001)
    twin = CASE.twin().double()
    model = CASE.build_layer(twin)
    options = {"learning_rate": 1e-3, "clip_norm": clip_norm}
    ours, trained = jax_losses(model, rows, **options)
    theirs = torch_losses(twin, rows, **options)

    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=0)
    weights = to_torch(trained, CASE.layout)
    for key, expected in twin.state_dict().items():
        np.testing.assert_allclose(
            weights[key], expected.numpy(), rtol=0, atol=tolerance * expected.abs().max().item()
        )
    assert ours[0] > 2.5
    assert ours[-1] < (2.5 if num_steps == 200 else 0.4)
