"""The gated recurrences, LSTM, GRU and RNN, as layers.

All take torch's weights. Where a peer has one bias, it is the sum of the two.
"""

from benchmarks.families.gated import jax_peers
from benchmarks.families.gated.problem import problems
from benchmarks.families.gated.sides import contenders

contenders |= jax_peers.contenders

__all__ = ["contenders", "problems"]
