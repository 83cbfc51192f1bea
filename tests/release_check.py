"""Builds the distribution and tries it in clean environments (`make release-check`).

Each environment has one Python of pyproject.toml and its oldest or newest JAX. The oldest gets the
sdist, the newest the wheel. In each, this file runs once more, with the environment's own Python.
"""

import argparse
import contextlib
import glob
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax_models", "torch_ref", "parity_tests", "train", "twinscan")
EXTRAS = "torch,train"
PAIRS = ("torch.nn.GRU, 1 layer", "HawkBlock", "HyenaDNAMixer, order 2, safari")
INSTALLED_PYTHONS = (
    "~/.pyenv/versions/{version}.*/bin/python",
    "~/.local/share/uv/python/cpython-{version}.*/bin/python",
)
"""Where pyenv and uv keep Pythons that are not on the path."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command without the settings of the caller's environment, and returns its output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JAX_", "XLA_", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment | {"MPLBACKEND": "Agg"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def find_python(version: str) -> str | None:
    """The path of an installed Python of this version, or None."""
    places = [shutil.which(f"python{version}") or ""]
    for place in INSTALLED_PYTHONS:
        places += sorted(glob.glob(os.path.expanduser(place.format(version=version))))
    for place in filter(None, [sys.executable, *places]):
        with contextlib.suppress(OSError, RuntimeError):  # pyenv's shims may lead nowhere
            code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
            if run(place, "-c", code).strip() == version:
                return place
    return None


@contextlib.contextmanager
def environment(python: str) -> Iterator[Path]:
    """A new virtual environment, which is removed afterwards. Yields its folder `bin`."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        yield Path(folder, "bin")


def build(out: Path) -> tuple[Path, Path]:
    """Builds the sdist, and from it the wheel, and checks the contents and metadata of both."""
    with environment(sys.executable) as bin:
        run(bin / "pip", "install", "build", "twine")
        run(bin / "python", "-m", "build", "--outdir", out, ROOT)
        [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
        run(bin / "twine", "check", "--strict", sdist, wheel)
    check_contents(sdist, wheel)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Checks that the wheel has all files of the packages, the licences, and nothing else."""
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    info = next(name for name in files if name.endswith("/METADATA")).removesuffix("METADATA")
    expected = {name for name in sources if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected |= {f"{info}licenses/{name}" for name in project["license-files"]}
    expected |= {info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    assert files == expected, f"{wheel.name}: {sorted(files ^ expected)}"
    assert {f"{package}/py.typed" for package in PACKAGES} <= files
    needed = {"README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "conftest.py"}
    assert needed <= sources, f"{sdist.name}: {sorted(needed - sources)} are missing"


def try_environment(python: str, distribution: Path, *jax: str) -> str:
    """Installs the distribution in a new environment and runs all checks there."""
    with environment(python) as bin, tempfile.TemporaryDirectory() as folder:
        run(bin / "pip", "install", distribution, *jax)
        inside = (bin / "python", "-I", Path(__file__).resolve(), "--inside")
        run(*inside, "layers", cwd=Path(folder))
        run(bin / "twinscan", "--version")
        run(bin / "pip", "install", f"twinscan[{EXTRAS}] @ {distribution.as_uri()}", "pytest", *jax)
        run(bin / "pip", "check")
        versions = run(*inside, "everything", cwd=Path(folder)).splitlines()[-1]
        train = ("train", "--out", "run", "--num-steps", "20", "--eval-batches", "1")
        for command in (
            train,
            ("generate", "--run", "run", "--num-tokens", "20"),
            ("export", "--run", "run", "--out", "weights.safetensors"),
            ("parity", *(word for pair in PAIRS for word in ("--case", pair))),
        ):
            output = run(bin / "twinscan", *command, cwd=Path(folder))
        for pair in PAIRS:
            assert pair in output, f"{pair} is not in the report\n{output}"
        return versions


def import_all(*packages: str) -> None:
    """Imports all modules of the packages, and checks that they are those of this environment."""
    for package in map(importlib.import_module, packages):
        assert Path(package.__path__[0]).is_relative_to(sys.prefix), package.__path__
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def check_layers() -> None:
    """Checks what needs nothing but JAX and Flax."""
    assert importlib.util.find_spec("torch") is None
    import_all("jax_models")


def check_everything() -> None:
    """Checks all modules, the entry points, and the README that the distribution contains."""
    import_all(*PACKAGES)
    metadata = importlib.metadata.metadata("twinscan")
    assert metadata["Version"] == importlib.import_module("jax_models").__version__
    for entry in importlib.metadata.distribution("twinscan").entry_points:
        entry.load()
    names = {"__name__": "readme"}
    blocks = re.findall(r"```python\n(.*?)```", metadata["Description"], flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "torch"))
    print(", ".join((f"Python {sys.version.split()[0]}", *versions)))


def main() -> int:
    """Builds, tries each environment, and prints a line for each. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    [oldest] = re.findall(r"jax>=([\d.]+)", "\n".join(project["dependencies"]))
    parser.add_argument("--python", choices=versions, help="try this Python alone")
    parser.add_argument("--jax", choices=("oldest", "newest"), help="try this JAX alone")
    parser.add_argument("--out", type=Path, help="keep the distributions in this new folder")
    options = parser.parse_args()

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(options.out or Path(folder))
        print(f"{sdist.name} and {wheel.name} have the right contents, and their metadata renders")
        tried = {
            "oldest": (sdist, f"jax=={oldest}", f"jaxlib=={oldest}"),
            "newest": (wheel, "jax"),
        }
        for version in [options.python] if options.python else versions:
            python = find_python(version)
            if python is None:
                print(f"Python {version}: NOT TRIED, it is not installed", flush=True)
                failed |= bool(options.python)
                continue
            for jax in [options.jax] if options.jax else tried:
                start = time.monotonic()
                try:
                    result = f"passed with {try_environment(python, *tried[jax])}"
                except (RuntimeError, AssertionError) as error:
                    result, failed = f"FAILED: {error}", True
                seconds = time.monotonic() - start
                print(f"Python {version}, {jax} JAX: {result} ({seconds:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        {"layers": check_layers, "everything": check_everything}[sys.argv[2]]()
    else:
        sys.exit(main())
