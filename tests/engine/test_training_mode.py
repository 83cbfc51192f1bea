"""Training with running statistics, casts, and trees of weights."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from faulty_pairs import affine
from flax import nnx
from test_references import Tied

from jax_models import BatchNorm
from jax_models.weights import batch_norm, linear
from parity_tests import TrainingReport, compare_training

pytestmark = pytest.mark.usefixtures("standard_promotion")
nn = torch.nn
RNG = np.random.default_rng(0)
BATCHES = [(RNG.standard_normal((8, 5)), RNG.integers(0, 3, 8)) for _ in range(3)]
TOKENS = [RNG.integers(0, 7, (4, 6)) for _ in range(3)]


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(twin, model, weights, **options) -> TrainingReport:
    torch.manual_seed(0)
    return compare_training(
        twin(),
        model,
        options.pop("batches", BATCHES),
        weights=weights,
        **{
            "loss": lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            "loss_twin": lambda twin, batch: nn.functional.cross_entropy(twin(batch[0]), batch[1]),
            "optimizer": lambda: optax.adamw(1e-2, weight_decay=0.1),
            "optimizer_twin": lambda twin: torch.optim.AdamW(
                twin.parameters(), lr=1e-2, weight_decay=0.1
            ),
        }
        | options,
    )


class Net(nnx.Module):
    def __init__(self, norm):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm = norm(8, rngs=rngs)

    def __call__(self, x):
        return self.last(jax.nn.relu(self.norm(self.first(x))))


def batch_normed():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


NORMED = [*linear("first", "0"), *batch_norm("norm", "1"), *linear("last", "3")]


@pytest.mark.parametrize(
    ("norm", "parts_in"),
    [
        (BatchNorm, None),
        (partial(BatchNorm, momentum=0.1), "1.running_mean"),
        (partial(nnx.BatchNorm, momentum=0.9), "1.running_var"),  # the biased variance
    ],
)
def test_running_statistics(norm, parts_in):
    report = train(batch_normed, Net(norm), NORMED, training=True)
    if parts_in is None:
        assert report.passed, str(report)
    else:
        step, error = report.parting["float64"]
        assert (step, error.tensor) == (1, parts_in)
        assert "the loss agrees; the gradient agrees" in report.departures["float64"]


def test_a_mask_hides_rows_from_a_batch_norm():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 8), np.float32))
    masked, whole = (BatchNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))
    y = masked(x, mask=(jnp.arange(6) < 4)[:, None])
    np.testing.assert_allclose(y[:4], whole(x[:4]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(masked.var[...], whole.var[...], rtol=1e-6)


def test_a_batch_norm_refuses_what_it_cannot_normalize():
    norm = BatchNorm(8, rngs=nnx.Rngs(0))
    for shape, message in (((4, 7), "x:"), ((1, 8), "x:")):
        with pytest.raises(ValueError, match=message):
            norm(jnp.ones(shape))
    with pytest.raises(ValueError, match="momentum:"):
        BatchNorm(8, momentum=2, rngs=nnx.Rngs(0))


class Centered(nn.Linear):
    """Subtracts the mean of a batch, and keeps a running mean."""

    def __init__(self):
        super().__init__(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(("momentum", "returned"), [(0.9, True), (0.99, True), (0.99, False)])
def test_statistics_in_a_tree_of_weights(momentum, returned):
    """The loss has to return their new values, or none of them can be compared."""

    def load(state_dict):
        arrays = {key: state_dict[key] for key in ("weight", "bias")}
        return {**arrays, "statistics": {"mean": state_dict["mean"]}}

    def loss(weights, batch):
        x, old = batch[0], weights["statistics"]["mean"]
        value = cross_entropy(affine(weights, x - x.mean(0)), batch[1])
        mean = momentum * old + (1 - momentum) * x.mean(0)
        return (value, {"statistics": {"mean": mean}}) if returned else value

    report = train(Centered, affine, load, loss=loss, training=True)
    assert report.passed == (momentum == 0.9 or not returned), str(report)
    assert any("statistics.mean" in note for note in report.notes) == (not returned)


def affine_loss(weights, batch):
    return cross_entropy(affine(weights, batch[0]), batch[1])


class Attended(nn.Linear):
    """A layer whose rows attend to each other, with dropout."""

    def __init__(self, rate):
        super().__init__(5, 3)
        self.rate = rate

    def forward(self, x):
        y = super().forward(x)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=self.rate)[0, 0]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_training_that_depends_on_random_numbers_fails(rate):
    """Torch's attention counts as random even if it drops nothing."""

    def loss(weights, batch):
        y = affine(weights, batch[0])
        return cross_entropy(jax.nn.softmax(y @ y.T / 3**0.5) @ y, batch[1])

    report = train(lambda: Attended(rate), affine, dict, loss=loss, dtypes="float32")
    assert report.passed == (rate == 0), str(report)
    assert any("torch draws random numbers" in fault for fault in report.faults) == (rate > 0)


