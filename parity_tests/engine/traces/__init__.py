"""The calls of a side's modules, recorded: what each takes and returns, forward and backward.

`torch_trace` alone needs torch.
"""

from parity_tests.engine.traces.tap import tap

__all__ = ["tap"]
