"""A case: a torch twin, its JAX layer, and the facts about them that the checks need."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import Tensor, nn

import torch_ref
from jax_models import LanguageModel, LanguageModelConfig, SequenceLayer, from_torch, to_torch
from jax_models.weights.layouts import weight_table
from parity_tests.engine.candidates.model_weights import merge, split
from parity_tests.engine.problem import (
    DTYPES,
    PLATFORMS,
    Arrays,
    Problem,
    all_in_dtype,
    in_every_dtype,
    state_dict_arrays,
)
from torch_ref.layers.torch_nn import run_recurrence

BATCH, TIME = 3, 7

TorchState = tuple[Tensor, ...]
"""The leaves of the JAX layer's state, in its order, as tensors."""


def inside(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers well inside (0, 1), exact in bfloat16."""
    return in_every_dtype(rng.uniform(0.2, 0.9, shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """A torch twin, its JAX layer, and the facts about them that the checks need."""

    name: str
    twin: Callable[[], nn.Module]
    """Makes the twin."""
    layer: Callable[..., Any]
    """Makes the JAX layer from `dtype`, `param_dtype` and `rngs`."""
    layout: str
    """The name of the layer's layout that has the twin's keys."""
    architecture: str
    """The heading of the case in the report."""
    call: Callable[..., tuple[Tensor, TorchState]] = run_recurrence
    """`call(twin, x, state=None) -> (y, state)`; it also takes `lengths` if the twin `packs`."""
    twin_state: bool = True
    """Whether the twin's state has the same leaves as the JAX layer's."""
    packs: bool = False
    """Whether `call` takes `lengths`, for which it packs the rows."""
    bounded: Callable[[nn.Module], list[Tensor]] = lambda twin: []
    """Returns the twin's tensors that must stay in [0, 1], so that their values can be set."""
    draw_bounded: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = inside
    """Draws values for these tensors."""
    valid_state: Callable[[Any], Any] = lambda state: state
    """Changes a state of random numbers into one that the layer can reach."""
    dtypes: tuple[str, ...] = DTYPES
    """The dtypes of the comparison with the twin."""
    platforms: tuple[str, ...] = PLATFORMS
    """The platforms that the JAX layer runs on."""
    reach: int | None = None
    """How many steps an output depends on, including its own; None means all earlier ones, too."""
    prefix: int = 0
    """The number of steps that the JAX layer runs to compute an initial state, for layers whose
    states cannot be arbitrary numbers. Its rows then have different lengths. 0 means that states
    are random."""
    mixes_steps: bool = False
    """Whether the rounding errors of a step reach all other steps, as in an FFT."""

    def build_twin(self, seed: int = 0) -> nn.Module:
        """The twin in float64, in evaluation mode, with random weights, biases and buffers.

        The numbers are exact in bfloat16. Integers, and buffers that are not in the `state_dict`,
        are those that the twin makes, which are the same each time.
        """
        rng = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            twin = self.twin().double().eval()
        convolved = {id(m.weight) for m in twin.modules() if isinstance(m, nn.Conv1d)}
        variances = {id(getattr(m, "running_var", None)) for m in twin.modules()}
        with torch.no_grad():
            for tensor in self.drawn(twin):
                shape = tuple(tensor.shape)
                terms = tensor[0].numel() if id(tensor) in convolved else [1, *shape][-1]
                scale = terms**-0.5 if tensor.ndim > 1 else 0.5
                draw = scale * rng.standard_normal(shape)
                draw = inside(rng, shape) if id(tensor) in variances else in_every_dtype(draw)
                tensor.copy_(torch.as_tensor(draw))  # the draw for a scalar is no array
            for tensor in self.bounded(twin):
                draw = self.draw_bounded(rng, tuple(tensor.shape))
                tensor.copy_(torch.from_numpy(draw))
        return twin

    @staticmethod
    def drawn(twin: nn.Module) -> list[Tensor]:
        """The tensors of a twin that are drawn: its parameters and its floating buffers.

        Buffers that are not in the `state_dict` are left alone.
        """
        buffers = (
            tensor
            for tensor in twin.state_dict(keep_vars=True).values()
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        )
        return [*twin.parameters(), *{id(buffer): buffer for buffer in buffers}.values()]

    def build_layer(self, twin: nn.Module, dtype=jnp.float64):
        """The JAX layer in `dtype` with the twin's weights."""
        return self.load(state_dict_arrays(twin.state_dict()), jnp.dtype(dtype).name)

    def load(self, state_dict: Arrays, dtype: str):
        """The JAX layer in `dtype` with these weights."""
        weights = all_in_dtype(state_dict, dtype)
        layer = from_torch(self.abstract(jnp.dtype(dtype)), weights, self.layout)
        for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Not(nnx.RngState))):
            if isinstance(variable.get_value(), jax.ShapeDtypeStruct):
                raise ValueError(
                    f"case {self.name}: no weight of the twin gives {'.'.join(map(str, path))}, a "
                    f"{type(variable).__name__}: make it a jax_models.Constant with a row in "
                    "torch_layouts, and a buffer of the twin"
                )
        return layer

    def inputs(self, seed: int = 1, batch: int = BATCH, time: int = TIME) -> np.ndarray:
        """Random inputs: features exact in bfloat16, or tokens."""
        rng = np.random.default_rng(seed)
        layer = self.abstract()
        if isinstance(layer, LanguageModel):
            return rng.integers(0, layer.config.vocab_size, (batch, time))
        return in_every_dtype(rng.standard_normal((batch, time, layer.in_features)))

    def state(self, seed: int = 2, batch: int = BATCH):
        """An initial state: the one after `prefix` steps, or random numbers, exact in bfloat16.

        A random state is at position 0.
        """
        if self.prefix:
            x = self.inputs(seed, batch, self.prefix)
            lengths = np.maximum(self.prefix - 3 * np.arange(batch), 1)
            layer = self.build_layer(self.build_twin())
            return jax.device_get(jax.jit(layer.__call__)(x, lengths=lengths)[1])
        rng = np.random.default_rng(seed)
        shapes = jax.eval_shape(lambda: self.abstract().init_state(batch))
        state = jax.tree.map(
            lambda s: (
                in_every_dtype(0.5 * rng.standard_normal(s.shape))
                if jnp.issubdtype(s.dtype, jnp.floating)
                else np.zeros(s.shape, s.dtype)
            ),
            shapes,
        )
        return self.valid_state(state)

    def problem(self, *, given_state: bool = True, lengths=None, seed: int = 0) -> Problem:
        """The standard problem: random weights, inputs and (if given) initial state."""
        twin, inputs = self.build_twin(seed), (self.inputs(seed + 1),)
        if given_state and self.twin_state:
            inputs += (self.state(seed + 2),)
        structure = jax.tree.structure(jax.eval_shape(lambda: self.abstract().init_state(BATCH)))
        masks = {} if lengths is None else {"lengths": torch.tensor(lengths)}

        def call_twin(twin, x, state=None):
            leaves = None if state is None else tuple(jax.tree.leaves(state))
            y, last = self.call(twin, x, leaves, **masks)
            return (y, jax.tree.unflatten(structure, last)) if self.twin_state else y

        def call(layer, x, state=None):
            y, last = layer(x, state, lengths=lengths)
            return (y, last) if self.twin_state else y

        _, table = weight_table(self.abstract(), self.layout)
        return Problem(
            twin=twin,
            call_twin=call_twin,
            build=lambda state_dict, dtype: split(self.load(state_dict, dtype)),
            load=merge,
            call=call,
            to_torch=lambda gradient, rest: to_torch(merge(gradient, rest), table),
            table=table,
            inputs=inputs,
            dtypes=self.dtypes,
            seed=seed + 3,
        )

    def abstract(self, dtype=jnp.float64):
        """The JAX layer with shapes in place of its weights; each call returns a new one."""
        return nnx.merge(*_abstract(self, jnp.dtype(dtype)), copy=True)

    @property
    def config(self) -> LanguageModelConfig | None:
        """The config of a language model; None for any other layer."""
        config = getattr(self.layer, "__self__", None)
        return config if isinstance(config, LanguageModelConfig) else None

    @property
    def max_length(self) -> int | None:
        """The largest number of steps that the JAX layer can take; None means any number."""
        layer = self.abstract()
        if isinstance(layer, LanguageModel):
            return layer.context_length or getattr(layer.config, "max_length", None)
        return getattr(layer, "max_length", None)

    @property
    def causal(self) -> bool:
        """True if no output depends on later steps, so that the JAX layer has a `step`."""
        return self._sequence_layer.causal

    @property
    def resettable(self) -> bool:
        """True if the JAX layer takes `reset`."""
        return self._sequence_layer.resettable

    @property
    def takes_starts(self) -> bool:
        """True if the JAX layer takes `starts`."""
        return isinstance(self.abstract(), SequenceLayer | LanguageModel)

    @property
    def _sequence_layer(self) -> SequenceLayer:
        layer = self.abstract()
        return layer.stack if isinstance(layer, LanguageModel) else layer


def paired(
    name: str, layer: Callable[..., Any], twin: Callable[[], nn.Module] | None = None, **fields: Any
) -> Case:
    """A case whose twin, unless given, has the same class name and arguments as its layer.

    The layer is a `partial` of its class, or the method `build` of a language model's config.
    """
    made: Any = layer
    if twin is None and isinstance(layer, functools.partial):
        kind = getattr(torch_ref, made.func.__name__)
        twin = functools.partial(kind, *made.args, **made.keywords)
    elif twin is None:
        config = made.__self__
        kind = getattr(torch_ref, type(config).__name__.removesuffix("Config"))
        twin = functools.partial(kind.from_config, config)
    return Case(name, twin, layer, **fields)


@functools.cache
def _abstract(case: Case, dtype):
    def make():
        layer = case.layer(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        statistics = nnx.state(layer, nnx.BatchStat)  # Flax makes them in float32
        nnx.update(layer, jax.tree.map(lambda array: array.astype(dtype), statistics))
        return layer

    return nnx.split(nnx.eval_shape(make))
