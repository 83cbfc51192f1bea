"""`make` rejects unsuitable Pythons, and renews an environment of another Python."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def fake_python(path: Path, version: str) -> Path:
    """A program that answers like this version of Python when asked for its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def make(python: Path | str, venv: Path) -> subprocess.CompletedProcess[str]:
    """The commands that `make train` would run."""
    return subprocess.run(
        ["make", "--dry-run", "--directory", ROOT, "train", f"PYTHON={python}", f"VENV={venv}"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("version", ["3.10", "3.14", None])
def test_a_python_that_does_not_fit_is_named_at_once(version, tmp_path):
    python = tmp_path / "python"
    if version is not None:
        fake_python(python, version)
    done = make(python, tmp_path / "venv")
    assert done.returncode == 2
    found = version or "not there"
    expected = f"PYTHON: expected Python 3.11 3.12 3.13, got {python}, which is {found}; name"
    assert [expected in line for line in done.stderr.splitlines()] == [True]
    assert "pip" not in done.stdout


def test_make_takes_the_pythons_of_the_package():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert f"PYTHONS := {' '.join(classifiers)}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(("of_venv", "made"), [(None, True), ("3.12", True), ("3.11", False)])
def test_an_environment_of_another_python_is_made_again(of_venv, made, tmp_path):
    python, venv = fake_python(tmp_path / "python3.11", "3.11"), tmp_path / "venv"
    if of_venv is not None:
        fake_python(venv / "bin" / "python", of_venv)
        (venv / ".installed").touch()
    done = make(python, venv)
    assert done.returncode == 0
    assert (f"{python} -m venv --clear {venv}" in done.stdout) == made
    assert ("pip install" in done.stdout) == made
