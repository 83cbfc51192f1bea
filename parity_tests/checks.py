"""The checks that every layer must pass besides agreeing with its twin. All run in float64."""

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_models import Reversed
from parity_tests.checked_layer import (
    ALL_STEPS,
    NO_RESET,
    CheckedLayer,
    assert_same_gradients,
    assert_same_tree,
)
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.problem import Problem
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.references.torch_reference import TorchReference
from parity_tests.engine.verdict.measure import measure
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.engine.verdict.report import Report
from parity_tests.registry import BATCH, CASES, TIME, Mutation
from parity_tests.weight_checks import (
    optimizer_follows_the_same_trajectory,
    weights_make_the_round_trip_bit_for_bit,
)

CHECKS: dict[str, Callable[[CheckedLayer], None]] = {}
LENGTHS = np.array([TIME, 3, 0])
PADDING = np.arange(TIME)[None, :] >= LENGTHS[:, None]
STARTS, ENDS = np.array([0, 3, 1]), np.array([TIME, TIME, 4])


def check(function: Callable[[CheckedLayer], None]) -> Callable[[CheckedLayer], None]:
    """Registers a function of a `CheckedLayer` as a check, under its name with spaces.

    The first line of its docstring says to users what it checks.
    """
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@check
def state_goes_back_in(checked: CheckedLayer):
    """A call without a state starts from `init_state`, and returns a state of the same shapes."""
    fresh = jax.device_get(checked.layer.init_state(BATCH))
    results = checked.call(checked.x, None)
    for a, b in zip(jax.tree.leaves(results[1]), jax.tree.leaves(fresh), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert_same_tree(results, checked.call(checked.x, fresh), "no state and the initial state")
    # Donate the initial state, which fails if two leaves share a buffer.
    jax.jit(lambda state: state, donate_argnums=0)(checked.layer.init_state(BATCH))


@check
def no_state_gives_the_results_of_the_twin(checked: CheckedLayer):
    """A call without a state gives the outputs and the last state of the PyTorch twin."""
    case, twin = checked.case, checked.case.build_twin()
    with torch.no_grad():
        expected, expected_last = case.call(twin, torch.tensor(checked.x))
    y, last = checked.call(checked.x, None)
    assert_same(y, expected.numpy(), "outputs")
    if case.twin_state:
        for a, b in zip(jax.tree.leaves(last), expected_last, strict=True):
            assert_same(a, b.numpy(), "states")


@check
def the_twin_continues_from_its_state(checked: CheckedLayer):
    """The PyTorch twin gives the same outputs if a sequence is cut and then continued."""
    case, twin = checked.case, checked.case.build_twin().eval()
    if not case.causal:
        return
    x = torch.tensor(checked.x)
    with torch.no_grad():
        expected, _ = case.call(twin, x)
        y_head, state = case.call(twin, x[:, :3])
        y_step, state = case.call(twin, x[:, 3:4], state)
        y_tail, _ = case.call(twin, x[:, 4:], state)
    y = torch.cat([y_head, y_step, y_tail], dim=1)
    assert_same(y.numpy(), expected.numpy(), "the twin's outputs, cut and uncut")


@check
def steps_equal_sequence(checked: CheckedLayer):
    """Calls of `step` give the outputs and the last state of one call on the whole sequence."""
    if not checked.case.causal:
        with np.testing.assert_raises(NotImplementedError):
            checked.layer.step(checked.x[:, 0], checked.state)
        return
    y, last = checked.call(checked.x, checked.state)
    step, state = jax.jit(checked.layer.step), checked.state
    for t in range(TIME):
        y_t, state = step(checked.x[:, t], state)
        assert_same(y_t, y[:, t], f"step {t}")
    assert_same_tree(state, last, "state after all steps")


@check
def steps_with_reset_equal_replay(checked: CheckedLayer):
    """Calls of `step` with `reset` give the results of one call with the same `reset`.

    Episodes may end at any step, in one row at every step.
    """
    layer, state = checked.layer, checked.state
    if not checked.case.causal:
        return
    if not checked.case.resettable:
        with np.testing.assert_raises(NotImplementedError):
            layer.step(checked.x[:, 0], state, reset=NO_RESET[:, 0])
        return
    reset = np.array([np.ones(TIME), np.arange(TIME) % 3 == 1, np.zeros(TIME)], bool)
    y, last = checked.call_with_masks(checked.x, reset=reset)
    step = jax.jit(lambda x_t, state, reset: layer.step(x_t, state, reset=reset))
    for t in range(TIME):
        y_t, state = step(checked.x[:, t], state, reset[:, t])
        assert_same(y_t, y[:, t], f"step {t}")
    assert_same_tree(state, last, "state after all steps")


@check
def cut_equals_uncut(checked: CheckedLayer):
    """Two calls, with the state passed on, give the results of one call on the whole sequence."""
    if not checked.case.causal:
        return
    y_head, state = checked.call_steps(0, 4, checked.state)
    y_tail, state = checked.call_steps(4, TIME, state)
    uncut = checked.call(checked.x, checked.state)
    assert_same_tree((np.concatenate([y_head, y_tail], axis=1), state), uncut, "cut and uncut")


@check
def batch_rows_are_independent(checked: CheckedLayer):
    """The inputs of one row change no output and no state of another row."""
    y, last = checked.call(checked.x, checked.state)
    others = np.broadcast_to(np.arange(BATCH)[:, None] > 0, (BATCH, TIME))
    y_others, last_others = checked.call(checked.changed_inputs(others), checked.state)
    assert (y_others[0] == y[0]).all(), "another row's input changes this row's output"
    assert (y_others[1:] != y[1:]).any(axis=(1, 2)).all(), "a row's input does not change it"
    last_row = checked.state_rows([0], last)
    assert_same_tree(checked.state_rows([0], last_others), last_row, "row 0's state")
    alone = checked.call(checked.x[:1], checked.state_rows([0], checked.state))
    assert_same_tree(alone, (y[:1], last_row), "row 0 alone")


@check
def future_has_no_influence_and_far_past_has(checked: CheckedLayer):
    """An output depends on inputs as far back as it should and, if causal, on no later ones."""
    y, _ = checked.call(checked.x, checked.state)
    half = TIME // 2
    step = np.broadcast_to(np.arange(TIME), (BATCH, TIME))
    later, _ = checked.call(checked.changed_inputs(step >= half), checked.state)
    first = 0 if checked.case.reach is None else TIME - checked.case.reach
    earlier, _ = checked.call(checked.changed_inputs(step == first), checked.state)
    forgotten, _ = checked.call(checked.changed_inputs(step < first), checked.state)
    if checked.case.causal:
        checked.assert_unchanged(later[:, :half], y[:, :half], "the past, by the future")
    else:
        assert (later[:, 0] != y[:, 0]).any(), "the last step does not reach the first"
    if isinstance(checked.layer, Reversed):
        assert (earlier[:, 1:] == y[:, 1:]).all(), "the past has an influence"
        return
    assert (earlier[:, -1] != y[:, -1]).any(), "the first step does not reach the last"
    assert (forgotten[:, -1] == y[:, -1]).all(), "a step reaches further than it should"


@check
def padding_has_no_influence(checked: CheckedLayer):
    """With `lengths`, a padded row gives the results of the same row without padding."""
    y, last = checked.call_with_masks(checked.x, LENGTHS)
    y_other, last_other = checked.call_with_masks(checked.changed_inputs(PADDING), LENGTHS)
    assert (y_other == y).all(), "the padding changes the outputs"
    assert_same_tree(last_other, last, "state with other padding")
    assert (y[PADDING] == 0).all(), "the outputs of the padding are not zero"
    for row, length in enumerate(LENGTHS):
        y_unpadded, last_unpadded = checked.call_steps(0, length, checked.state)
        padded = y[row, :length], checked.state_rows([row], last)
        unpadded = y_unpadded[row], checked.state_rows([row], last_unpadded)
        assert_same_tree(padded, unpadded, f"row {row} and the same row unpadded")


@check
def left_padding_has_no_influence(checked: CheckedLayer):
    """With `starts`, a row that is padded on the left gives the results of the row alone."""
    if not checked.case.takes_starts:
        return
    step, reset = np.arange(TIME)[None, :], NO_RESET.copy()
    real = (step >= STARTS[:, None]) & (step < ENDS[:, None])
    x = checked.x if checked.is_language_model else np.where(real[..., None], checked.x, np.nan)
    call = partial(checked.results_and_gradients, checked.params, checked.state)
    y, last, _ = call(x, ENDS, reset, starts=STARTS)
    assert (y[~real] == 0).all(), "the outputs of the padding are not zero"
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        y_alone, last_alone = checked.call_steps(start, end, checked.state)
        padded = y[row, start:end], checked.state_rows([row], last)
        alone = y_alone[row], checked.state_rows([row], last_alone)
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
def zeros_have_finite_outputs_and_gradients(checked: CheckedLayer):
    """Inputs and weights of zero, as in padding and dead channels, cause no NaN or infinity.

    A parameter with bounds is not set to zero.
    """
    x, start = np.zeros_like(checked.x), checked.layer.init_state(BATCH)
    zeros = jax.tree.map(
        lambda p: p if "bounds" in p.get_metadata() else p.replace(jnp.zeros_like(p[...])),
        checked.params,
        is_leaf=lambda p: isinstance(p, nnx.Variable),
    )
    for name, params in {"random": checked.params, "zero": zeros}.items():
        results = checked.results_and_gradients(params, start, x, LENGTHS)
        for path, array in jax.tree.leaves_with_path(results):
            where = jax.tree_util.keystr(path)
            assert np.isfinite(array).all(), f"{name} parameters: not finite: {where}"


@check
def an_empty_batch_has_empty_results(checked: CheckedLayer):
    """A batch without rows has empty outputs, and a call without steps returns the given state.

    The gradients are finite.
    """
    for rows, steps in ((0, TIME), (BATCH, 0)):
        x, state = checked.x[:rows, :steps], checked.state_rows(range(rows), checked.state)
        y, last, gradients = checked.results_and_gradients(
            checked.params, state, x, np.full(rows, steps), NO_RESET[:rows, :steps]
        )
        assert y.shape[:2] == (rows, steps)
        assert_same_tree(last, state, f"{rows} rows of {steps} steps: state")
        for path, gradient in jax.tree.leaves_with_path(gradients):
            where = jax.tree_util.keystr(path)
            assert np.isfinite(gradient).all(), f"{rows} rows of {steps} steps: {where}"


@check
def documents_in_a_row_stay_apart(checked: CheckedLayer):
    """With `reset`, each document of a row gives the results of the document alone."""
    if not checked.case.resettable:
        with np.testing.assert_raises(NotImplementedError):
            checked.layer(checked.x, reset=NO_RESET)
        return
    # Run rows with several documents in a single call.
    starts = {0: [3], 1: [0, 4], 2: [4]}
    reset = NO_RESET.copy()
    for row, steps in starts.items():
        reset[row, steps] = True
    lengths = np.array([TIME, TIME, 4])  # row 2's second document is padding
    y, last = checked.call_with_masks(checked.x, lengths, reset)

    # Each document must have the same results as if it were alone. The first document continues
    # from the given state, unless it begins with a reset; for a backward layer, the last one does.
    given, zero = checked.state, jax.device_get(checked.layer.init_state(BATCH))
    for row, length in enumerate(lengths):
        edges = sorted({0, *starts[row], length})
        lasts = []
        for start, end in itertools.pairwise(edge for edge in edges if edge <= length):
            forward = zero if start in starts[row] else given
            backward = given if end == length else zero
            y_alone, last_alone = checked.call_steps(
                start, end, checked.joined_by_direction(forward, backward)
            )
            assert_same(y[row, start:end], y_alone[row], f"row {row}, steps {start} to {end}")
            lasts.append(checked.state_rows([row], last_alone))
        expected = checked.joined_by_direction(lasts[-1], lasts[0])
        assert_same_tree(checked.state_rows([row], last), expected, f"state of row {row}")


@check
def a_document_is_the_same_wherever_it_is(checked: CheckedLayer):
    """A document gives the same outputs, last state and gradients wherever it is read.

    It may follow another document or padding, precede padding, or be read in pieces and by steps.
    """
    case, (x, length) = checked.case, checked.documents
    if not case.causal:
        return
    document, other, longest = x[:1, :length], x[1:2, length:], x.shape[1]

    # Read the first part in one call, the second part step by step, and the rest in one call. Both
    # calls have the same number of steps, so that their operators are traced once.
    cut = 2 * length // 5

    def in_pieces(layer, x):
        head, state = layer(x[:, :cut], layer.init_state(1))
        steps = x[:, cut:-cut].swapaxes(0, 1)
        state, middle = jax.lax.scan(lambda s, x_t: layer.step(x_t, s)[::-1], state, steps)
        tail, state = layer(x[:, -cut:], state)
        return jnp.concatenate([head, middle.swapaxes(0, 1), tail], axis=1), state

    *expected, (of_params, of_x) = checked.read(in_pieces, document)

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

    y, last, (of_rows_params, of_rows) = checked.read(in_rows, np.concatenate(rows))
    for row, (place, end) in enumerate(zip(places, ends, strict=True)):
        found = [y[row : row + 1], checked.state_rows([row], last)]
        assert_same_tree(found, expected, f"a document {place} and in pieces")
        if of_x is not None:
            alone = np.zeros_like(of_rows[row])
            alone[end - length : end] = of_x[0]
            assert_same(of_rows[row], alone, f"gradient of a document {place}")
    of_params_of_all = jax.tree.map(lambda gradient: len(rows) * gradient, of_params)
    assert_same_gradients(of_rows_params, of_params_of_all, "gradients of documents in rows")


@check
def a_document_continues_in_another_row_and_from_a_file(checked: CheckedLayer):
    """A document can be continued in another row, and from a state that was saved to a file."""
    x, length = checked.documents
    if not checked.case.causal:
        return
    expected, expected_last = checked.call(x[:1, :length], None)
    cut, order = length // 3, [1, 0, 2]
    head, state = checked.call(x[:, :cut], None)
    assert_same(head[:1], expected[:, :cut], "the first part")
    state, rest = checked.state_rows(order, state), x[order, cut:length]
    y, last = checked.call(rest, state)
    found = y[1:2], checked.state_rows([1], last)
    assert_same_tree(found, (expected[:, cut:], expected_last), "the second part, in another row")

    # A state that was saved to a file and loaded again gives the same results bit for bit.
    file = io.BytesIO()
    np.savez(file, *jax.tree.leaves(state))
    file.seek(0)
    with np.load(file) as arrays:
        saved = jax.tree.unflatten(jax.tree.structure(state), arrays.values())
    resumed = checked.call(rest, saved)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves((y, last)), strict=True):
        np.testing.assert_array_equal(a, b, "from a file")


