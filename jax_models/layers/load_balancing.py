"""The loss that balances how much the experts of a mixture are used."""

__all__ = ["load_balancing_loss"]

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class ExpertLoad(nnx.Variable):
    """How often each expert was chosen in the last call in training.

    The first row has the numbers of tokens that chose each expert, the second the sums of the
    tokens' scores.
    """


def load_of_tokens(
    scores: Float[Array, "tokens experts"],
    chosen: Int[Array, "tokens chosen"],
    active: Bool[Array, "..."] | None,
) -> Float[Array, "2 experts"]:
    """Returns how much the active tokens use each expert, as in `ExpertLoad`."""
    weights = jnp.ones(len(scores)) if active is None else active.reshape(-1)
    weights = weights.astype(scores.dtype)[:, None]
    num_choices = jnp.zeros_like(scores[0]).at[chosen].add(weights)
    return jnp.stack([num_choices, (weights * scores).sum(axis=0)])


def load_balancing_loss(model: nnx.Module) -> Float[Array, ""]:
    """Returns the loss that balances how much the last call of a model used each expert.

        >>> experts = Experts(64, 32, 8, 2, track_load=True, rngs=nnx.Rngs(0))
        >>> y = experts(jnp.ones((4, 100, 64)))
        >>> loss = load_balancing_loss(experts)

        loss = num_experts Σ_e f_e p_e

    f_e is the number of tokens that chose expert e, and p_e is the mean of their s_e, both divided
    by the number of tokens and taken over all `Experts` with `track_load` in the model. The loss is
    `experts_per_token` if each expert is used equally. Only p is differentiated. The loss is zero
    before the first call.

    Raises:
        ValueError: no `Experts` in the model has `track_load`, or their numbers of experts or of
            experts for each token differ.

    Source: Fedus et al. 2021 (arXiv 2101.03961), (4) to (6), as in transformers.

    """
    loads, sizes, axes = [], set(), set()
    modules: Any = nnx.iter_modules(model)
    for _, module in modules:  # `Experts` imports this file, so its `load` identifies it
        if isinstance(load := getattr(module, "load", None), ExpertLoad):
            loads.append(load[...])
            sizes.add((module.num_experts, module.experts_per_token))
            axes |= {module.batch_axis, module.time_axis} - {None}
    if len(sizes) != 1:
        raise ValueError(
            "model: expected Experts with track_load, all with the same num_experts and "
            f"experts_per_token, got {sorted(sizes) or 'none'}"
        )
    [(num_experts, experts_per_token)] = sizes
    # Add up the layers, and then the devices. XLA rejects an all-reduce over a single device if
    # other axes of the mesh divide parameters.
    divided = [axis for axis in sorted(axes) if lax.axis_size(axis) > 1]
    num_choices, scores = lax.psum(jnp.stack(loads).sum(axis=0), divided)
    num_tokens = jnp.maximum(num_choices.sum() / experts_per_token, 1)
    return num_experts * jnp.sum((num_choices / num_tokens) * (scores / num_tokens))
