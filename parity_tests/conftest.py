"""Parity runs in float64 where a check says so, and refuses every silent promotion."""

import jax
import pytest
import torch


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture
def standard_promotion():
    """Modules and functions are written as users write them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
