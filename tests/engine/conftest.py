"""Runs these tests in float64 and with one thread of torch, so that results repeat."""

import pytest
import torch


@pytest.fixture(autouse=True)
def x64(x64):
    """Enables float64 in every test."""


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Makes torch sum in a fixed order."""
    torch.set_num_threads(1)
