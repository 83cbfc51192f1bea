"""Properties of the package that projects rely on when they import it."""

import ast
import contextlib
import importlib
import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import jax_models
import twinscan.__main__
from twinscan.heartbeat import IMPORTING

BLOCKED = """
import sys
for name in ("torch", "tyro", "grain", "matplotlib", "safetensors"):
    sys.modules[name] = None
"""


def run(code: str) -> str:
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    return done.stdout


def test_what_needs_no_torch_works_without_it_and_the_rest_names_what_is_not_installed():
    """Layers are imported quickly."""
    code = """
import time, jax, flax.nnx
import jax.numpy as jnp
from flax import nnx
start = time.process_time()
from jax_models import LSTM, from_torch, to_torch
seconds = time.process_time() - start
layer = LSTM(3, 4, rngs=nnx.Rngs(0))
from_torch(layer, to_torch(layer))
print(layer(jnp.ones((1, 2, 3)))[0].shape, seconds < 2)
import parity_tests, twinscan.__main__
for package, names in ((parity_tests, parity_tests.__all__), (twinscan, ["Run"])):
    for name in names:
        try:
            getattr(package, name)
        except ModuleNotFoundError as error:
            if package is twinscan or "torch is not" in str(error):
                print(error)
for command in ("train", "parity"):
    sys.argv = ["twinscan", command]
    try:
        twinscan.__main__.main()
    except SystemExit as stop:
        print(stop)
"""

    def missing(name: str, extra: str) -> str:
        return f"{name} is not installed: run pip install '.[{extra}]' in a clone of twinscan"

    assert run(BLOCKED + code).splitlines() == [
        "(1, 2, 4) True",
        f"compare_training: {missing('torch', 'torch')}",
        f"draft_table: {missing('torch', 'torch')}",
        f"Run: {missing('tyro', 'train')}",
        f"twinscan: error: {missing('tyro', 'train')}",
        f"twinscan: error: {missing('tyro', 'torch')}",
    ]


ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "jax_models/checks": "jax_models.checks",
    "jax_models/ops": "jax_models.checks jax_models.entry_points jax_models.ops",
    "jax_models/weights": "jax_models.checks jax_models.weights",
    "jax_models/options.py": "jax_models.checks",
    "jax_models/auto_axes.py": "",
    "jax_models/call_arguments.py": "jax_models.checks jax_models.ops",
    "jax_models/sequence.py": (
        "jax_models.call_arguments jax_models.auto_axes jax_models.checks jax_models.ops "
        "jax_models.options jax_models.weights"
    ),
    "jax_models/mesh_axes.py": "",
    "jax_models/entry_points.py": "",
    "jax_models/layers": (
        "jax_models.auto_axes jax_models.checks jax_models.mesh_axes jax_models.ops "
        "jax_models.options jax_models.sequence jax_models.weights jax_models.layers"
    ),
    "jax_models/importers": (
        "jax_models.importers jax_models.layers jax_models.options jax_models.weights"
    ),
    "jax_models/models": "jax_models",
    "torch_ref": "torch_ref",
    "parity_tests/engine/bounds": "parity_tests.engine.bounds",
    "parity_tests/engine": "parity_tests.engine jax_models twinscan.files",
    "parity_tests/registry": "parity_tests.engine parity_tests.registry jax_models torch_ref",
    "parity_tests/checked_layer.py": "parity_tests.engine parity_tests.registry jax_models",
    "parity_tests/weight_checks.py": "parity_tests.engine parity_tests.checked_layer jax_models",
    "parity_tests/checks.py": (
        "parity_tests.engine parity_tests.registry parity_tests.checked_layer "
        "parity_tests.weight_checks jax_models"
    ),
    "parity_tests/report": "parity_tests jax_models twinscan",
    "tpu_compile": "tpu_compile jax_models parity_tests.registry train twinscan",
    "twinscan": "twinscan jax_models train.run",  # only for types and `from twinscan import Run`
    "train/process": "train.process jax_models twinscan",
    "train/data": "train.data train.process train.checks jax_models twinscan",
    "train/trainer": "train.trainer train.data train.process train.checks jax_models",
    "train/run": (
        "train.run train.trainer train.data train.process train.checks jax_models twinscan"
    ),
    "train": "train jax_models twinscan torch_ref",
}
OURS = {"jax_models", "torch_ref", "parity_tests", "train", "twinscan", "benchmarks", "tpu_compile"}


