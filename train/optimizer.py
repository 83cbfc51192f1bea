"""Optimisers by config, defined as torch.optim defines them."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jax_models import project
from jax_models.options import CheckedFields, Index, checked_options
from train.checks import Betas, NotNegative, Positive


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(CheckedFields):
    """AdamW; the defaults are torch.optim.AdamW's."""

    learning_rate: Positive = 1e-3
    """The rate, or with a schedule the highest rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Keep the rate, or let it fall to zero at the last step along half a cosine."""
    warmup_steps: Index = 0
    """Steps over which the rate first rises from zero."""
    weight_decay: NotNegative = 0.01
    """Decoupled from the gradient, of every weight, times the rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the first and second moments."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradients."""


@checked_options
def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate, by the number of steps before, of a run of `num_steps` steps.

    Raises:
        ValueError: the warm-up is as long as the run.

    """
    if config.warmup_steps >= num_steps:
        raise ValueError(
            f"warmup_steps: expected fewer than the {num_steps} steps of the run, "
            f"got {config.warmup_steps}"
        )
    decay = (
        optax.constant_schedule(config.learning_rate)
        if config.schedule == "constant"
        else optax.cosine_decay_schedule(config.learning_rate, num_steps - config.warmup_steps)
    )
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    schedule = optax.join_schedules([warmup, decay], [config.warmup_steps])
    return schedule if config.warmup_steps else decay


@checked_options
def build_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """The optimiser of a run of `num_steps` steps.

    Raises:
        ValueError: the warm-up is as long as the run.

    """
    adamw = optax.adamw(
        build_schedule(config, num_steps),
        *config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(clip_by_global_norm(config.clip_norm), adamw)


def apply_gradient(
    optimizer: optax.GradientTransformation, gradient, optimizer_state: optax.OptState, params
) -> tuple[Any, optax.OptState]:
    """The parameters after one step, inside their bounds, and the optimiser's state."""
    with jax.numpy_dtype_promotion("standard"):  # optax does not work under "strict"
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return project(optax.apply_updates(params, updates)), optimizer_state


def clip_by_global_norm(max_norm: float, epsilon: float = 1e-6) -> optax.GradientTransformation:
    """`g · min(1, max_norm / (‖g‖ + ε))`, as `torch.nn.utils.clip_grad_norm_` clips.

    `optax.clip_by_global_norm` has no ε, which parts the two by 1e-6 of a step.
    """

    def clip(updates, params=None):
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + epsilon))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)

    return optax.stateless(clip)
