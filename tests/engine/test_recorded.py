"""A recorded torch side gives the same report without torch."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_pairs import affine
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_models.weights import linear
from parity_tests import Report, assert_parity, compare, record
from parity_tests.engine.references import record_file as stored
from parity_tests.engine.references import recording
from parity_tests.engine.references.record_file import KEY

pytestmark = pytest.mark.usefixtures("standard_promotion")
X = np.random.default_rng(0).standard_normal((2, 5, 4))


class Tied(torch.nn.Module):
    """Has tokens, a padding row, a weight that is used twice, a buffer and float32 constants."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6, padding_idx=0)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("unused", torch.ones(3))
        torch.nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, tokens, mask=None, scale=1.0):
        x = self.norm(self.embed(tokens).mT).mT
        x = x if mask is None else x * mask[..., None]
        x = (x.float() * scale).to(x.dtype)
        return {"logits": self.head(x), "likeliest": self.head(x).argmax(-1)}, x


def tied(w, tokens, mask=None, scale=1.0):
    x = w["embed.weight"][tokens]
    x = (x - w["norm.running_mean"]) / jnp.sqrt(w["norm.running_var"] + 1e-5)
    x = x * w["norm.weight"] + w["norm.bias"]
    x = x if mask is None else x * mask[..., None]
    logits = scale * x @ w["head.weight"].T
    return {"logits": logits, "likeliest": logits.argmax(-1)}, scale * x


class Thirds(torch.nn.Linear):
    """Has thirds in float32 in its state_dict."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("thirds", torch.full((4,), 1 / 3))

    def forward(self, x):
        return super().forward(x * self.thirds)


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = 1j
        self.weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x):
        return x.to(self.weight.dtype) @ self.weight


class State(NamedTuple):
    h: jax.Array
    c: jax.Array


class Pair(NamedTuple):
    twin: torch.nn.Module
    model: object
    inputs: tuple
    record: dict = {}  # noqa: RUF012
    compare: dict = {"weights": dict}  # noqa: RUF012


def pairs() -> dict[str, Pair]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 4))
    tokens = rng.integers(0, 11, (2, 7))
    mask = {"mask": rng.random((2, 7)) < 0.8, "scale": 0.75}
    return {
        "linear": Pair(
            torch.nn.Linear(4, 3),
            nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
            (x,),
            {},
            {"weights": linear("", "")},
        ),
        "tied": Pair(Tied(), tied, (tokens,), {"kwargs": mask, "logits": "y['logits']"}),
        "bfloat16": Pair(
            torch.nn.Linear(4, 3).bfloat16(), affine, (x,), {"dtypes": ["float32", "bfloat16"]}
        ),
        "complex": Pair(Complex(), lambda w, x: x @ w["weight"], (x,)),
        "a constant of the model in float32": Pair(
            torch.nn.Linear(4, 3),
            lambda w, x: affine(w, x * jnp.asarray(np.float32(1 / 3))),
            (x,),
            {"call_twin": lambda twin, x: twin(x / 3)},
        ),
        "nested inputs, one result without a gradient": Pair(
            torch.nn.Linear(4, 3),
            lambda w, a: (affine(w, a["x"][0]) * a["on"], 2 * a["x"][0]),
            ({"x": [x, None], "on": 1},),
            {"call_twin": lambda twin, a: (twin(a["x"][0]), 2 * a["x"][0].detach())},
        ),
    }


def numbers(report: Report) -> dict[tuple, float]:
    return {
        (dtype, group, name, field): getattr(error, field)
        for dtype, groups in report.tensors.items()
        for group, named in groups.items()
        for name, error in named.items()
        for field in ("jax", "torch", "bound", "unstable")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", pairs())
def test_a_record_says_what_the_torch_module_says(name, tmp_path):
    pair, path = pairs()[name], tmp_path / "twin.safetensors"
    record(pair.twin, *pair.inputs, path=path, activations=False, **pair.record)
    live = compare(pair.twin, pair.model, *pair.inputs, **pair.record, **pair.compare)
    logits = {key: value for key, value in pair.record.items() if key == "logits"}
    recorded = compare(path, pair.model, **logits, **pair.compare)
    of_record, of_twin = numbers(recorded), numbers(live)
    for at in [at for at in of_record if at[-1] == "bound"]:
        # A record has all runs with random rounding, but a live twin runs only as often as needed.
        assert of_record.pop(at) >= (1 - 1e-9) * of_twin.pop(at)
    assert of_record == pytest.approx(of_twin, rel=1e-9)
    assert dataclasses.replace(recorded, tensors={}) == dataclasses.replace(live, tensors={})
    assert recorded.passed, str(recorded)
    has_note = any("1 constant is in float32" in note for note in recorded.notes)
    assert has_note == ("constant" in name)


@pytest.mark.parametrize("factor", [1, 1 + 1e-4])
def test_constants_of_a_record_may_be_rounded(factor, tmp_path):
    """More digits are not known, so the error that comes from rounding them is allowed."""
    torch.manual_seed(0)
    record(Thirds(), X, path=tmp_path / "twin.safetensors", activations=False)
    report = compare(
        tmp_path / "twin.safetensors",
        lambda w, x: affine(w, factor * x / 3),
        weights=lambda state_dict: {key: state_dict[key] for key in ("weight", "bias")},
    )
    assert report.passed == (factor == 1), str(report)
    assert any("constants are in float32" in note for note in report.notes)


BLOCKED = """
import sys


