"""The pytest plugin, in the folder of another project."""

import os
import subprocess
import sys

import pytest

from parity_tests.report.record import Record

TESTS = """
import numpy as np
import pytest
import torch
from parity_tests import assert_parity, compare

twin = torch.nn.Linear(3, 4)
x = np.random.default_rng(0).standard_normal((2, 3))


def model(factor):
    return lambda weights, x: factor * (x @ weights["weight"].T + weights["bias"])


def options():
    return {"weights": dict, "dtypes": ["float64"]}


compare(twin, model(1.0), x, **options())  # in no test


@pytest.fixture
def report():
    return compare(twin, model(1.0), x, **options())


@pytest.mark.parity
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_map(factor):
    assert_parity(twin, model(factor), x, **options())


def test_several(report):
    assert report.passed
    compare(twin, model(1.0), x, logits=True, **options())


def test_nothing():
    pass
"""
CASES = {
    "test_port.py::test_map[1.0]",
    "test_port.py::test_map[1.001]",
    "test_port.py::test_several",
    "test_port.py::test_several (2)",
}


@pytest.fixture
def run(tmp_path):
    """Runs pytest in the folder, and returns its exit code and lines."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUMPY", "PYTEST"))}

    def run(*args: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-W", "error", "--strict-markers", *args],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, (done.stdout + done.stderr).splitlines()

    (tmp_path / "test_port.py").write_text(TESTS)
    return run


def read(path) -> Record:
    return Record.from_json(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_every_report_is_kept_under_its_test(workers, run, tmp_path):
    code, lines = run("--parity-json", "all.json", "--parity-html", "all.html", *workers)
    assert code == 1
    assert "E       AssertionError: the two sides differ" in lines
    assert "compare.py" not in "\n".join(lines), "a frame of the package is shown"
    record = read(tmp_path / "all.json")
    assert record.cases == dict.fromkeys(CASES, "Linear")
    assert record.failing == {"test_port.py::test_map[1.001]"}
    assert {m.case for m in record.logits} == {"test_port.py::test_several (2)"}
    assert {m.error.tensor for m in record.tensors} == {"y", "input 0", "weight", "bias"}
    page = (tmp_path / "all.html").read_text()
    assert all(case in page for case in CASES)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "all.html",
        "all.json",
        "test_port.py",
    ]


def test_who_does_not_compare_pays_nothing(run, tmp_path):
    """The plugin of jaxtyping is disabled, because it imports NumPy."""
    (tmp_path / "test_port.py").write_text(
        """
import sys

def test_light(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("twinscan")
    assert not pytestconfig.pluginmanager.hasplugin("twinscan-collector")
    assert not {"jax", "torch", "numpy", "parity_tests.engine.compare"} & sys.modules.keys()
"""
    )
    code, lines = run("-p", "no:jaxtyping")
    assert code == 0, lines
