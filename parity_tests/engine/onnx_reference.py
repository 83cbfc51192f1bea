"""An ONNX model as the reference: what onnx's own evaluator says."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import onnx

from jax_models.importers.onnx import graphs
from parity_tests.engine.constants import numbered
from parity_tests.engine.faults import not_a_number
from parity_tests.engine.known import Known
from parity_tests.engine.logits import logits_array
from parity_tests.engine.onnx_evaluator import (
    AsItIs,
    InFloat64,
    RandomRounding,
    evaluator,
    is_array,
    is_floating,
    meant,
)
from parity_tests.engine.problem import Arrays, Problem, in_dtype, is_flag
from parity_tests.engine.progress import Say
from parity_tests.engine.reference import Reference, Said, said
from parity_tests.engine.results import (
    ErrorsByGroup,
    Results,
    errors_of,
    grouped,
)
from parity_tests.engine.source import Source
from parity_tests.engine.tolerance import ROUNDED_RUNS

WEIGHTED = (
    "BatchNormalization",
    "Conv",
    "ConvTranspose",
    "Gather",
    "Gemm",
    "GroupNormalization",
    "GRU",
    "InstanceNormalization",
    "LayerNormalization",
    "LSTM",
    "MatMul",
    "PRelu",
    "RMSNormalization",
    "RNN",
)
"""The operators whose initializers are weights; an addend or factor may be a constant."""


@dataclasses.dataclass(frozen=True, eq=False)
class OnnxTwin:
    """A model, and how it runs."""

    model: onnx.ModelProto
    how: AsItIs = dataclasses.field(default_factory=AsItIs)

    @functools.cached_property
    def arrays(self) -> Arrays:
        """The initializers by name; a single number has all its digits."""
        tensors = {
            tensor.name: onnx.numpy_helper.to_array(tensor)
            for graph in graphs(self.model.graph)
            for tensor in graph.initializer
        }
        return {
            name: meant(array) if is_floating(array) and not array.ndim else array
            for name, array in tensors.items()
            if array.dtype.kind != "O"
        }

    def state_dict(self) -> Arrays:
        """By name."""
        return self.arrays

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The outputs by name, or the only one; inputs without a name are in the graph's order."""
        held = {tensor.name for tensor in self.model.graph.initializer}
        expected = {i.name: i.type for i in self.model.graph.input if i.name not in held}
        in_order = [name for name in expected if name not in named]
        if not named.keys() <= expected.keys() or len(in_order) != len(inputs):
            by_name = f" and {', '.join(named)}" if named else ""
            raise ValueError(
                f"inputs: the ONNX model has {', '.join(expected)}, got {len(inputs)}{by_name}"
            )
        given = dict(zip(in_order, inputs, strict=True)) | named
        feeds = {name: self._fed(name, value, expected[name]) for name, value in given.items()}
        names = [output.name for output in self.model.graph.output]
        outputs = [*evaluator(self.model, self.how).run(names, feeds)]
        return outputs[0] if len(names) == 1 else dict(zip(names, outputs, strict=True))

    def _fed(self, name: str, value: Any, kind: onnx.TypeProto) -> Any:
        """An input as the graph declares it."""
        if not kind.HasField("tensor_type"):
            return value
        array = np.asarray(value)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
        if is_floating(np.zeros((), dtype)) != is_floating(array):
            raise TypeError(f"inputs: {name}: the ONNX model expects {dtype}, got {array.dtype}")
        return self.how.fed(array, dtype) if is_floating(array) else array.astype(dtype)


