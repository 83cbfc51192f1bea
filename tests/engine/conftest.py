"""Parity is measured in float64, and by one thread of torch, so that results repeat."""

import pytest
import torch


@pytest.fixture(autouse=True)
def x64(x64):
    """float64 is float64 in every test."""


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Sums have one order."""
    torch.set_num_threads(1)
