"""Edge inputs: zeros, ties and extremes, masks, and the first and last rows of embeddings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity_tests import compare
from parity_tests.engine.problem import Problem
from parity_tests.engine.verdict.edge_inputs import edges

pytestmark = pytest.mark.usefixtures("standard_promotion")

SQUARE = np.random.default_rng(0).standard_normal((4, 4))
IDS = np.random.default_rng(0).integers(3, 7, (2, 5)).astype(np.int32)


@pytest.mark.parametrize("at_zero", [0.0, 0.5])
def test_the_gradient_at_a_kink_needs_inputs_there(at_zero):
    def relu(w, x):
        y = x @ w["0.weight"].T + w["0.bias"]
        return jax.nn.relu(y) if at_zero == 0 else jnp.maximum(y, 0)

    twin = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert compare(twin, relu, SQUARE, weights=dict).passed
    report = compare(twin, relu, SQUARE, weights=dict, edge_inputs=True)
    assert report.passed == (at_zero == 0), f"\n{report}"
    assert any("edge inputs were compared: zeros" in note for note in report.notes)
    assert all("biases zero" in fault for fault in report.faults)


def test_edges_are_judged_by_numbers_and_not_by_words():
    """The name of the faulty output occurs in the message of another fault."""
    name = "torch side are not finite"

    port = lambda x: {name: x > 0}  # noqa: E731
    compared = partial(compare, nn.Identity(), port, SQUARE, call_twin=lambda _, x: {name: x >= 0})
    assert compared().passed
    assert not compared(edge_inputs=True).passed


class Slice(nn.Module):
    """Its embedding reads a copy of a part of its input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, ids):
        return self.table(ids[:, :-1].long())


def without_row_two(w, ids):
    rows = w["weight"][ids]
    return jnp.where((ids == 2)[..., None], jax.lax.stop_gradient(rows), rows)


def mean(w, ids):
    return w["weight"][ids].mean(axis=1)


PADDING = "padding_idx among other integers: "
EDGES = {
    "padding": (
        nn.Embedding(11, 4, padding_idx=2),
        lambda w, ids: w["weight"][ids],
        f"{PADDING}weight gradients",
    ),
    "no gradient": (nn.Embedding(11, 4, padding_idx=2), without_row_two, None),
    "bag": (nn.EmbeddingBag(11, 4, padding_idx=2, mode="mean"), mean, f"{PADDING}outputs"),
    "frozen bag": (
        nn.EmbeddingBag.from_pretrained(torch.ones(11, 4).cumsum(0), padding_idx=2),
        mean,
        f"{PADDING}outputs",
    ),
    "last row": (
        Slice(),
        lambda w, ids: w["table.weight"][jnp.minimum(ids[:, :-1], 9)],
        "the largest integers, masks all true: outputs",
    ),
}


@pytest.mark.parametrize(("twin", "port", "fault"), EDGES.values(), ids=EDGES)
def test_integers_at_the_edges_of_the_embedding_that_reads_them(twin, port, fault):
    assert compare(twin, port, IDS, weights=dict).passed
    report = compare(twin, port, IDS, weights=dict, edge_inputs=True)
    assert report.passed == (fault is None), f"\n{report}"
    assert fault is None or any(f"edge inputs, {fault}" in each for each in report.faults)


class Casting(nn.Module):
    """Casts the rows of an embedding to float32, so that float64 meets a float32 head."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.out(self.table(ids).float())


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_module_that_casts_is_compared_at_the_edges(factor):
    def port(w, ids):
        rows = w["table.weight"][ids]
        rows = jnp.where(ids[..., None] == 10, factor, 1.0) * rows
        return rows @ w["out.weight"].T + w["out.bias"]

    report = compare(Casting(), port, IDS, weights=dict, edge_inputs=True)
    assert report.passed == (factor == 1), f"\n{report}"


class Tokens(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids.long())


def test_tokens_of_a_dtype_that_has_not_all_rows():
    ids = IDS.astype(np.uint8)
    port = lambda w, ids: w["weight"][ids]  # noqa: E731
    report = compare(Tokens(300, 4), port, ids, weights=dict, edge_inputs=True)
    assert report.passed, f"\n{report}"
    problem = Problem(Tokens(300, 4), dict, port, None, inputs=(ids,))
    largest, smallest = (edge.problem.inputs[0] for edge in edges(problem))  # no masks
    assert (largest == 255).all()
    assert (smallest == 0).all()


class Positive(nn.Module):
    def forward(self, x):
        if not x.any():
            raise RuntimeError("expected a number other than zero\nin the input")
        return 2 * x


def test_a_note_has_the_message_of_a_side_that_refuses_an_edge():
    report = compare(Positive(), lambda x: 2 * x, SQUARE, edge_inputs=True)
    message = "not compared, RuntimeError: expected a number other than zero"
    assert f"edge inputs, zeros: {message}" in report.notes
    assert report.passed
