"""The checks that every layer must pass besides agreeing with its twin. All run in float64."""

import io
import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_models import Reversed
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.registry import BATCH, CASES, TIME, Mutation
from parity_tests.subject import (
    ALL_STEPS,
    NO_RESET,
    Subject,
    assert_same_gradients,
    assert_same_tree,
)
from parity_tests.weight_checks import (
    optimizer_follows_the_same_trajectory,
    weights_make_the_round_trip_bit_for_bit,
)

CHECKS: dict[str, Callable[[Subject], None]] = {}
LENGTHS = np.array([TIME, 3, 0])
PADDING = np.arange(TIME)[None, :] >= LENGTHS[:, None]
STARTS, ENDS = np.array([0, 3, 1]), np.array([TIME, TIME, 4])


def check(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """Registers a function of a `Subject` as a check, under its name with spaces.

    The first line of its docstring says to users what it checks.
    """
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@check
def state_goes_back_in(subject: Subject):
    """A call without a state starts from `init_state`, and returns a state of the same shapes."""
    fresh = jax.device_get(subject.layer.init_state(BATCH))
    results = subject.call(subject.x, None)
    for a, b in zip(jax.tree.leaves(results[1]), jax.tree.leaves(fresh), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert_same_tree(results, subject.call(subject.x, fresh), "no state and the initial state")
    # Donate the initial state, which fails if two leaves share a buffer.
    jax.jit(lambda state: state, donate_argnums=0)(subject.layer.init_state(BATCH))


@check
def no_state_is_the_twins_own_zero(subject: Subject):
    """A call without a state gives the outputs and the last state of the PyTorch twin."""
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
    """The PyTorch twin gives the same outputs if a sequence is cut and then continued."""
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
    """Calls of `step` give the outputs and the last state of one call on the whole sequence."""
    if not subject.case.causal:
        with np.testing.assert_raises(NotImplementedError):
            subject.layer.step(subject.x[:, 0], subject.state)
        return
    y, last = subject.call(subject.x, subject.state)
    step, state = jax.jit(subject.layer.step), subject.state
    for t in range(TIME):
        y_t, state = step(subject.x[:, t], state)
        assert_same(y_t, y[:, t], f"step {t}")
    assert_same_tree(state, last, "state after all steps")


@check
def steps_with_reset_equal_replay(subject: Subject):
    """Calls of `step` with `reset` give the results of one call with the same `reset`.

    Episodes may end at any step, in one row at every step.
    """
    layer, state = subject.layer, subject.state
    if not subject.case.causal:
        return
    if not subject.case.resettable:
        with np.testing.assert_raises(NotImplementedError):
            layer.step(subject.x[:, 0], state, reset=NO_RESET[:, 0])
        return
    reset = np.array([np.ones(TIME), np.arange(TIME) % 3 == 1, np.zeros(TIME)], bool)
    y, last, _ = subject.call_with_masks(subject.x, reset=reset)
    step = jax.jit(lambda x_t, state, reset: layer.step(x_t, state, reset=reset))
    for t in range(TIME):
        y_t, state = step(subject.x[:, t], state, reset[:, t])
        assert_same(y_t, y[:, t], f"step {t}")
    assert_same_tree(state, last, "state after all steps")


@check
def cut_equals_uncut(subject: Subject):
    """Two calls, with the state passed on, give the results of one call on the whole sequence."""
    if not subject.case.causal:
        return
    y_head, state = subject.call_steps(0, 4, subject.state)
    y_tail, state = subject.call_steps(4, TIME, state)
    uncut = subject.call(subject.x, subject.state)
    assert_same_tree((np.concatenate([y_head, y_tail], axis=1), state), uncut, "cut and uncut")


@check
def batch_rows_are_independent(subject: Subject):
    """The inputs of one row change no output and no state of another row."""
    y, last = subject.call(subject.x, subject.state)
    others = np.broadcast_to(np.arange(BATCH)[:, None] > 0, (BATCH, TIME))
    y_others, last_others = subject.call(subject.changed_inputs(others), subject.state)
    assert (y_others[0] == y[0]).all(), "another row's input changes this row's output"
    assert (y_others[1:] != y[1:]).any(axis=(1, 2)).all(), "a row's input does not change it"
    last_row = subject.state_rows([0], last)
    assert_same_tree(subject.state_rows([0], last_others), last_row, "row 0's state")
    alone = subject.call(subject.x[:1], subject.state_rows([0], subject.state))
    assert_same_tree(alone, (y[:1], last_row), "row 0 alone")


@check
def future_has_no_influence_and_far_past_has(subject: Subject):
    """An output depends on inputs as far back as it should and, if causal, on no later ones."""
    y, _ = subject.call(subject.x, subject.state)
    half = TIME // 2
    step = np.broadcast_to(np.arange(TIME), (BATCH, TIME))
    later, _ = subject.call(subject.changed_inputs(step >= half), subject.state)
    first = 0 if subject.case.reach is None else TIME - subject.case.reach
    earlier, _ = subject.call(subject.changed_inputs(step == first), subject.state)
    forgotten, _ = subject.call(subject.changed_inputs(step < first), subject.state)
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
    """With `lengths`, a padded row gives the results of the same row without padding."""
    y, last, _ = subject.call_with_masks(subject.x, LENGTHS)
    y_other, last_other, _ = subject.call_with_masks(subject.changed_inputs(PADDING), LENGTHS)
    assert (y_other == y).all(), "the padding changes the outputs"
    assert_same_tree(last_other, last, "state with other padding")
    assert (y[PADDING] == 0).all(), "the outputs of the padding are not zero"
    for row, length in enumerate(LENGTHS):
        y_unpadded, last_unpadded = subject.call_steps(0, length, subject.state)
        padded = y[row, :length], subject.state_rows([row], last)
        unpadded = y_unpadded[row], subject.state_rows([row], last_unpadded)
        assert_same_tree(padded, unpadded, f"row {row} and the same row unpadded")


@check
def left_padding_has_no_influence(subject: Subject):
    """With `starts`, a row that is padded on the left gives the results of the row alone."""
    if not subject.case.takes_starts:
        return
    step, reset = np.arange(TIME)[None, :], NO_RESET.copy()
    real = (step >= STARTS[:, None]) & (step < ENDS[:, None])
    x = subject.x if subject.is_language_model else np.where(real[..., None], subject.x, np.nan)
    call = partial(subject.results_and_gradients, subject.params, subject.state)
    y, last, _ = call(x, ENDS, reset, starts=STARTS)
    assert (y[~real] == 0).all(), "the outputs of the padding are not zero"
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        y_alone, last_alone = subject.call_steps(start, end, subject.state)
        padded = y[row, start:end], subject.state_rows([row], last)
        alone = y_alone[row], subject.state_rows([row], last_alone)
        assert_same_tree(padded, alone, f"row {row} and the same row without padding")

    # Rows of several documents have the results and gradients that they have with padding after
    # them.
    reset[[0, 1, 2], [2, 5, 1]] = True
    to_left = (np.arange(BATCH)[:, None], (step + STARTS[:, None]) % TIME)
    y, last, (of_params, of_x) = call(x, ENDS, reset, starts=STARTS)
    y_right, last_right, (of_params_right, of_x_right) = call(
        x[to_left], ENDS - STARTS, reset[to_left]
    )
    assert_same_tree((y[to_left], last), (y_right, last_right), "padding on the left and the right")
    assert_same_gradients(of_params, of_params_right, "gradients of the parameters")
    if of_x is not None:
        assert_same(of_x[to_left], of_x_right, "gradients of the inputs")


@check
def zeros_have_finite_outputs_and_gradients(subject: Subject):
    """Inputs and weights of zero, as in padding and dead channels, cause no NaN or infinity.

    A parameter with bounds is not set to zero.
    """
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
def an_empty_batch_has_empty_results(subject: Subject):
    """A batch without rows has empty outputs, and a call without steps returns the given state.

    The gradients are finite.
    """
    for rows, steps in ((0, TIME), (BATCH, 0)):
        x, state = subject.x[:rows, :steps], subject.state_rows(range(rows), subject.state)
        y, last, gradients = subject.results_and_gradients(
            subject.params, state, x, np.full(rows, steps), NO_RESET[:rows, :steps]
        )
        assert y.shape[:2] == (rows, steps)
        assert_same_tree(last, state, f"{rows} rows of {steps} steps: state")
        for path, gradient in jax.tree.leaves_with_path(gradients):
            where = jax.tree_util.keystr(path)
            assert np.isfinite(gradient).all(), f"{rows} rows of {steps} steps: {where}"


@check
def documents_in_a_row_stay_apart(subject: Subject):
    """With `reset`, each document of a row gives the results of the document alone."""
    if not subject.case.resettable:
        with np.testing.assert_raises(NotImplementedError):
            subject.layer(subject.x, reset=NO_RESET)
        return
    # Run rows with several documents in a single call.
    starts = {0: [3], 1: [0, 4], 2: [4]}
    reset = NO_RESET.copy()
    for row, steps in starts.items():
        reset[row, steps] = True
    lengths = np.array([TIME, TIME, 4])  # row 2's second document is padding
    y, last, _ = subject.call_with_masks(subject.x, lengths, reset)

    # Each document must have the same results as if it were alone. The first document continues
    # from the given state, unless it begins with a reset; for a backward layer, the last one does.
    given, zero = subject.state, jax.device_get(subject.layer.init_state(BATCH))
    for row, length in enumerate(lengths):
        edges = sorted({0, *starts[row], length})
        lasts = []
        for start, end in itertools.pairwise(edge for edge in edges if edge <= length):
            forward = zero if start in starts[row] else given
            backward = given if end == length else zero
            y_alone, last_alone = subject.call_steps(
                start, end, subject.joined_by_direction(forward, backward)
            )
            assert_same(y[row, start:end], y_alone[row], f"row {row}, steps {start} to {end}")
            lasts.append(subject.state_rows([row], last_alone))
        expected = subject.joined_by_direction(lasts[-1], lasts[0])
        assert_same_tree(subject.state_rows([row], last), expected, f"state of row {row}")


@check
def a_document_is_the_same_wherever_it_is(subject: Subject):
    """A document gives the same outputs, last state and gradients wherever it is read.

    It may follow another document or padding, precede padding, or be read in pieces and by steps.
    """
    case, (x, length) = subject.case, subject.documents
    if not case.causal:
        return
    document, other, longest = x[:1, :length], x[1:2, length:], x.shape[1]
    *expected, (of_params, of_x) = subject.read(lambda layer, x: layer(x), document)

    # Put the same document in several places, one in each row.
    behind = np.concatenate([other, document], axis=1)
    places = {"before padding": (np.concatenate([document, other], axis=1), [0], length)}
    if case.resettable:
        places["behind another document"] = (behind, [0, longest - length], longest)
        places["behind padding"] = (behind, [longest - length], longest)

    # Run all rows in one call, with a reset at the start of each document.
    rows, starts, ends = zip(*places.values(), strict=True)
    masks, state = {"lengths": np.array(ends)}, None
    if case.resettable:
        masks["reset"] = np.zeros((len(rows), longest), bool)
        for row, steps in enumerate(starts):
            masks["reset"][row, steps] = True
        state = case.state(batch=len(rows))

    def in_rows(layer, x):
        y, last = layer(x, state, **masks)
        return jnp.stack([y[row, end - length : end] for row, end in enumerate(ends)]), last

    y, last, (of_rows_params, of_rows) = subject.read(in_rows, np.concatenate(rows))
    for row, (place, end) in enumerate(zip(places, ends, strict=True)):
        found = [y[row : row + 1], subject.state_rows([row], last)]
        assert_same_tree(found, expected, f"a document {place}")
        if of_x is not None:
            alone = np.zeros_like(of_rows[row])
            alone[end - length : end] = of_x[0]
            assert_same(of_rows[row], alone, f"gradient of a document {place}")
    of_params_of_all = jax.tree.map(lambda gradient: len(rows) * gradient, of_params)
    assert_same_gradients(of_rows_params, of_params_of_all, "gradients of documents in rows")

    # Read the first part in one call, the second part step by step, and the rest in one call. Both
    # calls have the same number of steps, so that their operators are traced once.
    cut = 2 * length // 5

    def in_pieces(layer, x):
        head, state = layer(x[:, :cut], layer.init_state(1))
        steps = x[:, cut:-cut].swapaxes(0, 1)
        state, middle = jax.lax.scan(lambda s, x_t: layer.step(x_t, s)[::-1], state, steps)
        tail, state = layer(x[:, -cut:], state)
        return jnp.concatenate([head, middle.swapaxes(0, 1), tail], axis=1), state

    *found, gradients = subject.read(in_pieces, document)
    assert_same_tree(found, expected, "a document in pieces")
    assert_same_gradients(gradients, (of_params, of_x), "gradients of a document in pieces")


@check
def a_document_goes_on_in_another_row_and_from_a_file(subject: Subject):
    """A document can be continued in another row, and from a state that was saved to a file."""
    x, length = subject.documents
    if not subject.case.causal:
        return
    expected, expected_last = subject.call(x[:1, :length], None)
    cut, order = length // 3, [1, 0, 2]
    head, state = subject.call(x[:, :cut], None)
    assert_same(head[:1], expected[:, :cut], "the first part")
    state, rest = subject.state_rows(order, state), x[order, cut:length]
    y, last = subject.call(rest, state)
    found = y[1:2], subject.state_rows([1], last)
    assert_same_tree(found, (expected[:, cut:], expected_last), "the second part, in another row")

    # A state that was saved to a file and loaded again gives the same results bit for bit.
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
    """A call under `jax.jit` gives the results of a call without it."""
    eager = subject.layer(subject.x, subject.state)
    assert_same_tree(subject.call(subject.x, subject.state), eager, "jit and eager")


@check
def vmap_equals_loop(subject: Subject):
    """A call under `jax.vmap` gives the results of a loop."""
    xs = np.stack([subject.x, subject.changed_inputs(np.full((BATCH, TIME), True))])
    mapped = jax.jit(jax.vmap(subject.layer.__call__, in_axes=(0, None)))(xs, subject.state)
    for i, x in enumerate(xs):
        single = jax.tree.map(lambda a: a[i], jax.device_get(mapped))  # noqa: B023
        assert_same_tree(single, subject.call(x, subject.state), f"entry {i}")


@check
def nan_stays_where_it_is(subject: Subject):
    """A NaN in one row, document or padding changes no result of the others.

    The gradient of the padding is zero, whether it contains NaN or not.
    """
    if subject.is_language_model:
        return
    row, step = np.indices((BATCH, TIME))
    cut = (row == 1) & (step == 3)
    # Plant NaN in each kind of place. An entry holds the steps that are NaN, the steps that NaN may
    # reach, whether it may reach the last state of row 1, and the masks.
    plants = {
        "another row": ((row == 1) & (step == 2), row == 1, True, ALL_STEPS, NO_RESET),
        "the padding": (PADDING, PADDING, False, LENGTHS, NO_RESET),
    }
    if subject.case.resettable:
        before, after = (row == 1) & (step < 3), (row == 1) & (step >= 3)
        plants["an earlier document"] = (before, before, not subject.case.causal, ALL_STEPS, cut)
        plants["a later document"] = (after, after, True, ALL_STEPS, cut)

    # Everything that the NaN may not reach must be the same as without it.
    for name, (where, reached, reaches_state, lengths, reset) in plants.items():
        y, last, gradient = subject.call_with_masks(subject.x, lengths, reset)
        planted = np.where(where[..., None], np.nan, subject.x)
        y_nan, last_nan, gradient_nan = subject.call_with_masks(planted, lengths, reset)
        for with_nan, without, what in ((y_nan, y, "outputs"), (gradient_nan, gradient, "grads")):
            assert_same(with_nan[~reached], without[~reached], f"{what} beside a NaN in {name}")
            assert np.isfinite(with_nan[~reached]).all(), f"a NaN in {name} reaches the {what}"
        rows = [0, 2] if reaches_state else [0, 1, 2]
        states = subject.state_rows(rows, last_nan), subject.state_rows(rows, last)
        assert_same_tree(*states, f"states of rows {rows} beside a NaN in {name}")
        if name == "the padding":
            assert (gradient_nan[PADDING] == 0).all(), "the padding has a gradient"
            assert (gradient_nan[~PADDING] != 0).any(axis=-1).all(), "an input has no gradient"


check(weights_make_the_round_trip_bit_for_bit)
check(optimizer_follows_the_same_trajectory)


def is_caught(mutation: Mutation) -> bool:
    """True if the check that must find the fault fails when it runs on a CPU."""
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
