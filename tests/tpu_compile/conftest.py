"""These tests run as those of the engine do."""

from tests.engine.conftest import one_torch_thread, x64

__all__ = ["one_torch_thread", "x64"]