class Blocker:
    def find_spec(self, name, *args):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is not installed")


sys.meta_path.insert(0, Blocker())
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax_models.weights import linear
from parity_tests import Report, assert_parity, compare, record, save, tap

report = compare("twin.safetensors", nnx.Linear(4, 3, rngs=nnx.Rngs(0)), weights=linear("", ""))
assert report.passed and {*report.errors} == {"float64", "float32"}, report
assert {*report.errors["float64"]} == {"outputs", "input gradient", "weight gradients"}
assert_parity("twin.safetensors", lambda w, x: tap("", x @ w["weight"].T + w["bias"]), weights=dict)
try:
    assert_parity("twin.safetensors", lambda w, x: x @ w["weight"].T, weights=dict)
except AssertionError as error:
    print(*str(error).splitlines()[2].split()[:2])
    print(str(error).splitlines()[-1])
x = np.random.default_rng(0).standard_normal(5)
assert compare(jnp.sin, lambda x: jnp.cos(x - jnp.pi / 2), x).passed
record(jnp.sin, x, path="sin.safetensors")
assert not compare("sin.safetensors", jnp.cos).passed
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory) -> Path:
    pair = pairs()["linear"]
    path = tmp_path_factory.mktemp("record") / "twin.safetensors"
    with jax.numpy_dtype_promotion("standard"):
        record(pair.twin, *pair.inputs, path=path)
    return path


