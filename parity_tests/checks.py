"""What must hold of every layer, beside agreeing with its twin. All of it in float64."""

import functools
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from jax.flatten_util import ravel_pytree

from jax_models import (
    BidirectionalState,
    LanguageModel,
    Reversed,
    from_torch,
    project,
    state_batch_axes,
    to_torch,
)
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.references.torch_reference import measure_twin
from parity_tests.registry import BATCH, CASES, TIME, Case, Mutation

CHECKS: dict[str, Callable[["Subject"], None]] = {}
LENGTHS = np.array([TIME, 3, 0])
PADDING = np.arange(TIME)[None, :] >= LENGTHS[:, None]
ALL_STEPS = np.full(BATCH, TIME)
NO_RESET = np.zeros((BATCH, TIME), bool)
LONG = 60


def check(function: Callable[["Subject"], None]) -> Callable[["Subject"], None]:
    """Make a function on a `Subject` one of the checks."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


class Subject:
    """A case's layer in float64, with inputs, a state, and the layer as jitted functions.

    Compiling takes most of a check's time. So the checks share the programs of a few shapes: whole
    batches of TIME, 4, 3 and 0 steps without masks, and of TIME steps with both.
    """

    def __init__(self, case: Case):
        self.case = case
        self.layer = case.build_layer(case.build_twin())
        self.x = case.inputs()
        self.state = case.state()
        self._call = jax.jit(self.layer.__call__)
        self._graphdef, self.params, self._rest = nnx.split(self.layer, nnx.Param, ...)
        self._masked = jax.jit(self._results_and_gradients)

    @functools.cached_property
    def documents(self) -> tuple[np.ndarray, int]:
        """Rows so long that operators which work by chunks need several, and a document's end."""
        longest = min(self.case.max_length or LONG, LONG)
        return self.case.inputs(batch=BATCH, time=longest), 2 * longest // 3

    def call(self, x, state):
        """The layer without masks; its results are numpy arrays."""
        return jax.device_get(self._call(x, state))

    def masked(self, x, lengths=ALL_STEPS, reset=NO_RESET):
        """The outputs, the last state, and the gradient of a loss over both for x (floating)."""
        y, last, (_, gradient) = self.results_and_gradients(
            self.params, self.state, x, lengths, reset
        )
        return y, last, gradient

    def results_and_gradients(self, params, state, x, lengths=ALL_STEPS, reset=NO_RESET):
        """The outputs, the last state, and the gradients for the parameters and x (floating)."""
        reset = reset if self.case.resettable else None
        return jax.device_get(self._masked(params, state, x, lengths, reset))

    def _results_and_gradients(self, params, state, x, lengths, reset):
        def loss(params, x):
            layer = nnx.merge(self._graphdef, params, self._rest)
            y, last = layer(x, state, lengths=lengths, reset=reset)
            floating = (a for a in jax.tree.leaves(last) if jnp.issubdtype(a.dtype, jnp.floating))
            return sum(jnp.sum(jnp.sin(a)) for a in (y, *floating)), (y, last)

        arguments = (0,) if isinstance(self.layer, LanguageModel) else (0, 1)
        gradients, (y, last) = jax.grad(loss, arguments, has_aux=True)(params, x)
        return y, last, (*gradients, None)[:2]

    def part(self, start: int, stop: int, state):
        """The steps from `start` to `stop` of all rows, each from its row of the state."""
        return self.call(self.x[:, start:stop], state)

    def disturbed(self, where: np.ndarray) -> np.ndarray:
        """The inputs, others `where` (batch, time) is true."""
        if isinstance(self.layer, LanguageModel):
            return np.where(where, (self.x + 1) % self.layer.config.vocab_size, self.x)
        return np.where(where[..., None], self.x + np.linspace(0.5, 1.5, self.x.shape[-1]), self.x)

    def assert_unchanged(self, actual, expected, what: str):
        """Assert equality, but to rounding where an FFT mixes all steps."""
        if self.case.mixes_steps:
            assert_same(actual, expected, what)
        else:
            assert (actual == expected).all(), f"{what}: changed"

    def rows(self, indices: Sequence[int], state):
        """Some rows of a batched state."""
        axes = state_batch_axes(self.layer)
        return jax.tree.map(lambda s, axis: np.take(s, indices, axis), state, axes)

    def by_direction(self, forward, backward):
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