@check
def jit_equals_eager(checked: CheckedLayer):
    """A call under `jax.jit` gives the results of a call without it."""
    eager = checked.layer(checked.x, checked.state)
    assert_same_tree(checked.call(checked.x, checked.state), eager, "jit and eager")


@check
def vmap_equals_loop(checked: CheckedLayer):
    """A call under `jax.vmap` gives the results of a loop."""
    xs = np.stack([checked.x, checked.changed_inputs(np.full((BATCH, TIME), True))])
    mapped = jax.jit(jax.vmap(checked.layer.__call__, in_axes=(0, None)))(xs, checked.state)
    for i, x in enumerate(xs):
        single = jax.tree.map(lambda a: a[i], jax.device_get(mapped))  # noqa: B023
        assert_same_tree(single, checked.call(x, checked.state), f"entry {i}")


@check
def nan_stays_where_it_is(checked: CheckedLayer):
    """A NaN in one row, document or padding changes no result of the others.

    The gradient of the padding is zero, whether it contains NaN or not.
    """
    if checked.is_language_model:
        return
    row, step = np.indices((BATCH, TIME))
    cut = (row == 1) & (step == 3)
    # Plant NaN in each kind of place. An entry holds the steps that are NaN, the steps that NaN may
    # reach, whether it may reach the last state of row 1, and the masks.
    plants = {
        "another row": ((row == 1) & (step == 2), row == 1, True, ALL_STEPS, NO_RESET),
        "the padding": (PADDING, PADDING, False, LENGTHS, NO_RESET),
    }
    if checked.case.resettable:
        before, after = (row == 1) & (step < 3), (row == 1) & (step >= 3)
        plants["an earlier document"] = (before, before, not checked.case.causal, ALL_STEPS, cut)
        plants["a later document"] = (after, after, True, ALL_STEPS, cut)

    # Everything that the NaN may not reach must be the same as without it.
    for name, (where, reached, reaches_state, lengths, reset) in plants.items():
        call = partial(checked.results_and_gradients, checked.params, checked.state)
        y, last, (_, gradient) = call(checked.x, lengths, reset)
        planted = np.where(where[..., None], np.nan, checked.x)
        y_nan, last_nan, (_, gradient_nan) = call(planted, lengths, reset)
        for with_nan, without, what in ((y_nan, y, "outputs"), (gradient_nan, gradient, "grads")):
            assert_same(with_nan[~reached], without[~reached], f"{what} beside a NaN in {name}")
            assert np.isfinite(with_nan[~reached]).all(), f"a NaN in {name} reaches the {what}"
        rows = [0, 2] if reaches_state else [0, 1, 2]
        states = checked.state_rows(rows, last_nan), checked.state_rows(rows, last)
        assert_same_tree(*states, f"states of rows {rows} beside a NaN in {name}")
        if name == "the padding":
            assert (gradient_nan[PADDING] == 0).all(), "the padding has a gradient"
            assert (gradient_nan[~PADDING] != 0).any(axis=-1).all(), "an input has no gradient"


