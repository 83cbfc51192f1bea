"""Where a JAX port first departs from its torch module: call by call, forward and backward.

`torch_side` alone needs torch.
"""

from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.locate.record import tap

__all__ = ["Location", "Visit", "tap"]
