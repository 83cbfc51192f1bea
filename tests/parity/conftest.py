"""The tests of the parity tool run as the registry's do."""

from parity_tests.conftest import one_torch_thread, standard_promotion, x64

__all__ = ["one_torch_thread", "standard_promotion", "x64"]