def imported(file: Path) -> Iterator[str]:
    """The modules of this distribution that a file imports anywhere."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ROOT.joinpath(*node.module.split("."))
            names = [
                f"{node.module}.{alias.name}"
                if any(package.glob(f"{alias.name}/__init__.py"))
                or any(package.glob(f"{alias.name}.py"))
                else node.module
                for alias in node.names
            ]
        yield from (name for name in names if name.partition(".")[0] in OURS)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room):
    place, rooms = ROOT / room, MAY_IMPORT[room].split()
    for file in [place] if place.is_file() else place.rglob("*.py"):
        for module in imported(file):
            allowed = any(f"{module}.".startswith(f"{each}.") for each in rooms)
            assert allowed, f"{file.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize(("depth", "most_floors"), [(3, 7), (9, 99)], ids=["rooms", "files"])
def test_the_engine_has_no_import_circle(depth, most_floors):
    """Imports inside functions and for types count, too.

    The floor of a room or a file is one above the highest floor that it imports.
    """
    arrows: dict[str, set[str]] = {}
    for file in (ROOT / "parity_tests" / "engine").rglob("*.py"):
        names = [".".join(file.relative_to(ROOT).with_suffix("").parts), *imported(file)]
        engine = (name for name in names if name.startswith("parity_tests.engine."))
        room, *others = [".".join(name.split(".")[:depth]) for name in engine]
        arrows.setdefault(room, set()).update({*others} - {room})
    floors: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        floors[room] = 1 + max((floors[each] for each in arrows.get(room, ())), default=0)
    assert max(floors.values()) <= most_floors


@pytest.mark.slow
def test_compare_builds_no_registry():
    code = """
import sys
from parity_tests import compare
print({"torch_ref", "train", "parity_tests.registry"} & sys.modules.keys())
"""
    assert run(code) == "set()\n"


@pytest.fixture
def own_modules(tmp_path):
    """A user's folder with modules that are called like our packages."""
    for name in OURS - {"train"}:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__init__.py").write_text("raise SystemExit('the wrong train')\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "found", "expected"),
    [
        ("-m twinscan generate --help", "twinscan", "--greedy"),
        ("-m train.command.generate --help", "train", "--greedy"),
        ("-m parity_tests --help", "parity_tests", "--mutations"),
        ("-m pytest --help", "parity_tests", "--parity-json"),
        ("compare.py", "parity_tests", "True"),
    ],
)
def test_modules_of_the_users_own_shadow_nothing(command, found, expected, own_modules):
    """Only the module that Python itself, pytest or the user's script imports is ours."""
    for path in own_modules.glob(f"{found}*"):
        path.rename(own_modules / f"another_{path.name}")
    (own_modules / "compare.py").write_text(
        "import torch\nfrom parity_tests import compare\n"
        "twin, port = torch.nn.Linear(3, 4, bias=False), lambda w, x: x @ w['weight'].T\n"
        "report = compare(twin, port, torch.ones(2, 3).numpy(), weights=dict)\n"
        "print(report.passed)\n"
    )
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=own_modules, capture_output=True, text=True
    )
    # On a busy machine, the command says that it still imports packages.
    errors = [line for line in done.stderr.splitlines() if not line.startswith(IMPORTING)]
    assert (done.returncode, errors) == (0, [])
    assert expected in done.stdout


@pytest.mark.slow
def test_a_file_of_pairs_imports_a_train_of_the_users_own(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nTWIN = torch.nn.Linear(3, 4, bias=False)\n")
    (tmp_path / "pairs.py").write_text(
        "import torch\nfrom train import TWIN\nfrom parity_tests import Pair\n"
        "port = lambda w, x: x @ w['weight'].T\n"
        "pair = Pair(TWIN, port, torch.ones(2, 3).numpy(), weights=dict)\n"
    )
    for module in ("parity_tests", "twinscan parity"):
        command = [sys.executable, "-m", *module.split(), "pairs.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_trainer_is_imported_beside_a_train_of_the_users_own(own_modules):
    """Unless the user's program has already imported a module of that name."""
    (own_modules / "twinscan.py").unlink()
    start = f"import sys\nsys.path.insert(0, {str(own_modules)!r})\n"
    assert run(f"{start}from twinscan import Run\nprint(Run.__module__)") == "train.run.folder\n"
    (own_modules / "jax_models.py").write_text("")
    code = """import jax_models
try:
    from twinscan import Run
except ImportError as error:
    print(error)
"""
    found = own_modules / "jax_models.py"
    assert f"{found} is already imported under this name; rename that" in run(start + code)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("", "usage: twinscan COMMAND"),
        ("trian", "error: expected one of train, .*, got trian \\(did you mean train\\?\\)\n"),
        ("--hlep", "got --hlep \\(did you mean --help\\?\\)\n"),
        ("generate --run no-such", "^twinscan generate: error: no-such: not the folder of a run"),
    ],
)
def test_one_command(args, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["twinscan", *args.split()])
    monkeypatch.setattr(twinscan.__main__, "exit_at_once", lambda prog: None)
    monkeypatch.setattr(jax_models, "tune_allocator", lambda: None)
    with pytest.raises(SystemExit) if args else contextlib.nullcontext() as stop:
        twinscan.__main__.main()
    assert not args or stop.value.code == 2
    assert re.search(expected, "".join(capsys.readouterr()))


