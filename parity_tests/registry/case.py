"""What a row of the registry says."""

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
from jax_models import LanguageModel, SequenceLayer, WKVState, from_torch, to_torch
from jax_models.layers.hyena import HyenaOperator
from jax_models.weights.transfer import weight_table
from parity_tests.engine.problem import DTYPES, PLATFORMS, Problem, in_every_dtype

BATCH, TIME = 3, 7

TorchState = tuple[Tensor, ...]
"""The leaves of the JAX layer's state, in its order, as tensors."""


def moderate_decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """An `a` well inside (0, 1), exact in bfloat16."""
    return in_every_dtype(rng.uniform(0.2, 0.9, shape))


def slow_decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """An `a` within 2⁻¹⁰ to 2⁻²³ of 1, exact in float32."""
    return 1 - 2.0 ** -rng.integers(10, 24, shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """A torch twin, its JAX layer, and how the one is called like the other.

    `call(twin, x, state, lengths) -> (y, state)` takes and returns what the JAX layer does: x and y
    batch-major, the state's leaves with the layer's shapes. A state of None is the twin's own zero.
    """

    name: str
    twin: Callable[[], nn.Module]
    layer: Callable[..., Any]
    layout: str
    call: Callable[..., tuple[Tensor, TorchState]]
    packs: bool = False
    """Does the twin take `lengths`?"""
    decays: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = moderate_decays
    """Draws the `a` of every RG-LRU in the twin."""
    dtypes: tuple[str, ...] = DTYPES
    """Those that the comparison with the twin runs in."""
    platforms: tuple[str, ...] = PLATFORMS
    """Those that the JAX layer runs on."""
    reach: int | None = None
    """Steps that an output sees, its own among them. None: all before it."""
    prefix: int = 0
    """Steps that make the JAX layer's states, of rows that end apart, where not any state will do
    and the twin has none. 0: states are random."""

    def build_twin(self, seed: int = 0) -> nn.Module:
        """The twin in float64, every weight and bias random and exact in bfloat16."""
        rng = np.random.default_rng(seed)
        twin = self.twin().double()
        with torch.no_grad():
            for parameter in twin.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
                draw = scale * rng.standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(in_every_dtype(draw)))
            for a in rg_lru_decays(twin):
                a.copy_(torch.from_numpy(self.decays(rng, tuple(a.shape))))
        return twin

    def build_layer(self, twin: nn.Module, dtype=jnp.float64):
        """The JAX layer in `dtype` with the twin's weights."""
        torch_dtype = getattr(torch, jnp.dtype(dtype).name)
        weights = {key: value.to(torch_dtype) for key, value in twin.state_dict().items()}
        return from_torch(self.abstract(dtype), weights, self.layout)

    def inputs(self, seed: int = 1, batch: int = BATCH, time: int = TIME) -> np.ndarray:
        """Random inputs: features exact in bfloat16, or tokens."""
        rng = np.random.default_rng(seed)
        layer = self.abstract()
        if isinstance(layer, LanguageModel):
            return rng.integers(0, layer.config.vocab_size, (batch, time))
        return in_every_dtype(rng.standard_normal((batch, time, layer.in_features)))

    def state(self, seed: int = 2, batch: int = BATCH):
        """A state: after `prefix` steps, or random, exact in bfloat16, at position 0."""
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
        return jax.tree.map(
            lambda s: s._replace(den=np.abs(s.den) + 1) if isinstance(s, WKVState) else s,
            state,
            is_leaf=lambda s: isinstance(s, WKVState),
        )

    def problem(self, *, given_state: bool = True, lengths=None, seed: int = 0) -> Problem:
        """The standard problem: random weights, inputs and (if given) initial state.

        Language models' twins take no state.
        """
        twin, x = self.build_twin(seed), self.inputs(seed + 1)
        inputs: tuple[Any, ...] = (x,)
        if given_state and not self.prefix and np.issubdtype(x.dtype, np.floating):
            inputs = (x, self.state(seed + 2))
        structure = jax.tree.structure(self.state(seed + 2))

        def call_twin(twin, x, state=None):
            leaves = None if state is None else tuple(jax.tree.leaves(state))
            y, last = self.call(twin, x, leaves, None if lengths is None else torch.tensor(lengths))
            return (y, jax.tree.unflatten(structure, last)) if last else y

        with torch.no_grad():
            has_state = isinstance(call_twin(twin, torch.tensor(x)), tuple)

        def call(layer, x, state=None):
            y, last = layer(x, state, lengths=lengths)
            return (y, last) if has_state else y

        _, table = weight_table(self.abstract(), self.layout)
        return Problem(
            twin=twin,
            call_twin=call_twin,
            build=lambda twin, dtype: self.build_layer(twin, jnp.dtype(dtype)),
            call=call,
            to_torch=functools.partial(to_torch, layout=table),
            table=table,
            inputs=inputs,
            dtypes=self.dtypes,
            seed=seed + 3,
        )

    def abstract(self, dtype=jnp.float64):
        """The JAX layer without its weights, a new one at each call."""
        return nnx.merge(*_abstract(self, jnp.dtype(dtype)), copy=True)

    @property
    def architecture(self) -> str:
        """The file of `jax_models` that the JAX layer is in."""
        return type(self.abstract()).__module__.rpartition(".")[2]

    @property
    def max_length(self) -> int | None:
        """Steps that the JAX layer can take; None: any number."""
        layer = self.abstract()
        if isinstance(layer, LanguageModel):
            return layer.config.context_length
        return getattr(layer, "max_length", None)

    @property
    def causal(self) -> bool:
        """Does the JAX layer have a `step`?"""
        return self._sequence_layer.causal

    @property
    def resettable(self) -> bool:
        """Does the JAX layer take `reset`?"""
        return self._sequence_layer.resettable

    @property
    def has_fft(self) -> bool:
        """Does the JAX layer mix all steps, by rounding errors at least?"""
        return any(isinstance(m, HyenaOperator) for _, m in nnx.iter_graph(self.abstract()))

    @property
    def _sequence_layer(self) -> SequenceLayer:
        layer = self.abstract()
        return layer.layers if isinstance(layer, LanguageModel) else layer


@functools.cache
def _abstract(case: Case, dtype):
    return nnx.split(
        nnx.eval_shape(lambda: case.layer(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    )


def rg_lru_decays(twin: nn.Module) -> list[Tensor]:
    """The `a` of every RG-LRU in the twin, to be written to."""
    return [m.a.detach() for m in twin.modules() if isinstance(m, torch_ref.RGLRU)]


def call_alone(twin, x, state, lengths=None):
    """Classes that neither take nor return a state."""
    return twin(x), ()
