"""Compare any torch module with any JAX port of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jax_models.ops.checks import checked_bool
from jax_models.weights import Table
from parity_tests.engine.candidates.adapters import foreign_model
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.port import port, refuse_other_weights
from parity_tests.engine.channel_order import fault_of_axes, note_on_inputs
from parity_tests.engine.locate.location import Location
from parity_tests.engine.logits import checked_logits
from parity_tests.engine.measure import measure
from parity_tests.engine.problem import (
    Problem,
    called,
    check_functions,
    checked_platform,
    checked_precision,
    is_torch_module,
)
from parity_tests.engine.progress import progress
from parity_tests.engine.references.open_reference import open_reference
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.references.source import Source, requested, with_kwargs
from parity_tests.engine.report import Report
from parity_tests.engine.report_hooks import call_hooks
from parity_tests.engine.results import GROUPS, Results

if TYPE_CHECKING:
    import torch

JaxModel = nnx.Module | Callable[..., Any] | tuple[Any, Any]
"""Of another framework, too; with its weights as a pair."""
Loader = Callable[[Mapping[str, Any]], Any]
"""Makes the JAX side's weights, an `nnx.Module` or any tree of arrays, of a state_dict."""


def compare(
    twin: torch.nn.Module | JaxModel | str | os.PathLike[str],
    model: JaxModel,
    *inputs: Any,
    weights: Table | Loader | str | None = None,
    call: Callable[..., Any] | None = None,
    call_twin: Callable[..., Any] | None = None,
    dtypes: Iterable[str] | None = None,
    platform: str = "cpu",
    precision: str = "highest",
    seed: int | None = None,
    locate: bool | None = False,
    names: Mapping[str, str] | None = None,
    logits: str | bool = False,
    kwargs: Mapping[str, Any] | None = None,
    edge_inputs: bool = False,
) -> Report:
    """Compare a torch module with its JAX port: outputs, states and gradients, in each dtype.

    Both run, in evaluation mode, on copies in each dtype, and are measured against the torch module
    in float64; the gradients are those of random cotangents. JAX may err by 1e-12 in float64, and
    elsewhere by 4 times what torch errs, or by what its conditioning explains (`docs/bound.md`).

    Args:
        twin: the torch module, with its weights; the path of a file that `record` wrote: then
            inputs, dtypes and seed are the record's; or another JAX model, which runs on the CPU.
            Random biases show more than zero ones.
        model: an `nnx.Module`; a function of weights and inputs (then `weights` is a loader); or a
            model of Linen, Equinox, haiku or Keras, or a function, alone or as (model, weights).
        inputs: arrays, or trees of arrays, for both sides; floating ones are cast to each dtype.
            A bool, a number of Python's, a text or None is a flag, which both sides get as it is.
        weights: how the twin's weights become the model's: a weight table (`jax_models.weights`),
            the name of one of the model's own layouts, or a loader, a function of a `state_dict` of
            arrays that returns what the function `model` takes, or the weights of a model of
            another framework. By default the model's own layout; a model without `weights` must
            have the twin's already, and its weight gradients are not compared. Beside a JAX model
            it keeps its own, and gradients are compared by name.
        call: how the JAX side is called with the inputs; by default `model(*inputs)`, or
            `model(weights, *inputs)` if it is a function. Both calls return an array, or a tree of
            arrays, whose leaves belong together by name if both sides have names, else in order.
            Of a tuple, all but the first is state.
        call_twin: the same of the torch side; by default `twin(*inputs)`.
        dtypes: those to compare in; by default float64 and float32, or all that a record has.
        platform: where JAX runs: "cpu", "gpu" or "tpu".
        precision: of the model's matrix products: "highest", "high" or "default", as in
            `jax.default_matmul_precision`.
        seed: of the cotangents.
        locate: say by submodule where a pair that fails first departs, forward or else backward.
            Modules of NNX, Linen, Equinox, haiku and Keras are compared with the torch submodules
            that have the same weights, name or place, and values with those that `tap` names; what
            is left is looked for among all numbers that JAX computes. None is True where
            the reference has submodules: not for a record without activations.
        names: the JAX path of a torch submodule, by name, where that does not tell.
        logits: True, or the name of an output as the report gives it (`y['logits']`): its last
            axis is the vocabulary, and the report has KL, |Δ log p| and agreements of it, too.
        kwargs: further inputs, which both sides take by name.
        edge_inputs: compare in float64 at inputs with exact zeros, ties and extremes, too, and with
            masks that hide all or nothing.

    Raises:
        ValueError: the weights do not fit the model, all faults are listed; or a model without
            `weights` has others than the twin.
        TypeError: a function without a loader, or a result that is no tree of arrays.

    """
    platform = checked_platform(platform)
    locate = locate if locate is None else checked_bool("locate", locate)
    checked_bool("edge_inputs", edge_inputs)
    check_functions({}, {"call": call})
    checked_precision(precision)
    if edge_inputs and not is_torch_module(twin):
        raise ValueError("edge_inputs: expected a torch module as `twin`")
    request = requested(inputs, kwargs, dtypes, seed, call_twin)
    with jax.enable_x64(True), open_reference(twin) as source, progress("comparing") as say:
        request = source.completed(request)
        if (locate or names) and source.no_calls:
            raise ValueError(f"locate: {source.no_calls}")
        locate = not source.no_calls if locate is None else locate
        if request.has_kwargs:
            if isinstance(model, nnx.Module) or foreign_model(model) is not None:
                call = with_kwargs(call or called)
            elif callable(model) and not isinstance(model, type):
                model = with_kwargs(model) if weights is not None else _all_kwargs(model)
        start = source.start(request, checked_logits(logits))
        problem, faults, notes = port(start, source.known, model, weights, call)
        names = {} if names is None else _checked_names(names, source, model)
        jax_side = JaxSide(problem, platform, precision=precision)
        reference = source.reference(problem, say)
        try:
            report = measure(
                problem, reference, problem.dtypes, platform, jax_side=jax_side, say=say
            )
        except Exception as error:
            if (note := note_on_inputs(problem, reference.oracle)) is not None:
                error.add_note(note)
            if locate:
                _note_where(error, problem, reference)
            raise
        faults = [*faults, *_fault_of_axes(problem, reference, report, platform, precision)]
        if edge_inputs:
            from parity_tests.engine.edge_inputs import measure_edges

            say("edge inputs")
            of_edges, about_edges = measure_edges(problem, platform, jax_side)
            faults, notes = [*faults, *of_edges], [*notes, *about_edges]
        has_others = weights is None and problem.to_torch is None and not source.known.is_jax
        if has_others and not report.passed:
            refuse_other_weights(problem)
        location = None
        if locate and not report.passed:
            say("where the two sides part")
            location = _departure(problem, reference, report, names)
    report = dataclasses.replace(
        report, faults=(*faults, *report.faults), notes=(*notes, *report.notes), location=location
    )
    call_hooks(report)
    return report