def assert_same_state(actual, expected, what: str) -> None:
    """Assert that two states have the same structure and, to rounding, the same values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same(a, b, what)


@check
def state_goes_back_in(subject: Subject):
    fresh = jax.device_get(subject.layer.init_state(BATCH))
    y, last = subject.call(subject.x, None)
    for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(fresh), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    y_fresh, last_fresh = subject.call(subject.x, fresh)
    assert_same(y, y_fresh, "no state and the initial state")
    assert_same_state(last, last_fresh, "no state and the initial state")
    # a buffer that two leaves share cannot be donated
    jax.jit(lambda state: state, donate_argnums=0)(subject.layer.init_state(BATCH))


@check
def no_state_is_the_twins_own_zero(subject: Subject):
    case, twin = subject.case, subject.case.build_twin()
    with torch.no_grad():
        expected, expected_last = case.call(twin, torch.tensor(subject.x))
    y, last = subject.call(subject.x, None)
    assert_same(y, expected.numpy(), "outputs")
    if case.twin_state:
        for a, b in zip(jax.tree.leaves(last), expected_last, strict=True):
            assert_same(a, b.numpy(), "states")


@check
def the_twin_goes_on_from_its_state(subject: Subject):
    case, twin = subject.case, subject.case.build_twin().eval()
    if not case.causal:
        return
    x = torch.tensor(subject.x)
    with torch.no_grad():
        expected, _ = case.call(twin, x)
        y_head, state = case.call(twin, x[:, :3])
        y_step, state = case.call(twin, x[:, 3:4], state)
        y_tail, _ = case.call(twin, x[:, 4:], state)
    y = torch.cat([y_head, y_step, y_tail], dim=1)
    assert_same(y.numpy(), expected.numpy(), "the twin's outputs, cut and uncut")


@check
def steps_equal_sequence(subject: Subject):
    if not subject.case.causal:
        with np.testing.assert_raises(NotImplementedError):
            subject.layer.step(subject.x[:, 0], subject.state)
        return
    y, last = subject.call(subject.x, subject.state)
    step, state = jax.jit(subject.layer.step), subject.state
    for t in range(TIME):
        y_t, state = step(subject.x[:, t], state)
        assert_same(y_t, y[:, t], f"step {t}")
    assert_same_state(state, last, "state after all steps")


@check
def steps_with_reset_equal_replay(subject: Subject):
    """Episodes that end at any step, in one row at every step."""
    layer, state = subject.layer, subject.state
    if not subject.case.causal:
        return
    if not subject.case.resettable:
        with np.testing.assert_raises(NotImplementedError):
            layer.step(subject.x[:, 0], state, reset=NO_RESET[:, 0])
        return
    reset = np.array([np.ones(TIME), np.arange(TIME) % 3 == 1, np.zeros(TIME)], bool)
    y, last, _ = subject.masked(subject.x, reset=reset)
    step = jax.jit(lambda x_t, state, reset: layer.step(x_t, state, reset=reset))
    for t in range(TIME):
        y_t, state = step(subject.x[:, t], state, reset[:, t])
        assert_same(y_t, y[:, t], f"step {t}")
    assert_same_state(state, last, "state after all steps")


@check
def cut_equals_uncut(subject: Subject):
    if not subject.case.causal:
        return
    y, last = subject.call(subject.x, subject.state)
    y_head, state = subject.part(0, 4, subject.state)
    y_tail, state = subject.part(4, TIME, state)
    assert_same(np.concatenate([y_head, y_tail], axis=1), y, "outputs")
    assert_same_state(state, last, "states")


@check
def batch_rows_are_independent(subject: Subject):
    y, last = subject.call(subject.x, subject.state)
    others = np.broadcast_to(np.arange(BATCH)[:, None] > 0, (BATCH, TIME))
    y_others, last_others = subject.call(subject.disturbed(others), subject.state)
    assert (y_others[0] == y[0]).all(), "another row's input changes this row's output"
    assert (y_others[1:] != y[1:]).any(axis=(1, 2)).all(), "a row's input does not change it"
    assert_same_state(subject.rows([0], last_others), subject.rows([0], last), "row 0's state")
    y_alone, last_alone = subject.call(subject.x[:1], subject.rows([0], subject.state))
    assert_same(y_alone, y[:1], "row 0 alone")
    assert_same_state(last_alone, subject.rows([0], last), "row 0's state alone")


@check
def future_has_no_influence_and_far_past_has(subject: Subject):
    y, _ = subject.call(subject.x, subject.state)
    half = TIME // 2
    step = np.broadcast_to(np.arange(TIME), (BATCH, TIME))
    later, _ = subject.call(subject.disturbed(step >= half), subject.state)
    first = 0 if subject.case.reach is None else TIME - subject.case.reach
    earlier, _ = subject.call(subject.disturbed(step == first), subject.state)
    forgotten, _ = subject.call(subject.disturbed(step < first), subject.state)
    if subject.case.causal:
        subject.assert_unchanged(later[:, :half], y[:, :half], "the past, by the future")
    else:
        assert (later[:, 0] != y[:, 0]).any(), "the last step does not reach the first"
    if isinstance(subject.layer, Reversed):
        assert (earlier[:, 1:] == y[:, 1:]).all(), "the past has an influence"
        return
    assert (earlier[:, -1] != y[:, -1]).any(), "the first step does not reach the last"
    assert (forgotten[:, -1] == y[:, -1]).all(), "a step reaches further than it should"


@check
def padding_has_no_influence(subject: Subject):
    y, last, _ = subject.masked(subject.x, LENGTHS)
    y_other, last_other, _ = subject.masked(subject.disturbed(PADDING), LENGTHS)
    assert (y_other == y).all(), "the padding changes the outputs"
    assert_same_state(last_other, last, "state with other padding")
    assert (y[PADDING] == 0).all(), "the outputs of the padding are not zero"
    for row, length in enumerate(LENGTHS):
        y_unpadded, last_unpadded = subject.part(0, length, subject.state)
        assert_same(y[row, :length], y_unpadded[row], f"row {row} and the same row unpadded")
        assert_same_state(
            subject.rows([row], last), subject.rows([row], last_unpadded), f"state of row {row}"
        )


@check
def zeros_have_finite_outputs_and_gradients(subject: Subject):
    """Padding, dead channels and zero weights give zeros. A parameter with bounds is not zeroed."""
    x, start = np.zeros_like(subject.x), subject.layer.init_state(BATCH)
    zeros = jax.tree.map(
        lambda p: p if "bounds" in p.get_metadata() else p.replace(jnp.zeros_like(p[...])),
        subject.params,
        is_leaf=lambda p: isinstance(p, nnx.Variable),
    )
    for name, params in {"random": subject.params, "zero": zeros}.items():
        results = subject.results_and_gradients(params, start, x, LENGTHS)
        for path, array in jax.tree.leaves_with_path(results):
            where = jax.tree_util.keystr(path)
            assert np.isfinite(array).all(), f"{name} parameters: not finite: {where}"


@check
def documents_in_a_row_stay_apart(subject: Subject):
    if not subject.case.resettable:
        with np.testing.assert_raises(NotImplementedError):
            subject.layer(subject.x, reset=NO_RESET)
        return
    starts = {0: [3], 1: [0, 4], 2: [4]}
    reset = NO_RESET.copy()
    for row, steps in starts.items():
        reset[row, steps] = True
    lengths = np.array([TIME, TIME, 4])  # row 2's second document is padding
    y, last, _ = subject.masked(subject.x, lengths, reset)
    given, zero = subject.state, jax.device_get(subject.layer.init_state(BATCH))
    for row, length in enumerate(lengths):
        edges = sorted({0, *starts[row], length})
        lasts = []
        for start, end in itertools.pairwise(edge for edge in edges if edge <= length):
            forward = zero if start in starts[row] else given
            backward = given if end == length else zero
            y_alone, last_alone = subject.part(start, end, subject.by_direction(forward, backward))
            assert_same(y[row, start:end], y_alone[row], f"row {row}, steps {start} to {end}")
            lasts.append(subject.rows([row], last_alone))
        expected = subject.by_direction(lasts[-1], lasts[0])
        assert_same_state(subject.rows([row], last), expected, f"state of row {row}")


@check
def a_document_is_the_same_wherever_it_is(subject: Subject):
    """Behind another one, behind padding and before padding."""
    case, (x, length) = subject.case, subject.documents
    if not case.causal:
        return
    document, other, longest = x[:1, :length], x[1:2, length:], x.shape[1]
    expected, expected_last = subject.call(document, None)
    behind = np.concatenate([other, document], axis=1)
    places = {"before padding": (np.concatenate([document, other], axis=1), [0], length)}
    if case.resettable:
        places["behind another document"] = (behind, [0, longest - length], longest)
        places["behind padding"] = (behind, [longest - length], longest)
    rows, starts, ends = zip(*places.values(), strict=True)
    reset = np.zeros((len(rows), longest), bool)
    for row, steps in enumerate(starts):
        reset[row, steps] = True
    if case.resettable:
        masks = {"lengths": np.array(ends), "reset": reset}
        state = case.state(batch=len(rows))
    else:
        masks, state = {"lengths": np.array(ends)}, None
    y, last = jax.jit(subject.layer.__call__)(np.concatenate(rows), state, **masks)
    for row, (place, end) in enumerate(zip(places, ends, strict=True)):
        assert_same(y[row : row + 1, end - length : end], expected, f"a document {place}")
        assert_same_state(subject.rows([row], last), expected_last, f"state of a document {place}")


@check
def a_document_goes_on_in_another_row_and_from_a_file(subject: Subject):
    x, length = subject.documents
    if not subject.case.causal:
        return
    expected, expected_last = subject.call(x[:1, :length], None)
    cut, order = length // 3, [1, 0, 2]
    head, state = subject.call(x[:, :cut], None)
    assert_same(head[:1], expected[:, :cut], "the first part")
    state, rest = subject.rows(order, state), x[order, cut:length]
    y, last = subject.call(rest, state)
    assert_same(y[1:2], expected[:, cut:], "the second part, in another row")
    assert_same_state(subject.rows([1], last), expected_last, "state after both parts")
    file = io.BytesIO()
    np.savez(file, *jax.tree.leaves(state))
    file.seek(0)
    with np.load(file) as arrays:
        saved = jax.tree.unflatten(jax.tree.structure(state), arrays.values())
    resumed = subject.call(rest, saved)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves((y, last)), strict=True):
        np.testing.assert_array_equal(a, b, "from a file")


@check
def jit_equals_eager(subject: Subject):
    y, last = subject.call(subject.x, subject.state)
    y_eager, last_eager = subject.layer(subject.x, subject.state)
    assert_same(y, y_eager, "outputs")
    assert_same_state(last, last_eager, "states")


@check
def vmap_equals_loop(subject: Subject):
    xs = np.stack([subject.x, subject.disturbed(np.full((BATCH, TIME), True))])
    y, last = jax.device_get(
        jax.jit(jax.vmap(subject.layer.__call__, in_axes=(0, None)))(xs, subject.state)
    )
    for i, x in enumerate(xs):
        y_i, last_i = subject.call(x, subject.state)
        assert_same(y[i], y_i, f"outputs of {i}")
        assert_same_state(jax.tree.map(lambda s: s[i], last), last_i, f"states of {i}")  # noqa: B023


@check
def nan_stays_where_it_is(subject: Subject):
    """In its row, its document or its padding: outputs, states and gradients of others are as ever.

    The gradient of the padding is zero, NaN or not.
    """
    if isinstance(subject.layer, LanguageModel):
        return

    row, step = np.indices((BATCH, TIME))
    cut = (row == 1) & (step == 3)
    plants = {  # where NaN is, what it may reach, and whether the state of row 1 is of that
        "another row": ((row == 1) & (step == 2), row == 1, True, ALL_STEPS, NO_RESET),
        "the padding": (PADDING, PADDING, False, LENGTHS, NO_RESET),
    }
    if subject.case.resettable:
        before, after = (row == 1) & (step < 3), (row == 1) & (step >= 3)
        plants["an earlier document"] = (before, before, not subject.case.causal, ALL_STEPS, cut)
        plants["a later document"] = (after, after, True, ALL_STEPS, cut)
    for name, (where, reached, reaches_state, lengths, reset) in plants.items():
        y, last, gradient = subject.masked(subject.x, lengths, reset)
        planted = np.where(where[..., None], np.nan, subject.x)
        y_nan, last_nan, gradient_nan = subject.masked(planted, lengths, reset)
        for ours, theirs, what in ((y_nan, y, "outputs"), (gradient_nan, gradient, "gradients")):
            assert_same(ours[~reached], theirs[~reached], f"{what} beside a NaN in {name}")
            assert np.isfinite(ours[~reached]).all(), f"a NaN in {name} reaches the {what}"
        for index in {0, 1, 2} - ({1} if reaches_state else set()):
            ours, theirs = subject.rows([index], last_nan), subject.rows([index], last)
            assert_same_state(ours, theirs, f"state of row {index} beside a NaN in {name}")
        if name == "the padding":
            assert (gradient_nan[PADDING] == 0).all(), "the padding has a gradient"
            assert (gradient_nan[~PADDING] != 0).any(axis=-1).all(), "an input has no gradient"


@check
def weights_make_the_round_trip_bit_for_bit(subject: Subject):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        twin = subject.case.twin().to(dtype)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.normal_()
            for parameter in subject.case.bounded(twin):
                parameter.uniform_()  # another is refused
        name = str(dtype).removeprefix("torch.")
        layer = from_torch(subject.case.abstract(jnp.dtype(name)), twin.state_dict())
        back = to_torch(layer, subject.case.layout)
        assert back.keys() == twin.state_dict().keys()
        for key, tensor in twin.state_dict().items():
            bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
            assert back[key].dtype.name == name
            assert back[key].tobytes() == tensor.contiguous().view(bits).numpy().tobytes(), key
        again = from_torch(subject.case.abstract(jnp.dtype(name)), back, subject.case.layout)
        for a, b in zip(
            jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(again)), strict=True
        ):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@check
def optimiser_follows_the_same_trajectory(subject: Subject):
    """Ten steps of AdamW towards random targets, in optax and in torch.optim.

    AdamW's epsilon is above the rounding errors of a gradient that is zero, as that of attention's
    key bias is: it would be the direction of a step.
    """
    case, twin = subject.case, subject.case.build_twin()
    x = torch.tensor(subject.x)
    target = np.random.default_rng(5).standard_normal(case.call(twin, x)[0].shape)
    graphdef, tree, rest = nnx.split(subject.layer, nnx.Param, ...)
    params, unravel = ravel_pytree(tree)
    optimizer = optax.adamw(1e-2, 0.9, 0.999, eps=1e-5, weight_decay=0.01)

    @jax.jit
    def jax_step(params, optimizer_state):
        def loss_fn(params):
            return jnp.mean(
                (nnx.merge(graphdef, unravel(params), rest)(subject.x)[0] - target) ** 2
            )

        loss, gradient = jax.value_and_grad(loss_fn)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax does not work under "strict"
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            stepped: Any = optax.apply_updates(params, updates)
        return ravel_pytree(project(unravel(stepped)))[0], optimizer_state, loss

    torch_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-5)
    optimizer_state = optimizer.init(params)
    for step in range(10):
        torch_optimizer.zero_grad()
        torch_loss = ((case.call(twin, x)[0] - torch.tensor(target)) ** 2).mean()
        torch_loss.backward()
        torch_optimizer.step()
        for parameter in case.bounded(twin):
            parameter.clamp_(0, 1)
        params, optimizer_state, loss = jax_step(params, optimizer_state)
        assert_same(loss, torch_loss.item(), f"loss of step {step}")
    weights = to_torch(nnx.merge(graphdef, unravel(params), rest), case.layout)
    for key, tensor in twin.state_dict().items():
        assert_same(weights[key], tensor.numpy(), key)


def is_caught(mutation: Mutation) -> bool:
    """Does the check fail that is there to find the fault, on a CPU?"""
    case = CASES[mutation.case]
    with mutation.plant(), jax.default_device(jax.devices("cpu")[0]):
        if mutation.check is None:
            report = measure_twin(case.problem(), mutation.dtypes)
            return {dtype for dtype, _, _ in report.failures} == {*mutation.dtypes}
        try:
            CHECKS[mutation.check](Subject(case))
        except AssertionError:
            return True
        return False
