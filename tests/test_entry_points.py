"""Packages of others that are broken, or that use a name a second time."""

import importlib
from collections import defaultdict

import numpy as np
import pytest
from safetensors.numpy import save_file

import parity_tests.registry
import parity_tests.report.command as parity_command
import train.__main__ as train_command
import train.config
from jax_models import HawkLanguageModelConfig, entry_points, load_pretrained
from jax_models.entry_points import by_name
from jax_models.models import architecture
from train.config import PRESETS, from_fields, to_fields
from twinscan.command_line import CommandLineError

find_architectures = architecture._all_architectures.__wrapped__


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package, which is one module, in a temporary folder."""
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

    return install


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

    # Whatever is not found may be what the package would have provided, so each error names it.
    save_file({"wheel.weight": np.ones(3)}, tmp_path / "wheel.safetensors")
    run = to_fields(PRESETS["hawk"])
    run["model"]["type"] = "WheelLanguageModelConfig"
    for ask in (
        lambda: train_command.parse_arguments(["--preset", "wheel"]),
        lambda: from_fields(run),
        lambda: load_pretrained(tmp_path / "wheel.safetensors"),
        lambda: parity_command.main(["--case", "Wheel"]),
    ):
        with pytest.raises((CommandLineError, ValueError), match=r" \(broken packages: broken_pac"):
            ask()


def test_a_package_with_a_broken_preset_stops_nothing_else(install, monkeypatch):
    class Broken(HawkLanguageModelConfig):
        @classmethod
        def presets(cls):
            raise LookupError("no such size")

    monkeypatch.setitem(train.config.MODEL_CONFIGS, "Broken", Broken)
    with pytest.warns(UserWarning, match="broken package .*: LookupError: no such size"):
        assert by_name("preset", train.config._found_presets()) == PRESETS


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


def test_a_preset_of_one_name_is_an_error(monkeypatch):
    class Second(HawkLanguageModelConfig):
        pass

    monkeypatch.setitem(train.config.MODEL_CONFIGS, "Second", Second)
    message = r"^preset hawk: .*jax_models.models.hawk.HawkLanguageModelConfig and .*\.Second$"
    with pytest.raises(ValueError, match=message):
        by_name("preset", train.config._found_presets())
