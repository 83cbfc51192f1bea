"""Packages of other authors that are broken, or that use a name that is taken."""

import importlib
import runpy
import sys
from collections import defaultdict

import numpy as np
import pytest
from safetensors.numpy import save_file

import parity_tests.registry
import parity_tests.report.command as parity_command
import train.command.train as train_command
import train.run.config
from jax_models import HawkLanguageModelConfig, entry_points, load_pretrained
from jax_models.entry_points import DuplicateNameError, by_name
from jax_models.models import architecture
from train.data.vocabulary import Characters
from train.run.config import PRESETS, declared_presets, from_fields, to_fields
from train.run.folder import CONFIG, Run, _write
from twinscan import interrupted
from twinscan.command_line import CommandLineError, run_module

find_architectures = architecture._all_architectures.__wrapped__


@pytest.fixture(autouse=True)
def restore_registry():
    """Restores the registry, which tests reload."""
    registry = dict(vars(parity_tests.registry))
    yield
    vars(parity_tests.registry).clear()
    vars(parity_tests.registry).update(registry)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package, which is one module, in a temporary folder until the test ends."""
    installed = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(entry_points, "_failures", defaultdict(list))

    def install(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        groups = "".join(
            f"[{g}]\na = {name}:attribute [extra]\n"
            for g in ("twinscan.models", "twinscan.registry")
        )
        (info / "entry_points.txt").write_text(groups)
        installed.append(name)

    yield install
    for name in installed:
        sys.modules.pop(name, None)


def test_a_package_that_cannot_be_imported_stops_nothing_else(install, tmp_path):
    before = find_architectures()
    install("broken_package", "import no_such_module")
    message = "broken package broken_package: ModuleNotFoundError: No module named 'no_such_module'"
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"^twinscan.models: {message}$"):
            assert find_architectures() == before
    assert entry_points.broken_packages("twinscan.models").count("broken_package:") == 1
    with pytest.warns(UserWarning, match=f"^twinscan.registry: {message}$"):
        importlib.reload(parity_tests.registry)

    # The package might have provided what is not found, so each error mentions that it is broken.
    wheel = str(tmp_path / "wheel.safetensors")
    save_file({"wheel.weight": np.ones(3)}, wheel)
    run = to_fields(PRESETS["hawk"])
    run["model"]["type"] = "WheelLanguageModelConfig"
    for ask in (
        lambda: train_command.parse_arguments(["--preset", "wheel"]),
        lambda: from_fields(run),
        lambda: train_command.main(["--init", wheel, "--out", str(tmp_path / "run")]),
        lambda: load_pretrained(wheel),
        lambda: parity_command.main(["--case", "Wheel"]),
    ):
        with pytest.raises((CommandLineError, ValueError), match=r" \(broken packages: broken_pac"):
            ask()


def test_a_run_of_a_missing_package_names_its_model(tmp_path):
    run = Run.create(tmp_path / "run", PRESETS["hawk"], Characters("ab"), "")
    fields = to_fields(PRESETS["hawk"])
    fields["model"]["type"] = "WheelLanguageModelConfig"
    _write(run.folder / CONFIG, fields)
    message = "config.json: model: .*, got WheelLanguageModelConfig; install the package that decl"
    with pytest.raises(CommandLineError, match=message):
        Run.open(run.folder)


@pytest.mark.parametrize(
    ("presets", "message"),
    [
        ({"wheel": {"recipe": "soup"}}, "recipe: expected one of all-work, .*, got soup"),
        ({"wheel": {"model.num_layers": 0}}, "num_layers: expected a positive integer, got 0"),
        ({"wheel": {"num_wheels": 3}}, "TrainConfig: num_wheels: no such argument"),
        (classmethod(lambda cls: {}), "Broken.presets: expected a mapping .*, got a classmethod"),
    ],
)
def test_a_broken_preset_stops_nothing_but_its_own_package(presets, message, install, monkeypatch):
    class Broken(HawkLanguageModelConfig):
        pass

    Broken.presets = presets
    monkeypatch.setitem(train.run.config.MODEL_CONFIGS, "Broken", Broken)
    package = Broken.__module__.partition(".")[0]
    with pytest.warns(UserWarning, match=rf"broken package {package}: \w+: {message}"):
        assert by_name("preset", declared_presets()) == PRESETS
    monkeypatch.setattr(Broken, "__module__", HawkLanguageModelConfig.__module__)
    with pytest.raises((TypeError, ValueError), match=message):
        by_name("preset", declared_presets())


def test_a_config_or_case_of_one_name_is_an_error(install):
    install(
        "second",
        """
from jax_models.models.architecture import ModelConfig
from parity_tests.registry import hawk

class HawkLanguageModelConfig(ModelConfig):
    family = "another Hawk"

CASES = hawk.CASES[:1]
""",
    )
    both = "got those of jax_models.models.hawk.HawkLangua.* and second.HawkLanguageModelConfig$"
    with pytest.raises(ValueError, match=f"^config HawkLanguageModelConfig: .*, {both}"):
        find_architectures()
    both = "got those of parity_tests.registry.hawk and second$"
    with pytest.raises(ValueError, match=f"^case .*: .*, {both}"):
        importlib.reload(parity_tests.registry)


@pytest.mark.parametrize(
    ("module", "arg", "prog"),
    [
        ("twinscan", "evaluate", "twinscan evaluate"),
        ("train", "--help", "python -m train"),
        ("train.command.generate", "--help", "python -m train.command.generate"),
        ("tpu_compile", "--help", "python -m tpu_compile"),
    ],
)
def test_two_definitions_of_a_name_are_a_one_line_error(module, arg, prog, monkeypatch, capsys):
    def fail(_):
        raise DuplicateNameError("preset hawk: expected one definition")

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(sys, "argv", [module, arg])
    monkeypatch.setattr(interrupted, "exit_at_once", lambda _: None)
    name = module if "." in module else f"{module}.__main__"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(name, run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{prog}: error: preset hawk: expected one definition\n"


def test_another_error_of_an_import_keeps_its_traceback(monkeypatch):
    def fail(_):
        raise ValueError("a bug")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ValueError, match=r"^a bug$"):
        run_module("tpu_compile")


def test_a_preset_of_one_name_is_an_error(monkeypatch):
    class Second(HawkLanguageModelConfig):
        presets = HawkLanguageModelConfig.presets

    class Third(HawkLanguageModelConfig):
        """Inherits Hawk's presets, which still belong to Hawk alone."""

    monkeypatch.setitem(train.run.config.MODEL_CONFIGS, "Third", Third)
    assert by_name("preset", declared_presets()) == PRESETS
    monkeypatch.setitem(train.run.config.MODEL_CONFIGS, "Second", Second)
    message = r"^preset hawk: .*jax_models.models.hawk.HawkLanguageModelConfig and .*\.Second$"
    with pytest.raises(ValueError, match=message):
        by_name("preset", declared_presets())
