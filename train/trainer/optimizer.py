"""Optimizers as `torch.optim` defines them, built from a config."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from jax_models import project
from jax_models.options import CheckedFields, Index, checked_options
from train.checks import Betas, Decay, NotNegative, Positive


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(CheckedFields):
    """AdamW; the defaults are torch.optim.AdamW's."""

    learning_rate: Positive = 1e-3
    """The learning rate; with a schedule, its highest value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Keep the learning rate, or decay it until the last step along a line or half a cosine."""
    final_learning_rate: NotNegative = 0.0
    """The learning rate at the end of a linear or cosine schedule."""
    warmup_steps: Index = 0
    """Number of steps over which the learning rate first rises from zero."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_mask: Literal["all", "matrices"] = "all"
    """Which weights decay: all, as in torch, or only matrices, which excludes embeddings, biases,
    and parameters that scale or shift single channels."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    epsilon: Positive = 1e-8
    """Added to the square root of the second moment."""
    clip_norm: Positive | None = None
    """Clip the gradients to this global norm."""
    ema_decay: Decay | None = None
    """Keep an exponential moving average of the weights with this decay. Evaluations, exports and
    generation use the average."""


@checked_options
def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate of a run of `num_steps` steps, as a function of the steps done.

    Raises:
        ValueError: the warm-up is at least as long as the run.

    """
    if config.warmup_steps >= num_steps:
        raise ValueError(
            f"optimizer.warmup_steps: expected fewer than the {num_steps} steps of the run, "
            f"got {config.warmup_steps}"
        )
    rate, last = config.learning_rate, config.final_learning_rate
    steps = num_steps - config.warmup_steps
    decay = {
        "constant": lambda: optax.constant_schedule(rate),
        "linear": lambda: optax.linear_schedule(rate, last, steps),
        "cosine": lambda: optax.cosine_decay_schedule(rate, steps, alpha=last / rate),
    }[config.schedule]()
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    schedule = optax.join_schedules([warmup, decay], [config.warmup_steps])
    return schedule if config.warmup_steps else decay


@checked_options
def build_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `num_steps` steps.

    Raises:
        ValueError: the warm-up is at least as long as the run.

    """
    optimizer = optax.chain(
        optax.scale_by_adam(*config.betas, eps=config.epsilon),
        add_decayed_weights(config.weight_decay, config.decay_mask),
        optax.scale_by_learning_rate(build_schedule(config, num_steps)),
    )
    if config.clip_norm is not None:
        optimizer = optax.chain(clip_by_global_norm(config.clip_norm), optimizer)
    return optimizer if config.ema_decay is None else averaging(optimizer, config.ema_decay)


def apply_gradient(
    optimizer: optax.GradientTransformation, gradient, optimizer_state: optax.OptState, params
) -> tuple[Any, optax.OptState]:
    """The parameters after one step, projected into their bounds, and the optimizer's state."""
    with jax.numpy_dtype_promotion("standard"):  # optax does not work under "strict"
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return project(optax.apply_updates(params, updates)), optimizer_state


def clip_by_global_norm(max_norm: float, epsilon: float = 1e-6) -> optax.GradientTransformation:
    """`g · min(1, max_norm / (‖g‖ + ε))`, as `torch.nn.utils.clip_grad_norm_` clips.

    `optax.clip_by_global_norm` has no ε; the relative difference is about 1e-6.
    """

    def clip(updates, params=None):
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + epsilon))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)

    return optax.stateless(clip)


def scale_by_amsgrad(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """AMSGrad as in `torch.optim.Adam(amsgrad=True)`.

    torch takes the largest second moment and then corrects its bias, whereas `optax.amsgrad` takes
    the largest of the corrected second moments.
    """

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return optax.ScaleByAmsgradState(jnp.zeros((), jnp.int32), zeros, zeros, zeros)

    def update(updates, state, params=None):
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu)
        corrected, largest = (
            optax.tree.bias_correction(moment, decay, count)
            for moment, decay in ((mu, b1), (nu_max, b2))
        )
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), corrected, largest)
        return updates, optax.ScaleByAmsgradState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)


def is_matrix(param: Any) -> bool:
    """Whether a parameter is a matrix, or a stack of matrices.

    A layer declares a parameter with several axes that is no matrix by
    `nnx.Param(value, is_matrix=False)`.
    """
    declared = not isinstance(param, nnx.Variable) or param.get_metadata("is_matrix", True)
    return bool(declared and param.ndim >= 2)


def add_decayed_weights(
    weight_decay: float, mask: Literal["all", "matrices"]
) -> optax.GradientTransformation:
    """`optax.add_decayed_weights`, with a state that does not depend on the mask."""

    def add(param, update):
        if mask == "matrices" and not is_matrix(param):
            return update
        return jax.tree.map(lambda p, u: u + weight_decay * p, param, update)

    def add_all(updates, params):
        return jax.tree.map(
            add, params, updates, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )

    return optax.stateless(add_all)


class AveragedState(NamedTuple):
    """The state of an optimizer, and the average of the parameters after its steps."""

    optimizer_state: optax.OptState
    params: Any
    num_steps: Int[Array, ""]


def averaging(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """The optimizer, with an average of the parameters after its steps, weighted by decay^age.

    The initial parameters are not part of the average, just as Adam's bias correction removes the
    initial zeros from its moments.
    """

    def init(params):
        return AveragedState(optimizer.init(params), params, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None):
        updates, optimizer_state = optimizer.update(updates, state.optimizer_state, params)
        new_params = project(optax.apply_updates(params, updates))
        num_steps = state.num_steps + 1
        weight = (1 - decay) / -jnp.expm1(num_steps * math.log(decay))
        mean = jax.tree.map(
            lambda m, p: m + weight.astype(m.dtype) * (p - m), state.params, new_params
        )
        return updates, AveragedState(optimizer_state, mean, num_steps)

    return optax.GradientTransformation(init, update)


def state_layouts(state: Any, params: Any) -> list[Any]:
    """An optimizer's state in all four forms: with or without clipping and averaging."""
    average = state
    if not isinstance(state, AveragedState):
        average = AveragedState(state, params, jnp.zeros((), jnp.int32))
    state = average.optimizer_state
    moments = state[-1] if len(state) == 2 else state
    chains = (moments, (optax.EmptyState(), moments))
    return [*chains, *(average._replace(optimizer_state=chain) for chain in chains)]


def convert_state(state: Any, params: Any, like: Any) -> Any:
    """An optimizer's state in the form of another's. A missing average starts anew."""
    structure = jax.tree.structure(like)
    all_forms = [state, *state_layouts(state, params)]
    form = next(form for form in all_forms if jax.tree.structure(form) == structure)
    if isinstance(form, AveragedState) and form.params is params:
        # A step donates both the parameters and their average, so they must not share memory.
        form = form._replace(params=jax.tree.map(jnp.copy, params))
    return form