@pytest.mark.slow
def test_the_version_of_a_checkout_that_is_not_installed():
    code = """
import importlib.metadata, sys
installed = importlib.metadata.version
def version(name):
    if name == "twinscan":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.version = version
sys.argv = ["twinscan", "--version"]
from twinscan.__main__ import main
main()
"""
    assert run(code) == f"twinscan {importlib.metadata.version('twinscan')}\n"


def test_the_changelog_and_the_citation_have_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+) \(", changelog, re.MULTILINE)[0] == jax_models.__version__
    assert f"\nversion: {jax_models.__version__}\n" in citation


@pytest.mark.parametrize("package", ["jax_models", "torch_ref"])
def test_the_package_gathers_the_public_names_of_its_modules(package):
    """A new module needs only a line `from … import *` in the package."""
    package = import_module(package)
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.ispkg and ".ops." not in module.name
    ]
    listed = {name for module in modules for name in getattr(module, "__all__", ())}
    assert listed == {*package.__all__}
    forgotten = {
        f"{module.__name__}: {name}"
        for module in modules
        if module.__name__.split(".")[-2] in ("layers", "models") and not hasattr(module, "__all__")
        for name, value in vars(module).items()
        if name.endswith(("Block", "LanguageModel")) and value.__module__ == module.__name__
    }
    assert forgotten <= {"jax_models.layers.residual: ResidualBlock"}  # a part of other blocks


def test_a_layer_and_its_twin_are_in_files_of_one_name():
    files = [
        {
            name.lower(): value.__module__.removeprefix(f"{package.__name__}.")
            for name in package.__all__
            if isinstance(value := getattr(package, name), type)
        }
        for package in (jax_models, import_module("torch_ref"))
    ]
    ours, twins = ({name: f[name] for name in files[0].keys() & files[1].keys()} for f in files)
    assert ours == twins


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        ("jax_models", "rwkv_from_torch", "use from_weights, after undo_rescale"),
        ("jax_models", "griffin_from_weights", "use from_weights"),
        ("jax_models", "hyena_dna_from_weights", "use from_weights"),
        ("jax_models.ops", "cudnn_lstm", "use lstm_stack"),
        ("jax_models.models.language_model", "StackConfig", "import it from jax_models.models.con"),
    ],
)
def test_a_removed_name_is_answered_with_what_to_use(module, name, advice):
    assert name in (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    with pytest.raises(ImportError, match=f"^{re.escape(module)}.{name}: {advice}"):
        getattr(importlib.import_module(module), name)
    assert not hasattr(importlib.import_module(module), "anything_else")


def test_every_state_can_be_exported():
    """The states of all modules are public, so that they are registered for `jax.export`."""
    states = {
        value
        for module in pkgutil.walk_packages(jax_models.__path__, "jax_models.")
        for name, value in vars(import_module(module.name)).items()
        if name.endswith("State") and hasattr(value, "_fields")
    }
    public = {getattr(jax_models, name) for name in jax_models.__all__}
    assert states
    assert states <= public


@pytest.mark.parametrize("name", ["optimizer", "generate"])
def test_a_module_of_the_trainer_that_moved_names_its_place(name):
    with pytest.raises(ImportError, match=rf"train.{name} is now train.\w+.{name}: see docs/migr"):
        importlib.import_module(f"train.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"No module named .train\.optimiser"):
        importlib.import_module("train.optimiser")