check(weights_make_the_round_trip_bit_for_bit)
check(optimizer_follows_the_same_trajectory)


def is_caught(mutation: Mutation) -> bool:
    """True if the check that must find the fault fails when it runs on a CPU."""
    case, cpu = CASES[mutation.case], jax.devices("cpu")[0]
    if mutation.check is None:
        # Few faults are in gradients alone, and results take a third of the time to compare.
        problem, reference = _results_of_twin(mutation.case)
        with mutation.plant(), jax.default_device(cpu):
            if _departs(measure(problem, reference, mutation.dtypes), mutation):
                return True
            return _departs(measure_twin(case.problem(), mutation.dtypes), mutation)
    with mutation.plant(), jax.default_device(cpu):
        try:
            CHECKS[mutation.check](CheckedLayer(case, single_check=True))
        except AssertionError:
            return True
        return False


@functools.lru_cache(maxsize=1)
def _results_of_twin(name: str) -> tuple[Problem, Reference]:
    """A case without gradients, and the results of its twin, which all faults of the case share."""
    problem = CASES[name].problem()

    def call_twin(twin: torch.nn.Module, *inputs: Any) -> Any:
        return jax.tree.map(torch.detach, problem.call_twin(twin, *inputs))

    problem_of_results = dataclasses.replace(problem, call_twin=call_twin)
    return problem_of_results, TorchReference(problem.twin).run(problem_of_results)


def _departs(report: Report, mutation: Mutation) -> bool:
    """True if the JAX side departs from the twin in each of the fault's dtypes."""
    return {dtype for dtype, _, _ in report.failures} == {*mutation.dtypes}
