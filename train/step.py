"""The training step, the evaluation, and where their arrays live."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models import LanguageModel
from jax_models.ops import carry_dtype
from jax_models.options import checked_options
from train.accumulation import accumulated
from train.checks import Seed
from train.optimizer import AveragedState, apply_gradient


class TrainState(NamedTuple):
    """What a step changes, and a checkpoint keeps."""

    step: Int[Array, ""]
    params: nnx.State
    optimizer_state: Any

    @property
    def averaged_params(self) -> nnx.State:
        """What is evaluated and exported: the parameters, or their average where there is one."""
        state = self.optimizer_state
        return state.params if isinstance(state, AveragedState) else self.params


class Measures(NamedTuple):
    """Of a step, or of several: the step is applied where both are finite."""

    loss: Float[Array, "*n"]
    """Before the step, in nats per token."""
    gradient_norm: Float[Array, "*n"]
    """Before clipping."""


def token_losses(
    model: LanguageModel, tokens: Int[Array, "batch window+1"]
) -> Float[Array, "batch window"]:
    """−log p of each token given those before it in its row, in nats and at least float32."""
    logits, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(carry_dtype(logits.dtype)), tokens[:, 1:]
    )


class Trainer:
    """A model and an optimiser as pure functions over a `TrainState`, data-parallel.

    Every device has the whole state; a batch's rows are divided over the devices.

    Raises:
        ValueError: the batch does not divide over the devices.

    """

    @checked_options
    def __init__(
        self,
        model: LanguageModel,
        optimizer: optax.GradientTransformation,
        *,
        batch_size: int,
        seed: Seed,
        devices: Sequence[Any],
        accumulate: int = 1,
    ):
        if not devices:
            raise ValueError("devices: expected at least one")
        if batch_size % (len(devices) * accumulate):
            raise ValueError(
                f"batch_size: expected a multiple of the {len(devices)} devices times "
                f"accumulate={accumulate}, got {batch_size}"
            )
        self.accumulate = accumulate
        self.mesh = jax.make_mesh(
            (len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices
        )
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.by_rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.graphdef, self.initial_params, self.rest = nnx.split(model, nnx.Param, ...)
        self.optimizer = optimizer
        self.dropout_key = jax.random.key(seed)

    def initial_state(self) -> TrainState:
        """The state before the first step. The step uses a state up; the model keeps its arrays."""
        params = self.initial_params
        state = TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))
        return jax.device_put(state, self.replicated, may_alias=False)

    def model(self, params: nnx.State) -> LanguageModel:
        """The model with these parameters, for training."""
        return nnx.merge(self.graphdef, params, self.rest, copy=True)

    def put(self, batch: np.ndarray) -> Int[Array, "*n batch window+1"]:
        """A batch, or several, on the devices."""
        spec = PartitionSpec(*[None] * (batch.ndim - 2), *self.by_rows.spec)
        return jax.device_put(batch, NamedSharding(self.mesh, spec))

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self, state: TrainState, tokens: Int[Array, "batch window+1"]
    ) -> tuple[TrainState, Measures]:
        """One step of the optimiser, and what it measures. The given state is used up.

        Where the loss or the gradient's norm is not finite, only the step's number changes.

        Every device differentiates the loss of its own rows, and one all-reduce takes the mean.
        (XLA, left to divide the step, would gather the rows of an FFT and reduce tied weights
        apart.) The dropout masks are a function of the seed, the step and the device alone.
        """

        def loss_fn(params, key, tokens):
            model = self.model(params)
            nnx.reseed(model, default=key)
            return jnp.mean(token_losses(model, tokens))

        def mean_loss_and_gradient(params, step, tokens):
            shard = step * self.mesh.size + jax.lax.axis_index("data")
            key = jax.random.fold_in(self.dropout_key, shard)
            loss_and_gradient = accumulated(jax.value_and_grad(loss_fn), self.accumulate)
            return jax.lax.pmean(loss_and_gradient(params, key, tokens), "data")

        loss, gradient = jax.shard_map(
            mean_loss_and_gradient,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=False,  # a scan's carry starts equal on all devices and does not stay so
        )(state.params, state.step, tokens)
        measures = Measures(loss, optax.tree.norm(gradient))
        before = state.params, state.optimizer_state
        after = apply_gradient(self.optimizer, gradient, state.optimizer_state, state.params)
        is_finite = jnp.isfinite(measures.loss) & jnp.isfinite(measures.gradient_norm)
        after = jax.tree.map(partial(jnp.where, is_finite), after, before)
        return TrainState(state.step + 1, *after), measures

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def steps(
        self,
        state: TrainState,
        batches: Int[Array, "n batch window+1"],
        count: Int[ArrayLike, ""],
    ) -> tuple[TrainState, Measures]:
        """A step on each of the first `count` batches, in one call. The given state is used up.

        Also what each step measures, and zeros from `count` on. However a run is cut into calls,
        all its steps are the same program's and end in the same weights.
        """

        def step(i, carry):
            state, measures = carry
            state, measured = self.step(state, batches[i])
            return state, jax.tree.map(
                lambda these, one: these.at[i].set(one.astype(these.dtype)), measures, measured
            )

        zeros = jnp.zeros(len(batches))
        return jax.lax.fori_loop(0, count, step, (state, Measures(zeros, zeros)))

    @partial(jax.jit, static_argnums=0)
    def is_finite(self, state: TrainState) -> Bool[Array, ""]:
        """Are all numbers of the state finite?"""
        return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()

    @partial(jax.jit, static_argnums=0)
    def evaluate(
        self, params: nnx.State, batches: Int[ArrayLike, "n batch window+1"]
    ) -> Float[Array, "n batch window"]:
        """Each token's loss, without dropout."""
        model = nnx.view(self.model(params), deterministic=True, raise_if_not_found=False)
        return jax.lax.map(partial(token_losses, model), batches)
