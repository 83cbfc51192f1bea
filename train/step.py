"""The training step, the evaluation, and where their arrays live."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models import LanguageModel
from jax_models.ops import carry_dtype
from jax_models.options import Index, checked_options
from train.accumulation import accumulated
from train.checks import Seed
from train.mesh import (
    BATCH_AXES,
    DATA,
    MODEL,
    SEQUENCE,
    gathered_axis,
    in_layers,
    only,
    placed,
    places,
)
from train.optimizer import AveragedState, apply_gradient
from train.windows import Windows


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
    model: LanguageModel,
    inputs: Int[Array, "batch window"],
    targets: Int[Array, "batch window"],
    end_of_text: int | None = None,
) -> Float[Array, "batch window"]:
    """−log p of each target, given its document up to it, in nats and at least float32.

    The end of a text is also what the next document begins with: there, the state is zero again.
    """
    logits, _ = model(inputs, reset=None if end_of_text is None else inputs == end_of_text)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(carry_dtype(logits.dtype)), targets
    )


class Trainer:
    """A model and an optimiser as pure functions over a `TrainState`, on a mesh of devices.

    A batch's rows are divided over the axis `data`, their time over `sequence`, wide projections
    over `model`. Parameters and the optimiser's state are whole or, `fully_sharded`, in parts.

    Raises:
        NotImplementedError: the model's time cannot be divided, or its state not be reset.
        ValueError: no layer declares an axis that `model` could divide, or it does not divide one.

    """

    @checked_options
    def __init__(
        self,
        model: LanguageModel,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        fully_sharded: bool = False,
        seed: Seed,
        accumulate: int = 1,
        end_of_text: Index | None = None,
    ):
        self.mesh = mesh
        self.accumulate = accumulate
        self.losses = partial(token_losses, end_of_text=end_of_text)
        self.graphdef, self.initial_params, self.rest = nnx.split(model, nnx.Param, ...)
        self.optimizer = optimizer
        self.dropout_key = jax.random.key(seed)
        self.specs = places(model, mesh, fully_sharded=fully_sharded)
        view = nnx.view(model, batch_axis=DATA, raise_if_not_found=False)
        if (count := mesh.shape[SEQUENCE]) > 1:
            try:
                view = nnx.view(view, time_axis=SEQUENCE, raise_if_not_found=False)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"mesh.sequence: expected 1, got {count}: {error}"
                ) from None
        placed(view, {p.removesuffix(".value"): in_layers(s, mesh) for p, s in self.specs.items()})
        self.local_graphdef, local_params, _ = nnx.split(view, nnx.Param, ...)
        self.local_structure = jax.tree.structure(local_params)
        if end_of_text is not None:
            one = jnp.zeros((1, 1), jnp.int32)
            nnx.eval_shape(lambda model: self.losses(model, one, one), model)

    def initial_state(self) -> TrainState:
        """The state before the first step. The step uses a state up; the model keeps its arrays.

        (From one device to several, `jax.device_put` copies nothing on the first, whatever
        `may_alias` says.)
        """
        params = self.initial_params
        state = TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))
        copied = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=self.shardings(state))
        return copied(state)

    def shardings(self, state: TrainState) -> TrainState:
        """Where each array of a state is: those of the optimiser, where their parameter is."""
        specs = jax.tree.unflatten(jax.tree.structure(state.params), self.specs.values())
        of_optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, spec: spec,
            state.optimizer_state,
            specs,
            transform_non_params=lambda _: P(),
        )
        on_mesh = partial(NamedSharding, self.mesh)
        return TrainState(*jax.tree.map(on_mesh, (P(), specs, of_optimizer)))

    def model(self, params: nnx.State) -> LanguageModel:
        """The model with these parameters, for training."""
        return nnx.merge(self.graphdef, params, self.rest, copy=True)

    def put(self, batch: np.ndarray) -> Int[Array, "*n batch window+1"]:
        """A batch, or several, on the devices: each has the rows that it needs."""
        sharding = self.sharding(batch.ndim)
        return jax.make_array_from_callback(batch.shape, sharding, batch.__getitem__)

    def put_windows(self, windows: Windows, starts: np.ndarray) -> Int[Array, "n batch window+1"]:
        """The windows that begin at these places; each process reads what its devices need."""
        shape = (*starts.shape, windows.window + 1)

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            return windows.at(starts[(index or ())[:-1]])

        return jax.make_array_from_callback(shape, self.sharding(len(shape)), read)

    def whole(self, params: nnx.State) -> nnx.State:
        """The parameters on one device of this process."""
        everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(self.mesh, P()))
        return jax.tree.map(lambda x: x.addressable_data(0), everywhere(params))

    def sharding(self, ndim: int) -> NamedSharding:
        """Where a batch of tokens is, or several: its rows are divided."""
        return NamedSharding(self.mesh, P(*[None] * (ndim - 2), DATA))

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self, state: TrainState, tokens: Int[Array, "batch window+1"]
    ) -> tuple[TrainState, Measures]:
        """One step of the optimiser, and what it measures. The given state is used up.

        Where the loss or the gradient's norm is not finite, only the step's number changes.

        Every device differentiates the loss of its own part of the batch, and one all-reduce takes
        the mean. (XLA, left to divide the step, would gather the rows of an FFT and reduce tied
        weights apart.) The dropout masks are functions of the seed, the step and the place in the
        batch, on any number of devices.
        """

        def loss_fn(params, key, inputs, targets):
            model = self._local_model(params)
            nnx.reseed(model, default=key)
            return jnp.mean(self.losses(model, inputs, targets))

        def mean_loss_and_gradient(params, step, inputs, targets):
            key = jax.random.fold_in(self.dropout_key, step)
            loss_and_gradient = accumulated(jax.value_and_grad(loss_fn))
            loss, gradient = loss_and_gradient(params, key, inputs, targets)
            return self._mean(loss), self._mean_gradient(gradient)

        parts = tokens.reshape(self.accumulate, -1, tokens.shape[1])
        of_batch = P(None, *BATCH_AXES)
        loss, gradient = jax.shard_map(
            mean_loss_and_gradient,
            in_specs=(self._local_specs(), P(), of_batch, of_batch),
            out_specs=(P(), self._local_specs()),
            **self._mapping(),
        )(state.params, state.step, parts[..., :-1], parts[..., 1:])
        gradient = jax.lax.with_sharding_constraint(gradient, self.shardings(state).params)
        measures = Measures(loss, optax.tree.norm(gradient))
        before = state.params, state.optimizer_state
        after = apply_gradient(self.optimizer, gradient, state.optimizer_state, state.params)
        is_finite = jnp.isfinite(measures.loss) & jnp.isfinite(measures.gradient_norm)
        after = jax.tree.map(partial(jnp.where, is_finite), after, before)
        state = TrainState(state.step + 1, *after)
        return jax.lax.with_sharding_constraint(state, self.shardings(state)), measures

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

        def losses(params, inputs, targets):
            model = self._local_model(params)
            model = nnx.view(model, deterministic=True, raise_if_not_found=False)
            return jax.lax.map(lambda batch: self.losses(model, *batch), (inputs, targets))

        batches = jnp.asarray(batches)
        return jax.shard_map(
            losses,
            in_specs=(self._local_specs(), P(None, *BATCH_AXES), P(None, *BATCH_AXES)),
            out_specs=P(None, *BATCH_AXES),
            **self._mapping(),
        )(params, batches[..., :-1], batches[..., 1:])

    def _mapping(self) -> dict[str, Any]:
        """Inside, a device sees its part of the batch. XLA divides what `model` divides."""
        axes = {*self.mesh.axis_names} if self.mesh.shape[MODEL] == 1 else {*BATCH_AXES}
        # check_vma: a scan's carry starts equal on all devices and does not stay so
        return {"mesh": self.mesh, "axis_names": axes, "check_vma": False}

    def _local_model(self, params: nnx.State) -> LanguageModel:
        """The model of one device, which has parts of some parameters and gathers them."""
        local = jax.tree.unflatten(self.local_structure, jax.tree.leaves(params))
        return nnx.merge(self.local_graphdef, local, self.rest, copy=True)

    def _local_specs(self) -> nnx.State:
        """Where the parameters are inside, on the axes over which a batch is divided."""
        specs = (only(in_layers(spec, self.mesh), BATCH_AXES) for spec in self.specs.values())
        return jax.tree.unflatten(jax.tree.structure(self.initial_params), specs)

    def _mean_gradient(self, gradient: nnx.State) -> nnx.State:
        """Over the devices of a batch. That of a gathered parameter is their sum already."""
        count = jax.lax.axis_size(BATCH_AXES)

        def mean(spec, gradient):
            is_sum = gathered_axis(spec) is not None
            return gradient / count if is_sum else self._mean(gradient)

        return jax.tree.map(mean, self._local_specs(), gradient)

    def _mean(self, x: Array) -> Array:
        """Over the devices of a batch, if they are several.

        XLA refuses an all-reduce of one device where it divides the model.
        """
        return jax.lax.pmean(x, [axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1])
