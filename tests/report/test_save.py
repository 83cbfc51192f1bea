"""Reports on a user's own models, as JSON and as a page."""

import math

import numpy as np
import pytest
import torch

from parity_tests import Report, compare, save
from parity_tests.engine.bounds.tolerance import Error
from parity_tests.engine.logits import LogitsError
from parity_tests.report.record import Record
from parity_tests.report.save import record_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
NAN = LogitsError(math.nan, math.inf, 1e-3, 2e-3, 0.5, 0.75)
FAILING = Report(
    {"float32": {"outputs": {"y": Error(1e-6, 1e-8, 1e-7, False, "y")}}},
    ("outputs, z: <b>empty</b>",),
    ("weight gradients are not compared",),
    "float32 …\nfirst to depart: norm",
    {"float32": {"JAX": NAN}},
    "GPT",
    "gpu",
)


def report() -> Report:
    return compare(
        torch.nn.Linear(3, 4),
        lambda weights, x: x @ weights["weight"].T + weights["bias"],
        np.random.default_rng(0).standard_normal((2, 3)),
        weights=dict,
        logits=True,
    )


def test_reports_are_saved_as_json_and_as_a_page(tmp_path):
    found = report()
    save(found, tmp_path / "x.json")
    assert Record.from_json((tmp_path / "x.json").read_text()) == record_of({"Linear": found})
    for name in ("x.html", "x.json"):
        save({"mine": found, "gpt <2>": FAILING}, str(tmp_path / name))
    record = Record.from_json((tmp_path / "x.json").read_text())
    assert record.cases == {"mine": "Linear", "gpt <2>": "GPT"}
    assert record.failing == {"gpt <2>"}
    every = found.tensors["float64"].values(), found.tensors["float32"].values()
    errors = [error for groups in every for named in groups for error in named.values()]
    assert [m.error for m in record.tensors if m.case == "mine"] == errors
    assert [(m.dtype, m.side) for m in record.logits if m.case == "mine"] == [
        (dtype, side) for dtype in ("float64", "float32") for side in ("torch", "JAX")
    ]
    assert np.isnan(record.logits[-1].error.kl_mean)
    page = (tmp_path / "x.html").read_text()
    assert "1 pair agrees; 1 fails" in page
    for text in ("gpt &lt;2&gt;, gpu: outputs, z: &lt;b&gt;empty&lt;/b&gt;", "nan", "75.00%"):
        assert text in page


@pytest.mark.parametrize(
    ("reports", "name", "argument"),
    [
        ({}, "x.json", "reports"),
        ({"a": 1}, "x.json", "reports"),
        (FAILING, "x.txt", "path"),
    ],
)
def test_refuses(reports, name, argument, tmp_path):
    with pytest.raises((TypeError, ValueError), match=f"^{argument}:"):
        save(reports, tmp_path / name)
    assert not [*tmp_path.iterdir()]