class Scaled(nn.Linear):
    """A layer with a buffer that a port does not have to read."""

    def __init__(self):
        super().__init__(5, 3)
        self.register_buffer("unit scale", torch.ones(3))

    def forward(self, x):
        return super().forward(x) * getattr(self, "unit scale")


def test_a_buffer_that_the_loader_does_not_read_is_noted():
    def load(state_dict):
        return {key: state_dict[key] for key in ("weight", "bias")}

    report = train(Scaled, affine, load, loss=affine_loss, training=True)
    assert report.passed, str(report)
    assert report.notes == ("not compared: unit scale",)
    report = train(Scaled, affine, load, loss=affine_loss)
    assert report.faults == ("weights: the loader does not read unit scale",)


@pytest.mark.parametrize(("factor", "both_cast"), [(1, False), (1, True), (1 + 1e-9, True)])
def test_float64_is_compared_without_casts(factor, both_cast):
    def in_float32(twin, batch):
        return nn.functional.cross_entropy(twin(batch[0]).float(), batch[1])

    def loss(weights, batch):
        logits = factor * affine(weights, batch[0])
        return cross_entropy(logits.astype("float32") if both_cast else logits, batch[1])

    report = train(lambda: nn.Linear(5, 3), affine, dict, loss=loss, loss_twin=in_float32)
    assert report.passed == (factor == 1), str(report)


def test_a_module_that_holds_computed_tensors_is_trained():
    def normed():
        with warnings.catch_warnings():  # torch deprecates it, but checkpoints use it
            warnings.simplefilter("ignore")
            return nn.utils.weight_norm(nn.Linear(5, 3))

    def model(w, x):
        v = w["weight_v"]
        return x @ (v * w["weight_g"] / jnp.linalg.norm(v, axis=1, keepdims=True)).T + w["bias"]

    def loss(w, batch):
        return cross_entropy(model(w, batch[0]), batch[1])

    report = train(normed, model, dict, loss=loss)
    assert report.passed, str(report)


class ComplexLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


@pytest.mark.slow
@pytest.mark.parametrize("conjugated", [True, False])
def test_complex_weights_are_trained(conjugated):
    def model(w, x):
        return jnp.abs(x @ w["weight"])

    conjugate = optax.stateless(lambda updates, _: jax.tree.map(jnp.conj, updates))
    steps = [*([conjugate] if conjugated else []), optax.sgd(1e-1)]
    report = train(
        ComplexLinear,
        model,
        dict,
        loss=lambda w, batch: cross_entropy(model(w, batch[0]), batch[1]),
        optimizer=optax.chain(*steps),
        optimizer_twin=lambda twin: torch.optim.SGD(twin.parameters(), lr=1e-1),
    )
    assert report.passed == conjugated, str(report)
    if not conjugated:
        assert "the gradient agrees" in report.departures["float64"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding", "head"])
def test_what_a_loader_makes_is_trained(name):
    """Two arrays of one weight are trained independently."""

    def model(weights, tokens):
        return jnp.tanh(weights["embedding"][tokens]) @ weights[name].T

    def load(state_dict):
        return {key: state_dict[f"{key}.weight"] for key in dict.fromkeys(["embedding", name])}

    report = train(
        Tied,
        model,
        load,
        batches=TOKENS,
        loss=lambda weights, t: cross_entropy(model(weights, t[:, :-1]), t[:, 1:]),
        loss_twin=lambda twin, t: nn.functional.cross_entropy(
            twin(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()
        ),
    )
    assert report.passed == (name == "embedding"), str(report)