@pytest.mark.slow
def test_torch_is_not_needed(whole_file):
    as_users = {key: value for key, value in os.environ.items() if not key.startswith("JAX_NUMPY")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=whole_file.parent,
        env=as_users,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "float64 outputs\nfirst to depart: the module itself, forward\n"


def test_a_bad_file_is_refused_in_one_line(whole_file, tmp_path, monkeypatch):
    arrays, bad = load_file(whole_file), tmp_path / "bad.safetensors"
    with safe_open(whole_file, framework="numpy") as file:
        metadata = file.metadata()
    other = {**arrays, "weights/weight": arrays["weights/weight"] + 1}
    cases = [
        (lambda: bad.write_bytes(whole_file.read_bytes()[:-9]), "expected a complete file that"),
        (lambda: bad.write_bytes(b"PK"), "expected a complete file that"),
        (lambda: bad.write_bytes(b""), "expected a complete file that"),
        (lambda: save_file(arrays, bad), "wrote, got another one"),
        (lambda: save_file(other, bad, metadata), "a damaged record"),
        (lambda: save_file(arrays, bad, {**metadata, KEY: "{}"}), "a damaged record"),
    ]
    for spoil, message in cases:
        spoil()
        with pytest.raises(ValueError, match=message) as error:
            compare(bad, pairs()["linear"].model, weights=linear("", ""))
        assert "\n" not in str(error.value)
        assert str(error.value).startswith(str(bad))
    monkeypatch.setattr(stored, "SCHEMA", 9)
    with pytest.raises(ValueError, match="a record of schema 5, this version reads 9: record it"):
        compare(whole_file, pairs()["linear"].model, weights=linear("", ""))
    with pytest.raises(FileNotFoundError):
        compare(tmp_path / "none.safetensors", pairs()["linear"].model)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((X + 1,), {}, "inputs:"),
        ((X[:1],), {}, "inputs:"),
        ((X, X), {}, "inputs:"),
        ((), {"seed": 1}, "seed:"),
        ((), {"dtypes": "bfloat16"}, "dtypes: expected some of float64, float32, which"),
        ((), {"call_twin": lambda twin, x: twin(x)}, "call_twin: expected none, because"),
        ((), {"logits": True}, "logits: the record has none, got y"),
        ((), {"edge_inputs": True}, "edge_inputs:"),
    ],
)
def test_what_a_record_cannot_do_is_refused(inputs, options, message, whole_file):
    pair = pairs()["linear"]
    with pytest.raises(ValueError, match=message):
        compare(whole_file, pair.model, *inputs, weights=linear("", ""), **options)


def test_the_same_inputs_may_be_given_again(whole_file):
    model = pairs()["linear"].model
    assert compare(whole_file, model, X, weights=linear("", ""), dtypes="float64").passed
    with pytest.raises(AssertionError, match="outputs"):
        assert_parity(whole_file, model, weights=linear("", ""), call=lambda m, x: 1.1 * m(x))


def test_a_record_is_written_whole_or_not_at_all(whole_file, tmp_path, monkeypatch):
    path = tmp_path / "twin.safetensors"
    with pytest.raises(ValueError, match="random"):
        record(torch.nn.Linear(4, 3), X, path=path, call_twin=lambda t, x: t(x) * torch.rand(()))
    with pytest.raises(TypeError, match="inputs: a record holds arrays"):
        record(torch.nn.Linear(4, 3), State(X, X), path=path)
    with pytest.raises(FileNotFoundError):
        record(torch.nn.Linear(4, 3), X, path=tmp_path / "none" / "twin.safetensors")
    with pytest.raises(TypeError, match="twin: expected a torch module or a JAX model"):
        record(whole_file, path=path)
    path.write_text("of before")
    monkeypatch.setattr(recording, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        record(torch.nn.Linear(4, 3), X, path=path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "of before"


def test_a_script_file_is_recorded(tmp_path):
    twin = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    torch.jit.script(twin).save(tmp_path / "twin.pt")
    path = tmp_path / "twin.safetensors"
    record(torch.jit.load(tmp_path / "twin.pt"), X, path=path)
    model = lambda w, x: jnp.tanh(x @ w["0.weight"].T + w["0.bias"])  # noqa: E731
    assert compare(path, model, weights=dict).passed


def test_a_weight_that_is_not_read_is_a_fault_if_it_matters(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "twin.safetensors"
    record(Tied(), np.arange(7)[None], path=path, activations=False)

    def without_norm(w, tokens):
        return tied({**w, "norm.bias": 0}, tokens)

    assert compare(path, tied, weights=dict).passed
    faults = compare(
        path, without_norm, weights=lambda w: {k: w[k] for k in w if k != "norm.bias"}
    ).faults
    assert faults == ("weights: the loader does not read norm.bias",)
