"""The gated recurrences, LSTM, GRU and RNN, as layers.

All contenders get torch's weights. A peer with a single bias gets the sum of torch's two.
"""

from benchmarks.families.gated import jax_peers
from benchmarks.families.gated.problem import problems
from benchmarks.families.gated.sides import contenders

contenders |= jax_peers.contenders

__all__ = ["contenders", "problems"]
