"""The training step and the evaluation, on a mesh of devices."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models import LanguageModel
from jax_models.ops import carry_dtype
from jax_models.options import Index, checked_options
from train.checks import Seed, Texts
from train.data.windows import Windows
from train.trainer.accumulation import accumulate_gradients
from train.trainer.freeze import trainable
from train.trainer.initialization import compute_outputs
from train.trainer.mesh import (
    BATCH_AXES,
    DATA,
    MODEL,
    SEQUENCE,
    gathered_axis,
    keep_axes,
    layer_spec,
    param_specs,
    shard_params,
)
from train.trainer.optimizer import AveragedState, apply_gradient


class TrainState(NamedTuple):
    """The arrays that a step changes and a checkpoint stores."""

    step: Int[Array, ""]
    params: nnx.State
    optimizer_state: Any

    @property
    def averaged_params(self) -> nnx.State:
        """The parameters to evaluate and export: their average, if there is one."""
        state = self.optimizer_state
        if not isinstance(state, AveragedState):
            return self.params
        return nnx.merge_state(self.params, state.params)  # frozen parameters have no average


class Measures(NamedTuple):
    """The measures of a step, or of several. A step is applied only if both are finite."""

    loss: Float[Array, "*n"]
    """Before the step, in nats per token, with the other losses of the model added."""
    gradient_norm: Float[Array, "*n"]
    """Before clipping."""
    other_losses: dict[str, Float[Array, "*n"]]
    """`model.losses`: each of the losses that are added."""


def token_losses(
    model: LanguageModel,
    inputs: Int[Array, "batch window"],
    targets: Int[Array, "batch window"],
    end_of_text: int | None = None,
) -> Float[Array, "batch window"]:
    """−log p of each target, given the preceding tokens of its document, in nats.

    The state is reset to zero at the token that ends a text, because the next document begins with
    it. The dtype is at least float32.
    """
    logits, _ = model(inputs, reset=None if end_of_text is None else inputs == end_of_text)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(carry_dtype(logits.dtype)), targets
    )


class Trainer:
    """A model and an optimizer as pure functions over a `TrainState`, on a mesh of devices.

    The mesh axis `data` divides the rows of a batch, `sequence` their time, and `model` the wide
    projections. With `fully_sharded`, the devices also divide the parameters and the optimizer's
    state. The parameters whose paths match one of the regular expressions `freeze` keep their
    values, and have neither gradients nor a state of the optimizer. If the model has other
    `losses`, such as one that balances its experts, a step adds them to that of the tokens, but an
    evaluation does not.

    Raises:
        NotImplementedError: the model cannot divide its time axis, or cannot reset its state.
        ValueError: a pattern of `freeze` matches no parameter, or all parameters are frozen; no
            layer declares an axis for `model` to divide, or `model` does not divide one evenly.

    """

    graphdef: nnx.GraphDef[LanguageModel]

    @checked_options
    def __init__(
        self,
        build: Callable[[], LanguageModel],
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        fully_sharded: bool = False,
        seed: Seed,
        accumulate: int = 1,
        end_of_text: Index | None = None,
        freeze: Texts = (),
    ):
        self.mesh = mesh
        self.accumulate = accumulate
        self.losses = partial(token_losses, end_of_text=end_of_text)
        self.optimizer = optimizer
        self.dropout_key = jax.random.key(seed)

        # The parameters stay abstract until `initial_state`. The other variables, such as the keys
        # of dropout, get their values at once.
        def variables() -> list[nnx.State]:
            self.graphdef, *states = nnx.split(build(), nnx.Param, ...)
            return states

        self.initialization, (params, rest) = jax.make_jaxpr(variables, return_shape=True)()
        others = range(len(jax.tree.leaves(params)), len(self.initialization.out_avals))
        values = compute_outputs(self.initialization, dict.fromkeys(others))
        self.rest = jax.tree.unflatten(jax.tree.structure(rest), values)
        model = nnx.merge(self.graphdef, params, self.rest, copy=True)
        self.names_of_losses = [*nnx.eval_shape(lambda model: model.losses, model)]
        self.trainable = trainable(params, freeze)
        self.specs = param_specs(model, mesh, fully_sharded=fully_sharded)
        specs = jax.tree.unflatten(jax.tree.structure(params), self.specs.values())
        shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
        self.abstract_params = jax.tree.map(_abstract, params, shardings)
        # Inside `shard_map`, the layers see one device's part of a batch and of the parameters.
        view = nnx.view(model, batch_axis=DATA, raise_if_not_found=False)
        if mesh.shape[MODEL] > 1:
            view = nnx.view(view, experts_axis=MODEL, raise_if_not_found=False)
        if (count := mesh.shape[SEQUENCE]) > 1:
            try:
                view = nnx.view(view, time_axis=SEQUENCE, raise_if_not_found=False)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"mesh.sequence: expected 1, got {count}: {error}"
                ) from None
        shard_params(
            view, {p.removesuffix(".value"): layer_spec(s, mesh) for p, s in self.specs.items()}
        )
        self.local_graphdef, local_params, _ = nnx.split(view, nnx.Param, ...)
        self.local_structure = jax.tree.structure(local_params)
        # Raise an error now, not in the first step, if the model cannot reset its state.
        if end_of_text is not None:
            one = jnp.zeros((1, 1), jnp.int32)
            nnx.eval_shape(lambda model: self.losses(model, one, one), model)

    @property
    def abstract_state(self) -> TrainState:
        """The shape, dtype and sharding of each array of a state."""
        state = jax.eval_shape(self._state, self.abstract_params)
        return jax.tree.map(_abstract, state, self.shardings(state))

    def initial_state(self, params: nnx.State | None = None) -> TrainState:
        """The state before the first step. `params` are donated. None: random parameters.

        Each array is made in its sharding, so that a large model need not fit on one device.
        """
        donated = () if params is None else (0,)
        if params is None:
            leaves, structure = jax.tree.flatten(self.abstract_params)
            shardings = dict(enumerate(leaf.sharding for leaf in leaves))
            arrays = compute_outputs(self.initialization, shardings)
            params = jax.tree.unflatten(structure, arrays)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        return jax.jit(self._state, out_shardings=shardings, donate_argnums=donated)(params)

    def _state(self, params: nnx.State) -> TrainState:
        """Copies each array, because a step donates its state. No two may share memory."""
        trained, _ = self.trainable.split(params)
        state = TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(trained))
        return jax.tree.map(jnp.copy, state)

    def shardings(self, state: TrainState) -> TrainState:
        """The sharding of each array of a state. The optimizer's arrays follow their parameters."""
        specs = jax.tree.unflatten(jax.tree.structure(state.params), self.specs.values())
        optimizer_specs = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, spec: spec,
            state.optimizer_state,
            self.trainable.split(specs)[0],
            transform_non_params=lambda _: P(),
        )
        on_mesh = partial(NamedSharding, self.mesh)
        return TrainState(*jax.tree.map(on_mesh, (P(), specs, optimizer_specs)))

    def model(self, params: nnx.State) -> LanguageModel:
        """The model with these parameters, for training."""
        return nnx.merge(self.graphdef, params, self.rest, copy=True)

    def put(self, batch: np.ndarray) -> Int[Array, "*n batch window+1"]:
        """Puts a batch, or several, on the devices. Each device gets its rows."""
        sharding = self.sharding(batch.ndim)
        return jax.make_array_from_callback(batch.shape, sharding, batch.__getitem__)

    def put_windows(self, windows: Windows, starts: np.ndarray) -> Int[Array, "n batch window+1"]:
        """Puts windows on the devices. Each process reads the windows of its own devices."""
        shape = (*starts.shape, windows.window + 1)

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            return windows.at(starts[(index or ())[:-1]])

        return jax.make_array_from_callback(shape, self.sharding(len(shape)), read)

    def addressable(self, params: nnx.State) -> nnx.State:
        """The parameters as arrays that this process can read.

        They keep their shardings if all devices belong to this process. Otherwise, they are whole
        on one of its devices.
        """
        if jax.process_count() == 1:
            return params
        everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(self.mesh, P()))
        return jax.tree.map(lambda x: x.addressable_data(0), everywhere(params))

    def sharding(self, ndim: int) -> NamedSharding:
        """The sharding of a batch of tokens, or of several: the rows are divided."""
        return NamedSharding(self.mesh, P(*[None] * (ndim - 2), DATA))

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self, state: TrainState, tokens: Int[Array, "batch window+1"]
    ) -> tuple[TrainState, Measures]:
        """Does one step of the optimizer, and returns its measures. The given state is donated.

        If the loss or the gradient norm is not finite, only the number of the step changes.

        Each device differentiates the loss of its part of the batch, and one all-reduce computes
        the mean. (If XLA divided the step, it would gather the rows of an FFT and reduce tied
        weights separately.) The dropout masks depend on the seed, the step and the place in the
        batch, but not on the number of devices.
        """

        def loss_fn(trained, frozen, key, inputs, targets):
            model = self._local_model(self.trainable.join(trained, frozen))
            nnx.reseed(model, default=key)
            loss = jnp.mean(self.losses(model, inputs, targets))
            return loss + sum(model.losses.values()), model.losses

        def mean_losses_and_gradient(trained, frozen, step, inputs, targets):
            key = jax.random.fold_in(self.dropout_key, step)
            losses_and_gradient = jax.value_and_grad(loss_fn, has_aux=True)
            losses, gradient = accumulate_gradients(
                lambda trained, *batch: losses_and_gradient(trained, frozen, *batch)
            )(trained, key, inputs, targets)
            return jax.tree.map(self._mean, losses), self._mean_gradient(gradient)

        # Each device computes on its part of the batch.
        trained, frozen = self.trainable.split(state.params)
        trained_specs, frozen_specs = self.trainable.split(self._local_specs())
        parts = tokens.reshape(self.accumulate, -1, tokens.shape[1])
        batch_spec = P(None, *BATCH_AXES)
        (loss, other_losses), gradient = jax.shard_map(
            mean_losses_and_gradient,
            in_specs=(trained_specs, frozen_specs, P(), batch_spec, batch_spec),
            out_specs=(P(), trained_specs),
            **self._shard_map_options(),
        )(trained, frozen, state.step, parts[..., :-1], parts[..., 1:])
        # Update the parameters where they are stored, unless a number is not finite.
        shardings, _ = self.trainable.split(self.shardings(state).params)
        gradient = jax.lax.with_sharding_constraint(gradient, shardings)
        measures = Measures(loss, optax.tree.norm(gradient), other_losses)
        before = trained, state.optimizer_state
        after = apply_gradient(self.optimizer, gradient, state.optimizer_state, trained)
        is_finite = jnp.isfinite(measures.loss) & jnp.isfinite(measures.gradient_norm)
        trained, optimizer_state = jax.tree.map(partial(jnp.where, is_finite), after, before)
        params = self.trainable.join(trained, frozen)
        state = TrainState(state.step + 1, params, optimizer_state)
        return jax.lax.with_sharding_constraint(state, self.shardings(state)), measures

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def steps(
        self,
        state: TrainState,
        batches: Int[Array, "n batch window+1"],
        count: Int[ArrayLike, ""],
    ) -> tuple[TrainState, Measures]:
        """Does a step on each of the first `count` batches. The given state is donated.

        The measures are zero from `count` on. All steps run in the same program, so a run ends with
        the same weights, however its steps are divided into calls.
        """

        def step(i, carry):
            state, measures = carry
            state, measured = self.step(state, batches[i])
            return state, jax.tree.map(
                lambda these, one: these.at[i].set(one.astype(these.dtype)), measures, measured
            )

        zeros = jnp.zeros(len(batches))
        measures = Measures(zeros, zeros, dict.fromkeys(self.names_of_losses, zeros))
        return jax.lax.fori_loop(0, count, step, (state, measures))

    @partial(jax.jit, static_argnums=0)
    def is_finite(self, state: TrainState) -> Bool[Array, ""]:
        """Whether all numbers of the state are finite."""
        return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()

    @partial(jax.jit, static_argnums=0)
    def evaluate(
        self, params: nnx.State, batches: Int[ArrayLike, "n batch window+1"]
    ) -> Float[Array, "n batch window"]:
        """The loss of each token, without dropout."""

        def losses(params, inputs, targets):
            model = self._local_model(params)
            model = nnx.view(model, deterministic=True, raise_if_not_found=False)
            return jax.lax.map(lambda batch: self.losses(model, *batch), (inputs, targets))

        batches = jnp.asarray(batches)
        return jax.shard_map(
            losses,
            in_specs=(self._local_specs(), P(None, *BATCH_AXES), P(None, *BATCH_AXES)),
            out_specs=P(None, *BATCH_AXES),
            **self._shard_map_options(),
        )(params, batches[..., :-1], batches[..., 1:])

    def _shard_map_options(self) -> dict[str, Any]:
        """The options of `shard_map`: the batch axes are manual, and XLA handles `model`."""
        axes = {*self.mesh.axis_names} if self.mesh.shape[MODEL] == 1 else {*BATCH_AXES}
        # check_vma=False: the carry of a scan starts equal on all devices but does not stay equal
        return {"mesh": self.mesh, "axis_names": axes, "check_vma": False}

    def _local_model(self, params: nnx.State) -> LanguageModel:
        """The model on one device, which gathers a divided parameter when a layer reads it."""
        local = jax.tree.unflatten(self.local_structure, jax.tree.leaves(params))
        return nnx.merge(self.local_graphdef, local, self.rest, copy=True)

    def _local_specs(self) -> nnx.State:
        """The shardings of the parameters over the batch axes, inside the `shard_map`."""
        specs = (keep_axes(layer_spec(spec, self.mesh), BATCH_AXES) for spec in self.specs.values())
        return jax.tree.unflatten(jax.tree.structure(self.abstract_params), specs)

    def _mean_gradient(self, gradient: nnx.State) -> nnx.State:
        """The mean over the devices. The gradient of a gathered parameter is already a sum."""
        count = jax.lax.axis_size(BATCH_AXES)

        def mean(spec, gradient):
            is_sum = gathered_axis(spec) is not None
            return gradient / count if is_sum else self._mean(gradient)

        return jax.tree.map(mean, self.trainable.split(self._local_specs())[0], gradient)

    def _mean(self, x: Array) -> Array:
        """The mean over the devices of the batch axes.

        Axes of size 1 are left out, because XLA rejects an all-reduce over a single device if
        `model` divides parameters.
        """
        return jax.lax.pmean(x, [axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1])


def _abstract(like: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """An abstract array in a sharding."""
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
