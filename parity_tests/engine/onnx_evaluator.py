"""Run an ONNX model by onnx's evaluator: as it is, in float64, and with random rounding.

onnx's format has no float64 attributes, so the model is not rewritten: the operators' numbers are,
once the evaluator has made them, those of subgraphs and functions among them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpFunction, OpRun

from parity_tests.engine.casts import is_rounded, short_decimal
from parity_tests.engine.onnx_operators import OF_FLOAT32, RECURRENT, own_operator, unsupported
from parity_tests.engine.problem import in_dtype
from parity_tests.engine.tolerance import OPERATION_ULPS, ulp

COARSER = {
    int(onnx.TensorProto.FLOAT): "float32",
    int(onnx.TensorProto.FLOAT16): "float16",
    int(onnx.TensorProto.BFLOAT16): "bfloat16",
}
DTYPES_OF_RESULTS = ("to", "dtype", "output_datatype")
"""The attributes that say in what dtype a result is."""
DRAWS = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)
LARGEST_ROOT = 4096
"""Of larger numbers the roots are so close that any number could be one."""
FAMOUS = (math.pi, math.sqrt(2 / math.pi), math.log(2))
Key = tuple[tuple[int, ...], bytes]
"""A constant is its numbers: two that are equal are one."""


class RefusedError(ValueError):
    """What the evaluator cannot run, or not in float64."""


class AsItIs:
    """How a model runs: in its own dtypes."""

    dtype = "float32"
    """Of what it is given."""

    def fed(self, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """An input that the graph declares in a floating dtype."""
        return value.astype(dtype)

    def initializer(self, name: str, value: Any) -> Any:
        """The numbers of an initializer."""
        return value

    def prepare(self, op: OpRun) -> None:
        """Change an operator before it runs."""

    def run(self, op: OpRun, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The results of an operator."""
        why = unsupported(op, args)
        if why is not None:
            raise RefusedError(f"twin: {named(op)}: {why}")
        try:
            with np.errstate(all="ignore"):
                results = compute(*args, **kwargs)
        except RefusedError:
            raise
        except Exception as error:  # whatever the evaluator has to say
            line = " ".join(str(error.__cause__ or error).split())
            raise RefusedError(f"twin: {named(op)}: {line:.200}") from error
        if op.has_subgraph or isinstance(op, OpFunction):
            return results
        return self.results(op, args, results)

    def results(self, op: OpRun, args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """What becomes of an operator's results."""
        return results


class InFloat64(AsItIs):
    """Every number is in float64, and casts to less are ignored.

    Scalar constants such as 1e-5 have all their digits. What the model decides by
    its numbers (comparisons, indices) is kept for runs that are to decide alike. `constants`: the
    initializers that the JAX side does not read. `moves`: by how much of its size a constant is to
    be another. `others`: initializers that are others.
    """

    dtype = "float64"

    def __init__(
        self,
        constants: Collection[str] = (),
        moves: Mapping[Key, np.ndarray] | None = None,
        others: Mapping[str, np.ndarray] | None = None,
    ):
        self._constants, self._moves, self._others = constants, moves or {}, others or {}
        self.constants: dict[Key, np.ndarray] = {}
        """Those that are rounded to float32."""
        self.cast_to: set[str] = set()
        """The dtypes of casts."""
        self.draws: set[str] = set()
        """Operators that draw random numbers."""
        self.decisions: list[np.ndarray] = []

    def fed(self, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """In the dtype that it has."""
        return value

    def initializer(self, name: str, value: Any) -> Any:
        """In float64; if it is no weight, a constant."""
        value = self._others.get(name, value)
        if not is_array(value) or value.ndim == 0 or name in self._constants:
            return self._constant(value)
        return in_dtype(value, self.dtype)

    def prepare(self, op: OpRun) -> None:
        """Make its attributes float64."""
        for name in op.attributes_names_:
            value = getattr(op, name)
            if name in DTYPES_OF_RESULTS and value in COARSER:
                setattr(op, name, int(onnx.TensorProto.DOUBLE))
            elif isinstance(value, list):
                setattr(op, name, [*map(self._constant, value)])
            else:
                setattr(op, name, self._constant(value))
        if isinstance(op, OpFunction):
            op.attributes_ = {name: self._constant(v) for name, v in op.attributes_.items()}

    def _constant(self, value: Any) -> Any:
        """A constant of less than float64, in float64."""
        if not is_coarse(value):
            return value
        wide = meant(value)
        free = is_rounded(wide)
        if free.any():
            key = wide.shape, wide.tobytes()
            self.constants[key] = wide
            wide = wide * (1 + self._moves.get(key, 0.0))
        return wide if isinstance(value, np.ndarray) else np.float64(wide)

    def results(self, op: OpRun, args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """In float64, or refused."""
        operands = [arg for arg in args if is_floating(arg)]
        if not operands:
            self._note_draws(op, args)
            return tuple(map(self._constant, results))
        if op.op_type == "Cast":
            (to,) = (a.i for a in op.onnx_node.attribute if a.name == "to")
            self.cast_to |= {COARSER[to]} if to in COARSER else {*()}
        self._note_draws(op, args)
        is_coarser = any(is_coarse(y) or of_less(operands, y) for y in results)
        if is_coarser or op.op_type in OF_FLOAT32:
            raise RefusedError(
                f"twin: {named(op)} computes in float32 whatever it is given: float64 cannot be "
                "compared"
            )
        self.decisions += [y.copy() for y in decided(results)]
        return results

    def _note_draws(self, op: OpRun, args: Sequence[Any]) -> None:
        in_training = op.op_type == "Dropout" and len(args) > 2 and bool(np.any(args[2]))
        if op.op_type in DRAWS or in_training:
            self.draws.add(op.op_type)


class RandomRounding(InFloat64):
    """In float64, where the results of operators are rounded to a dtype at random.

    As `rounding.RandomRounding` in torch. What a recurrent operator rounds within counts as if its
    operands were off by so much.
    """

    def __init__(
        self, dtype: str, seed: int, decisions: Iterable[np.ndarray], constants: Collection[str]
    ):
        super().__init__(constants)
        self._to, self._random = dtype, np.random.default_rng(seed)
        self._decided = iter(decisions)

    def initializer(self, name: str, value: Any) -> Any:
        """A number of the dtype."""
        return super().initializer(name, in_dtype(value, self._to) if is_array(value) else value)

    def run(self, op: OpRun, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The results of an operator."""
        if op.op_type in RECURRENT:
            args = tuple(self._moved(x) if is_floating(x) else x for x in args)
        return super().run(op, compute, *args, **kwargs)

    def results(self, op: OpRun, args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Rounded; comparisons and indices as they were without."""
        operands = [arg for arg in args if is_floating(arg)]
        if not operands:
            return tuple(map(self._constant, results))
        known = {}
        for decision in decided(results):
            before = next(self._decided, decision)
            alike = before.shape == decision.shape and before.dtype == decision.dtype
            known[id(decision)] = before if alike else decision
        return tuple(
            self._rounded(y, operands) if is_floating(y) else known.get(id(y), y) for y in results
        )

    def _rounded(self, x: np.ndarray, operands: Sequence[np.ndarray]) -> np.ndarray:
        if self._to == "float64":
            given = np.concatenate([np.ravel(operand) for operand in operands])
            kept = (is_short(x) & is_short(given).all()) | np.isin(x, given)
        else:
            kept = in_dtype(x, self._to) == x
        return np.where(kept, x, in_dtype(in_dtype(self._moved(x), self._to), "float64"))

    def _moved(self, x: np.ndarray) -> np.ndarray:
        return x * (1 + OPERATION_ULPS * ulp(self._to) * self._random.uniform(-1, 1, x.shape))


def evaluator(model: onnx.ModelProto, how: AsItIs) -> ReferenceEvaluator:
    """An evaluator that runs a model so, its subgraphs and functions, too.

    Raises:
        RefusedError: it has an operator that the evaluator does not know.

    """

    class Evaluator(ReferenceEvaluator):
        def _load_impl(self, node: Any, input_types: Any = None) -> Any:
            own = None
            if node.domain in ("", "ai.onnx"):
                own = own_operator(node.op_type, self.opsets[node.domain])
            return own or super()._load_impl(node, input_types)

        def _init(self) -> None:
            super()._init()
            self.rt_inits_ = {n: how.initializer(n, a) for n, a in self.rt_inits_.items()}
            for op in self.rt_nodes_:
                how.prepare(op)
                op.run = partial(how.run, op, op.run)

    try:
        return Evaluator(model)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        line = " ".join(str(error).split())
        raise RefusedError(f"twin: onnx's evaluator cannot run the model: {line:.200}") from error


def named(op: OpRun) -> str:
    """An operator, and the name of its node."""
    node = op.onnx_node
    return f"{op.op_type} {node.name or next(filter(None, node.output), '')}"


def is_array(value: Any) -> bool:
    """Is it an array or a scalar of NumPy's?"""
    return isinstance(value, np.ndarray | np.generic)


def is_floating(value: Any) -> bool:
    """Is it an array of real numbers?"""
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)


def is_coarse(value: Any) -> bool:
    """Is it an array of a dtype that has less digits than float64, and becomes it?"""
    return is_array(value) and str(value.dtype) in COARSER.values()


def is_short(x: np.ndarray) -> np.ndarray:
    """Which numbers are some of bfloat16?"""
    return x.astype(jnp.bfloat16) == x


def meant(value: Any) -> np.ndarray:
    """In float64; a single number, where it can be told, as its author meant it.

    That is one of few digits, such as 1e-5, or the root of an integer, as in GELU and attention.
    """
    wide = np.asarray(value, np.float64)
    if wide.size != 1 or not is_rounded(wide).all():
        return wide
    number = wide.item()
    roots = [
        math.copysign(math.sqrt(round(square)) ** power, number)
        for square, power in ((number**2, 1), (number**-2, -1))
        if 1 < square < LARGEST_ROOT
    ]
    short = short_decimal(wide.reshape(()))
    for candidate in ([] if short is None else [short]) + roots + [*FAMOUS]:
        if np.float32(candidate) == wide:
            return np.full(wide.shape, candidate)
    return wide


def decided(results: Sequence[Any]) -> list[np.ndarray]:
    """The comparisons and indices among results."""
    return [y for y in results if isinstance(y, np.ndarray) and y.dtype.kind in "iub"]


def of_less(operands: Sequence[np.ndarray], result: Any) -> bool:
    """Has a result only numbers of float32, computed from operands that have others?"""
    if not is_floating(result) or (rounded := result[is_rounded(result)]).size == 0:
        return False
    finite = result[np.isfinite(result)]
    return (
        bool(np.all(finite.astype(np.float32) == finite))
        and any(np.any(x.astype(np.float32) != x) for x in operands)
        and not all(np.isin(rounded, np.concatenate([np.ravel(x) for x in operands])))
    )
