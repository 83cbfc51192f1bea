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


def make(python: Path | str, venv: Path, target: str = "train") -> subprocess.CompletedProcess[str]:
    """The commands that `make train` or another target would run."""
    return subprocess.run(
        ["make", "--dry-run", "--directory", ROOT, target, f"PYTHON={python}", f"VENV={venv}"],
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


@pytest.mark.parametrize(
    ("target", "builds"),
    [("train", False), ("test", False), ("test-all", True), ("bench", True), ("native", True)],
)
def test_only_those_who_need_the_kernels_build_them(target, builds, tmp_path):
    done = make(fake_python(tmp_path / "python3.11", "3.11"), tmp_path / "venv", target)
    assert done.returncode == 0
    assert ("./native" in done.stdout) == builds


@pytest.mark.slow
def test_kernels_that_cannot_be_built_are_left_out(tmp_path):
    python, venv = fake_python(tmp_path / "python3.11", "3.11"), tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(
        '#!/bin/sh\ncase "$*" in *pip*) exit 1;; esac\necho 3.11\n'
    )
    (venv / "bin" / "python").chmod(0o755)
    (venv / ".installed").touch()
    command = ["make", "--directory", ROOT, venv / ".native", f"PYTHON={python}", f"VENV={venv}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "twinscan-native was not built and is left out" in done.stdout
    assert done.stderr == ""
