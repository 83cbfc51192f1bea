"""Compares any torch module with any JAX port of it. Read this file first.

`compare` goes from the arguments to the verdict in one function, stage by stage. Each stage has a
folder: `references` holds what a model can be measured against, `candidates` loads and runs a JAX
model, `bounds` decides how large an error rounding can explain, `verdict` compares the results and
reports the errors, `traces` records the calls of both sides, and `locate` finds the submodule where
the two sides first differ. `problem.py` defines what both sides run, and `results.py` holds the
results of one side.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jax_models.checks.values import checked_bool
from jax_models.weights import Table
from parity_tests.engine.bounds.tolerance import FLOAT64
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.port import port, refuse_other_weights
from parity_tests.engine.locate.find import checked_names, find_departure, where_it_raises
from parity_tests.engine.locate.location import Location
from parity_tests.engine.problem import (
    PRECISIONS,
    Problem,
    check_functions,
    checked_choice,
    checked_platform,
    is_torch_module,
)
from parity_tests.engine.progress import progress
from parity_tests.engine.references.open_reference import open_reference
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.report_hooks import REPORT_HOOKS
from parity_tests.engine.results import GROUPS
from parity_tests.engine.verdict.channel_order import note_on_inputs
from parity_tests.engine.verdict.measure import measure, notes_on_arguments
from parity_tests.engine.verdict.report import Report
from parity_tests.engine.verdict.transposed import faults_of_transposed_kernels

if TYPE_CHECKING:
    import torch

JaxModel = nnx.Module | Callable[..., Any] | tuple[Any, Any]
"""A model of NNX or another framework, or a function, given alone or as (model, weights)."""
Loader = Callable[[Mapping[str, Any]], Any]
"""Turns a `state_dict` into the JAX side's weights: an `nnx.Module` or any tree of arrays."""


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
    arrays: bool = False,
) -> Report:
    """Compares a torch module with its JAX port: outputs, states and gradients, in each dtype.

    Copies of both models run in evaluation mode in each dtype, and their results are measured
    against those of the torch module in float64. For the gradients, both sides backpropagate the
    same random cotangents. In float64, JAX may err by at most 1e-12. In other dtypes it may err by
    4 times as much as torch, or by as much as the conditioning of the computation explains
    (`docs/design/bounds.md`).

    Args:
        twin: the torch module, with its weights; or the path of a file that `record` wrote, which
            brings its own inputs, dtypes and seed; or another JAX model, which runs on the CPU.
            Give it random biases, because they reveal more faults than zeros.
        model: an `nnx.Module`; a function of weights and inputs (then `weights` is a loader); or a
            model of Linen, Equinox, haiku or Keras, or a function, alone or as (model, weights).
        inputs: arrays, or trees of arrays, for both sides. Floating arrays are cast to each dtype.
            Both sides receive a bool, a Python number, a string or None unchanged.
        weights: the conversion of the twin's weights to the model's: a weight table
            (`jax_models.weights`), the name of one of the model's own layouts, or a loader. A
            loader is a function of a `state_dict` of arrays. It returns the weights that the
            function `model` takes, or those of a model of another framework. By default, the
            model's own layout is used. A model without a layout must already have the twin's
            weights, and its weight gradients are not compared. If the twin is a JAX model, the
            model keeps its own weights, and gradients are compared by name.
        call: how to call the JAX side; by default `model(*inputs)`, or `model(weights, *inputs)` if
            it is a function. `call` and `call_twin` return an array or a tree of arrays. Leaves are
            compared by name if both sides have the same names, otherwise in order. In a tuple,
            everything after the first entry is state.
        call_twin: how to call the torch side; by default `twin(*inputs)`.
        dtypes: the dtypes to compare in; by default float64 and float32, or all that a record has.
        platform: where JAX runs: "cpu", "gpu" or "tpu".
        precision: the precision of the model's matrix products: "highest", "high" or "default", as
            in `jax.default_matmul_precision`.
        seed: the seed of the random cotangents; by default 0, or that of the record.
        locate: whether to name the submodule in which a failing pair first departs: in the forward
            pass or, if the forward pass agrees, in the backward pass. Modules of NNX, Linen,
            Equinox, haiku and Keras are compared with the torch submodules that have the same
            weights, name or place. A value that `tap` names is compared with the output of the
            torch submodule of that name. The outputs of all other torch submodules are searched for
            among all arrays that JAX computes. None means True unless the reference is a record
            without activations.
        names: a dict from names of torch submodules to the paths of their JAX counterparts, for
            submodules that are not paired automatically.
        logits: True, or the name of an output as the report gives it (`y['logits']`), if its last
            axis is a vocabulary. The report then also shows the KL divergence, |Δ log p|, and how
            often the likeliest tokens agree.
        kwargs: further inputs, which both sides receive as keyword arguments.
        edge_inputs: whether to compare, in float64, also on exact zeros, ties and extreme values,
            and with masks that hide everything or nothing.
        arrays: whether `report.tensors` also holds the arrays of both sides, for you to look at, as
            `report.tensors["float64"]["outputs"]["y"].torch_array` and `.jax_array`. By default it
            holds only their errors, so that a report needs little memory. A record has torch's
            arrays in float64 only.

    Raises:
        ValueError: the weights do not fit the model (the error lists all faults), or the model
            was given without `weights` and does not have the twin's weights.
        TypeError: a function comes without a loader, or a result is not a tree of arrays.

    """
    # Refuse wrong arguments before anything runs.
    platform = checked_platform(platform)
    checked_choice("precision", precision, PRECISIONS)
    checked_bool("edge_inputs", edge_inputs)
    checked_bool("arrays", arrays)
    check_functions({}, {"call": call})
    if edge_inputs and not is_torch_module(twin):
        raise ValueError("edge_inputs: expected a torch module as `twin`")

    # JAX computes in float64 only with x64 on. `say` shows the progress on the terminal.
    with jax.enable_x64(True), open_reference(twin) as reference, progress("comparing") as say:
        # Check the inputs. A recorded file has inputs, dtypes and a seed of its own.
        problem = reference.make_problem(inputs, kwargs, dtypes, seed, call_twin, logits)
        has_kwargs = bool(kwargs) or reference.has_kwargs
        locate = reference.checked_locate(locate, names)

        # Give both sides the same weights, which completes the problem. A weight that the JAX side
        # cannot hold or does not read is a fault, even if no output shows it.
        problem, faults, notes = port(
            problem, reference.weights, model, weights, call, has_kwargs=has_kwargs
        )
        names = checked_names({} if names is None else names, reference.submodules, model)

        # Run the reference in float64: both sides are measured against these results, which have
        # no rounding errors of the dtypes that are compared.
        reference.run(problem, say)

        # Run both sides in each dtype. JAX passes if its error is not much larger than the
        # reference's own error, or if rounding explains it (`bounds/tolerance.py`).
        jax_side = JaxSide(problem, platform, precision=precision)
        try:
            report = measure(
                problem,
                reference,
                problem.dtypes,
                platform,
                jax_side=jax_side,
                keep_arrays=arrays,
                say=say,
            )
        except Exception as error:
            _add_notes(error, problem, reference, locate=bool(locate))
            raise

        # Random inputs never hit the kink of a function, such as relu at 0, so compare there, too.
        if edge_inputs:
            from parity_tests.engine.verdict.edge_inputs import measure_edges  # needs torch

            say("edge inputs")
            edge_faults, edge_notes = measure_edges(problem, platform, jax_side)
            faults, notes = [*faults, *edge_faults], [*notes, *edge_notes]

        # A square kernel that was loaded without transposing it raises no error, so check whether
        # the results agree if it is transposed.
        faults = [*faults, *faults_of_transposed_kernels(problem, reference, report, jax_side)]

        # A function of JAX may have another default than torch's function of the same name.
        notes = [*notes, *notes_on_arguments(problem, reference, report, jax_side)]

        # If the pair fails, make sure that a model without `weights` has the reference's weights.
        # Then find the first submodule whose own code departs.
        location = None
        if not report.passed:
            if weights is None and problem.to_torch is None and not reference.weights.is_jax:
                refuse_other_weights(problem)
            if locate:
                say("where the two sides part")
                location = _departure(problem, reference, report, names)

    # Add the faults, notes and location that were found outside of `measure`, and pass the report
    # to the hooks, such as that of the pytest plugin.
    report = dataclasses.replace(
        report, faults=(*faults, *report.faults), notes=(*notes, *report.notes), location=location
    )
    for hook in REPORT_HOOKS:
        hook(report)
    return report


