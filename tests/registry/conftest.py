"""Uses the fixtures of the engine's tests."""

from tests.engine.conftest import one_torch_thread, x64

__all__ = ["one_torch_thread", "x64"]