def _checked_names(names: Any, source: Source, model: Any) -> Mapping[str, str]:
    from parity_tests.engine.locate.find import checked_names

    return checked_names(names, source.submodules, model)


def _note_where(error: Exception, problem: Problem, reference: Reference) -> None:
    """Add to an error the JAX module that raised it."""
    from parity_tests.engine.locate.find import where_it_raises

    where = where_it_raises(problem, problem.dtypes[0], reference.oracle)
    if where is not None:
        error.add_note(f"in JAX's {where or 'outermost module'}")


def _fault_of_axes(
    problem: Problem, reference: Reference, report: Report, platform: str, precision: str
) -> Iterator[str]:
    dtype, group, error = next(report.failures, ("", "", None))
    if error is None or group not in GROUPS[:2]:
        return
    side, oracle = JaxSide(problem, platform, precision=precision), reference.oracle

    def run(problem: Problem) -> Results:
        return side.run(problem, dtype, oracle.forward, reference.cast_to)

    fault = fault_of_axes(problem, oracle, error.bound, run)
    if fault is not None:
        yield fault


def _departure(
    problem: Problem, reference: Reference, report: Report, names: Mapping[str, str]
) -> Location:
    """Where a pair first departs, in the dtype of its first failure."""
    from parity_tests.engine.locate.find import find_departure

    dtype, group, error = next(report.failures, (problem.dtypes[0], "", None))
    bound = error.bound if error is not None and dtype == "float64" else 0.0
    is_forward = group in GROUPS[:2]
    theirs = reference.theirs(dtype, is_forward=is_forward)
    return find_departure(problem, theirs, names, bound, is_forward=is_forward)


def _all_kwargs(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: function(*inputs[:-1], **inputs[-1])


def assert_parity(twin: Any, *args: Any, locate: bool | None = None, **kwargs: Any) -> None:
    """Assert that `compare(…)` passes; the message has what fails, and where it begins.

    Where `locate` is not given, it is on if the reference has submodules.
    """
    __tracebackhide__ = True
    report = compare(twin, *args, locate=locate, **kwargs)
    if not report.passed:
        raise AssertionError(f"the two sides differ\n{report.short}")