def _add_notes(error: Exception, problem: Problem, reference: Reference, *, locate: bool) -> None:
    """Adds hints to an error of the JAX side: an order of axes that runs, and the module."""
    if (note := note_on_inputs(problem, reference.oracle)) is not None:
        error.add_note(note)
    if locate:
        where = where_it_raises(problem, problem.dtypes[0], reference.oracle)
        if where is not None:
            error.add_note(f"in JAX's {where or 'outermost module'}")


def _departure(
    problem: Problem, reference: Reference, report: Report, names: Mapping[str, str]
) -> Location:
    """The submodule where a pair first departs, in the dtype of its first failure."""
    dtype, group, error = next(report.failures, (problem.dtypes[0], "", None))

    # In float64, constants that are rounded to float32 widen the bounds of some results. Allow
    # errors of that size for the values inside the model, too.
    bound = 0.0
    if error is not None and dtype == "float64":
        named = [e for tensors in report.tensors[dtype].values() for e in tensors.values()]
        excused = [e.bound for e in named if e.passed and e.jax > FLOAT64]
        bound = max(error.bound, *excused, 0.0)

    # If the outputs already differ, the gradients need not be searched. If nothing could be
    # measured, as when the two sides return different structures, there are none.
    is_forward = group in GROUPS[:2] or not report.tensors
    trace = reference.runs.trace(dtype, is_forward=is_forward, moves=report.constant_moves)
    trace = dataclasses.replace(trace, cast_to=reference.cast_to)
    return find_departure(problem, trace, names, bound, is_forward=is_forward)


def assert_parity(twin: Any, *args: Any, locate: bool | None = None, **kwargs: Any) -> None:
    """Asserts that `compare(…)` passes; the message says what fails, and where the sides part.

    The arguments are those of `compare`, but by default `locate` is on unless the reference is a
    record without activations.
    """
    __tracebackhide__ = True
    report = compare(twin, *args, locate=locate, **kwargs)
    if not report.passed:
        raise AssertionError(f"the two sides differ\n{report.short}")


class Pair:
    """A torch module and its JAX port, for `twinscan parity FILE.py`.

    The arguments are those of `compare`. FILE.py defines pairs at module level, or functions
    without arguments that are annotated with `-> Pair`. Such a function is called when its pair is
    compared.
    """

    def __init__(
        self, twin: torch.nn.Module, model: Callable[..., Any], *inputs: Any, **options: Any
    ) -> None:
        inspect.signature(compare).bind(twin, model, *inputs, **options)
        self.twin, self.model, self.inputs, self.options = twin, model, inputs, options

    def compare(self, **options: Any) -> Report:
        """The report of `compare`; `options` override those of the pair."""
        return compare(self.twin, self.model, *self.inputs, **{**self.options, **options})
