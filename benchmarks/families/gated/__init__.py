"""The gated recurrences, LSTM, GRU and RNN, as layers.

All contenders get torch's weights. A peer with a single bias gets the sum of torch's two.
"""

from benchmarks.families.gated import jax_peers
from benchmarks.families.gated.ours_and_torch import contenders
from benchmarks.families.gated.problem import problems

contenders |= jax_peers.contenders

__all__ = ["contenders", "problems"]
