"""Fixtures that all tests share."""

import gc
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import pytest

from train.command.train import main
from train.trainer.mesh import MeshConfig, provide_devices


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package of these files in a temporary folder. Returns what runs Python with it."""

    def run(*args: str) -> str:
        paths = [str(tmp_path), *filter(None, sys.path)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(name: str, files: dict[str, str], entry_points: str):
        monkeypatch.chdir(tmp_path)
        Path(name).mkdir()
        for module, text in {**files, "__init__": ""}.items():
            Path(name, f"{module}.py").write_text(text)
        Path(f"{name}-1.0.dist-info").mkdir()
        Path(f"{name}-1.0.dist-info", "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        Path(f"{name}-1.0.dist-info", "entry_points.txt").write_text(entry_points)
        Path("text").write_text("To be, or not to be, that is the question.\n" * 9)
        return run

    return install


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Caches tokens in the folder of the tests, also for the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def x64():
    """Enables float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def on_eight_devices():
    """Calls a function of a test's module in a process with eight devices and float64.

    JAX cannot change the number of its devices once it has started. The process ends with the
    module, because it keeps all memory that its programs have ever taken.
    """
    eight = (MeshConfig(data=8),)
    with ProcessPoolExecutor(1, get_context("spawn"), provide_devices, eight) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_PLATFORMS", "cpu")
            patch.setenv("JAX_ENABLE_X64", "1")
            pool.submit(jax.device_count).result()
            pool.submit(gc.set_threshold, *gc.get_threshold()).result()
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture
def standard_promotion():
    """Promotes dtypes and ranks as in a user's program."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def compilations():
    """Collects the programs that XLA compiles during a test."""
    compiled = []

    def listen(event: str, seconds: float, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a run with default options, trained to the end.

    Quick tests that need it are in the xdist group "finished", so that one process trains it.
    """
    folder = tmp_path_factory.mktemp("finished") / "run"
    main(["--out", str(folder), "--eval-batches", "20"])
    return folder
