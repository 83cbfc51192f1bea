"""Fixtures that all tests share."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import pytest

from train.__main__ import main
from train.mesh import MeshConfig, provide_devices


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


@pytest.fixture(scope="session")
def process_with_eight_devices():
    """A process with eight devices and float64.

    JAX cannot change the number of its devices once it has started, so all tests share a process.
    """
    eight = (MeshConfig(data=8),)
    with ProcessPoolExecutor(1, get_context("spawn"), provide_devices, eight) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_PLATFORMS", "cpu")
            patch.setenv("JAX_ENABLE_X64", "1")
            pool.submit(jax.device_count).result()
        yield pool


@pytest.fixture(scope="module")
def on_eight_devices(process_with_eight_devices):
    """Calls a function of a test's module in `process_with_eight_devices`."""
    submit = process_with_eight_devices.submit
    yield lambda function, *args: submit(function, *args).result()
    submit(jax.clear_caches).result()  # frees the memory of the module's programs


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
