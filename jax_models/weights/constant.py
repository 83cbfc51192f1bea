"""Values that belong to a layer's weights and that training leaves alone."""

from flax import nnx


class Constant(nnx.Variable):
    """A value that a `state_dict` has and no optimiser changes: a torch `requires_grad=False`.

        >>> module = nnx.Dict(trained=nnx.Param(jnp.ones(3)), fixed=Constant(jnp.ones(3)))
        >>> list(nnx.state(module, nnx.Param))
        ['trained']

    `nnx.Param` does not select it, so gradients and optimisers over `nnx.Param` pass it by.
    """
