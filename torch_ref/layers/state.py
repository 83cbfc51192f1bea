"""The state that the twins carry from one call to the next."""

from torch import Tensor

State = tuple[Tensor, ...]
"""The tensors of the JAX layer's state, in the same order."""
