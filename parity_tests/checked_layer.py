"""A layer of the registry in float64, with its compiled functions, for the checks to look at."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import BidirectionalState, LanguageModel, Reversed, state_batch_axes
from parity_tests.engine.bounds.tolerance import FLOAT64, assert_same, relative_errors
from parity_tests.registry import BATCH, TIME, Case

ALL_STEPS = np.full(BATCH, TIME)
NO_RESET = np.zeros((BATCH, TIME), bool)
LONG = 60
"""The length of rows for which operators that work in chunks need several chunks."""


class CheckedLayer:
    """A case's layer in float64, with inputs, a state, and the layer as jitted functions.

    Compiling takes most of a check's time, so the checks share the programs of a few shapes: whole
    batches of TIME, 4, 3 and 0 steps without masks, and of TIME steps with both masks.

    Args:
        case: the case.
        single_check: whether only one check runs. Its calls with masks then leave out the
            gradients, whose program it would share with no other check.

    """

    def __init__(self, case: Case, *, single_check: bool = False):
        self.case, self._single_check = case, single_check
        self.layer = case.build_layer(case.build_twin())
        self.x = case.inputs()
        self.state = case.state()
        self.is_language_model = isinstance(self.layer, LanguageModel)
        self._call = jax.jit(self.layer.__call__)
        self._graphdef, self.params, self._rest = nnx.split(self.layer, nnx.Param, ...)
        self._masked = jax.jit(self._results_and_gradients)

    @functools.cached_property
    def documents(self) -> tuple[np.ndarray, int]:
        """Rows of up to `LONG` steps, and the length of a document at their start."""
        longest = min(self.case.max_length or LONG, LONG)
        return self.case.inputs(batch=BATCH, time=longest), 2 * longest // 3

    def call(self, x, state):
        """The layer without masks; its results are numpy arrays."""
        return jax.device_get(self._call(x, state))

    def call_with_masks(self, x, lengths=ALL_STEPS, reset=NO_RESET):
        """The outputs and the last state."""
        if not self._single_check:
            return self.results_and_gradients(self.params, self.state, x, lengths, reset)[:2]
        return jax.device_get(self._call(x, self.state, **self._masks(lengths, reset)))

    def results_and_gradients(
        self, params, state, x, lengths=ALL_STEPS, reset=NO_RESET, **starts: np.ndarray
    ):
        """The outputs, the last state, and the gradients with respect to the parameters and x.

        For a language model, whose inputs are tokens, the gradient with respect to x is None.
        """
        masks = self._masks(lengths, reset)
        return jax.device_get(self._masked(params, state, x, **masks, **starts))

    def _masks(self, lengths, reset):
        return {"lengths": lengths, "reset": reset if self.case.resettable else None}

    def _results_and_gradients(self, params, state, x, **masks):
        return self._differentiated(lambda layer, x: layer(x, state, **masks), params, x)

    def read(self, read: Callable[[Any, Any], tuple[Any, Any]], x):
        """The results of `read(layer, x)`, and the gradients as in `results_and_gradients`."""
        return jax.device_get(jax.jit(partial(self._differentiated, read))(self.params, x))

    def _differentiated(self, read, params, x):
        def loss(params, x):
            y, last = read(nnx.merge(self._graphdef, params, self._rest), x)
            floating = (a for a in jax.tree.leaves(last) if jnp.issubdtype(a.dtype, jnp.floating))
            return sum(jnp.sum(jnp.sin(a)) for a in (y, *floating)), (y, last)

        arguments = (0,) if self.is_language_model else (0, 1)
        gradients, (y, last) = jax.grad(loss, arguments, has_aux=True)(params, x)
        return y, last, (*gradients, None)[:2]

    def call_steps(self, start: int, stop: int, state):
        """The results for the steps from `start` to `stop` of all rows."""
        return self.call(self.x[:, start:stop], state)

    def changed_inputs(self, where: np.ndarray) -> np.ndarray:
        """The inputs, changed where `where` (batch, time) is true."""
        if self.is_language_model:
            return np.where(where, (self.x + 1) % self.layer.config.vocab_size, self.x)
        return np.where(where[..., None], self.x + np.linspace(0.5, 1.5, self.x.shape[-1]), self.x)

    def assert_unchanged(self, actual, expected, what: str):
        """Asserts exact equality, or equality up to rounding if an FFT mixes all steps."""
        if self.case.mixes_steps:
            assert_same(actual, expected, what)
        else:
            assert (actual == expected).all(), f"{what}: changed"

    def state_rows(self, indices: Sequence[int], state):
        """Some rows of a batched state."""
        axes = state_batch_axes(self.layer)
        return jax.tree.map(lambda s, axis: np.take(s, indices, axis), state, axes)

    def joined_by_direction(self, forward, backward):
        """A state made of one state's forward parts and another's backward parts."""
        if self.case.causal:
            return forward
        if isinstance(self.layer, Reversed):
            return backward
        if isinstance(forward, BidirectionalState):
            return BidirectionalState(forward.forward, backward.backward)
        is_backward = np.arange(len(forward[0])) % 2 == 1
        return jax.tree.map(
            lambda f, b: np.where(is_backward[:, None, None], b, f), forward, backward
        )


def assert_same_tree(actual, expected, what: str) -> None:
    """Asserts that two trees have the same structure and, up to rounding, the same values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    leaves = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, a), b in leaves:
        assert_same(a, b, f"{what}{jax.tree_util.keystr(path)}")


def assert_same_gradients(actual, expected, what: str) -> None:
    """Asserts that two trees of gradients agree up to rounding, relative to each array.

    A gradient that is zero but for rounding errors, such as that of attention's key bias, is
    compared relative to the largest one.
    """
    found, exact = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (actual, expected)
    )
    for path, error in relative_errors(found, exact, negligible=True).items():
        assert error <= FLOAT64, f"{what}: {path} differs by {error}"
