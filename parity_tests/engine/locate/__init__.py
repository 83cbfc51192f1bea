"""Where a JAX port first departs from its reference: call by call, forward and backward."""

from parity_tests.engine.locate.location import Location, Visit

__all__ = ["Location", "Visit"]
