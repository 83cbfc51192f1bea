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
