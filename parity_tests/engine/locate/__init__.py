"""Where a JAX port first departs from its torch module: call by call, forward and backward."""

from parity_tests.engine.locate.find import checked_names, find_departure, where_it_raises
from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.locate.record import tap

__all__ = ["Location", "Visit", "checked_names", "find_departure", "tap", "where_it_raises"]