class OnnxReference(Reference):
    """An ONNX model, run by onnx's evaluator when it is asked."""

    sides = ("ONNX", "JAX")

    def __init__(self, problem: Problem, say: Say):
        if "bfloat16" in problem.dtypes:
            raise ValueError("dtypes: an ONNX model runs in float64 and float32, got bfloat16")
        self.problem, self._say, self.seed = problem, say, problem.seed
        self.name = problem.twin.model.graph.name or "ONNX"
        say("ONNX in float64")
        self._mode = InFloat64(problem.constants)
        self.oracle = run(problem, self._mode)
        self.cast_to = sorted(self._mode.cast_to)
        self.faults = [
            *not_a_number(self.oracle, "float64 ONNX"),
            *self._random_results(),
        ]
        self.notes = ["gradients are not compared: ONNX has none"]
        if coarser := [dtype for dtype in self.cast_to if dtype != "float32"]:
            self.notes.append(
                f"ONNX casts to {', '.join(coarser)}: float64 is compared without these casts"
            )

    def _random_results(self) -> Iterator[str]:
        if self._mode.draws and not alike(self.oracle, run(self.problem, InFloat64())):
            yield (
                f"ONNX: the results are random, by {', '.join(sorted(self._mode.draws))}: compare "
                "without"
            )

    def _said(self, dtype: str) -> Said:
        self._say(f"ONNX in {dtype}")
        logits = logits_array(self.problem.logits, self.oracle) if self.problem.logits else None
        results = self.oracle if dtype == "float64" else run(self.problem, AsItIs())
        found = said(results, self.oracle, f"{dtype} ONNX", logits)
        if dtype == "float64" and self.cast_to:
            found = dataclasses.replace(found, dtypes=self.said("float32").dtypes)
        return found

    def _rounded(self, dtype: str) -> Iterator[ErrorsByGroup]:
        self._say(f"ONNX, rounded to {dtype} at random")
        problem, decisions = self.problem, self._mode.decisions
        for seed in range(ROUNDED_RUNS):
            rounding = RandomRounding(dtype, seed, decisions, problem.constants)
            yield errors_of(run(problem, rounding, dtype), self.oracle)

    def constants(self) -> dict[str, np.ndarray]:
        """The constants that may be moved within the rounding of float32."""
        return numbered(self._mode.constants.values())

    def with_constants(self, moves: Sequence[np.ndarray]) -> Results:
        """The float64 results where each constant is scaled by a relative perturbation."""
        if not moves:
            return self.oracle
        by_key = dict(zip(self._mode.constants, moves, strict=True))
        return run(self.problem, InFloat64(self.problem.constants, by_key))


def run(problem: Problem, how: AsItIs, inputs: str | None = None) -> Results:
    """The model's results; `inputs` are numbers of that dtype."""

    def given(x: Any) -> Any:
        return x if is_flag(x) else in_dtype(in_dtype(x, inputs or how.dtype), how.dtype)

    twin = OnnxTwin(problem.twin.model, how)
    result = problem.call_twin(twin, *jax.tree.map(given, problem.inputs))
    return Results(grouped(result, "ONNX", lambda leaf: leaf if is_array(leaf) else None))


def alike(results: Results, others: Results) -> bool:
    """Are they the same numbers?"""
    return all(
        np.array_equal(array, others[group][name], equal_nan=True)
        for group, named in results.items()
        for name, array in named.items()
    )


def source_of(model: onnx.ModelProto | str | os.PathLike[str]) -> Source:
    """What a model has, or that of a file.

    Raises:
        ValueError: the file is no model of ONNX.
        OSError: it cannot be opened.

    """
    if not isinstance(model, onnx.ModelProto):
        try:
            model = onnx.load(os.fspath(model))
        except OSError:
            raise
        except Exception as error:  # whatever protobuf raises
            raise ValueError(f"twin: {os.fspath(model)} is no model of ONNX") from error
    twin = OnnxTwin(model)
    floating = [name for name, array in twin.arrays.items() if is_floating(array)]
    read = {
        name
        for graph in graphs(model.graph)
        for node in graph.node
        if node.op_type in WEIGHTED
        for name in node.input
    }

    def matters(problem: Problem, key: str) -> bool:
        others = {key: twin.arrays[key] + 1}
        return not alike(run(problem, InFloat64()), run(problem, InFloat64(others=others)))

    known = Known(
        twin.arrays,
        {name: name for name in floating},
        [name for name in floating if name in read],
        matters,
    )
    return Source(twin, known, OnnxReference, no_calls="a model of ONNX has no submodules")
