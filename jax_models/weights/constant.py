"""Weights that training does not change."""

__all__ = ["Constant"]

from flax import nnx


class Constant(nnx.Variable):
    """A weight that is saved and loaded but not trained, like `requires_grad=False` in torch.

        >>> module = nnx.Dict(trained=nnx.Param(jnp.ones(3)), fixed=Constant(jnp.ones(3)))
        >>> list(nnx.state(module, nnx.Param))
        ['trained']

    Gradients and optimizers over `nnx.Param` do not select it.
    """
