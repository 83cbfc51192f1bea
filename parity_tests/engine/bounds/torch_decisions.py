"""Decisions of a torch module in float64: integers, masks and roundings of real numbers.

A bucket, an argmax or a threshold jumps where its operand is rounded differently. So a decision
does not ignore casts, as the rest of the float64 run does, but is made from these numbers:

- Numbers that depend on integers and constants alone, such as the logarithms of distances in T5's
  buckets, are computed in the module's own dtypes. If nobody names the dtype, it is float32.
- A number that the module casts to a coarser dtype is rounded to it. Operations that move numbers
  keep the rounded number, and elementwise arithmetic, which is the same everywhere, continues in
  the coarser dtype. After any other operation, such as a sum or an exponential, the rounding errors
  depend on the library, so the cast is ignored.
- All other numbers are read with `DECISION_BITS` bits, so that rounding errors of float64 decide
  nothing.

`candidates/jax_decisions.py` does the same for JAX.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from parity_tests.engine.bounds.tolerance import DECISION_BITS

aten = torch.ops.aten
COARSER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
DOUBLE = {*COARSER.values()}
NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
ROUNDINGS = ("ceil", "floor", "round", "trunc")
"""Decisions whose results are real numbers."""
ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "sqrt")
"""Elementwise operations whose results IEEE 754 determines."""
MOVES = (
    *("abs", "amax", "amin", "cat", "clamp", "clone", "constant_pad_nd", "copy", "flip", "gather"),
    *("index", "index_select", "masked_fill", "max", "maximum", "min", "minimum", "neg", "relu"),
    *("repeat", "roll", "sort", "stack", "_to_copy", "topk", "where"),
)
"""Operations that only move, choose or negate numbers. Views do so, too."""


class Written(NamedTuple):
    """A number as the module computes it, in the module's own dtype."""

    value: torch.Tensor
    is_discrete: bool
    """Whether the number depends on integers and constants alone."""


class Decisions:
    """Runs the operations of a module in float64, and makes its decisions."""

    def __init__(self):
        self._written: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, given: tuple[Any, Any], wide: tuple[Any, Any]) -> Any:
        """The results of an operation.

        Args:
            func: the operation.
            given: its positional and its keyword arguments, as the module gives them.
            wide: the same in float64.

        """
        numbers = tree_map(read, wide) if _name(func) in ROUNDINGS else None  # it may change `wide`
        results = func(*wide[0], **wide[1])
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._forget(func, wide[0])
            return results
        written = self._as_written(func, given, results)
        if decisions := [*decisions_in(func, wide, results)]:
            if written is None:
                args, kwargs = numbers or tree_map(read, wide)
                decided = func(*args, **kwargs)
            else:
                decided = written[0]
            for decision, known in zip(decisions, decisions_in(func, wide, decided), strict=False):
                if known.shape == decision.shape:
                    decision.copy_(known)
        self._keep(func, wide[0], results, written)
        return results

    def _as_written(self, func: Any, given: Any, results: Any) -> tuple[Any, bool] | None:
        """The results in the module's own dtypes, and whether they are discrete, if known."""
        operands = [*filter(is_real, tensors_of(given))]
        has_results = any(map(is_real, tensors_of(results)))
        if not operands and not has_results:
            return None
        if func is aten.lift_fresh.default:  # the constant of a `torch.tensor(…)`
            return narrow(given[0][0]), True
        is_cast = func is aten._to_copy.default and given[1].get("dtype") in COARSER
        if has_results and not is_cast and any(each not in self._written for each in operands):
            return None
        known = [self._written.get(operand) for operand in operands]
        if is_cast and known == [None]:
            known = [Written(operands[0], is_discrete=False)]
        if not has_results and any(each and not each.is_discrete for each in known):
            # a decision between a number that is cast and others, which are in float32 for a user
            pairs = zip(operands, known, strict=True)
            known = [each or Written(narrow(operand), is_discrete=False) for operand, each in pairs]
        if None in known:
            return None
        is_discrete = all(each.is_discrete for each in known)
        keeps = func.is_view or _name(func) in (*MOVES, *ARITHMETIC, *ROUNDINGS)
        if not (is_discrete or keeps or not has_results):
            return None
        values = {id(a): each.value for a, each in zip(operands, known, strict=True)}
        args, kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), given)
        with _default_float32(), contextlib.suppress(RuntimeError, NotImplementedError):
            return func(*args, **kwargs), is_discrete
        return None

    def _keep(self, func: Any, args: Any, results: Any, written: Any) -> None:
        """Keeps the results in the module's own dtypes, where these are coarser than float64."""
        if written is None:
            self._forget(func, args)
            return
        for result, own in zip(tensors_of(results), tensors_of(written[0]), strict=False):
            if own.dtype in COARSER and is_real(result) and own.shape == result.shape:
                self._written[result] = Written(own, written[1])

    def _forget(self, func: Any, args: Any) -> None:
        """Forgets the tensors that an operation changes, and their views."""
        for changed in filter(is_real, written_tensors(func, args)):
            memory = changed.untyped_storage().data_ptr()
            for tensor in [*self._written]:
                if tensor.untyped_storage().data_ptr() == memory:
                    del self._written[tensor]


def narrow(x: torch.Tensor) -> torch.Tensor:
    """The numbers in the dtype that they have for a user, who runs in float32."""
    return x.to(NARROW.get(x.dtype, x.dtype))


def read(leaf: Any) -> Any:
    """The number from which a decision is made, for an operand in float64."""
    if isinstance(leaf, float):
        return float(read(torch.tensor(leaf, dtype=torch.float64)))
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float64:
        return leaf
    scaled = leaf * (2.0 ** (52 - DECISION_BITS) + 1)
    return torch.where(leaf.abs() < 2.0**DECISION_BITS, scaled - (scaled - leaf), leaf)


def decisions_in(func: Any, args: Any, results: Any) -> Iterator[torch.Tensor]:
    """The decisions among the results of an operation on real or complex numbers."""
    is_rounding = _name(func) in ROUNDINGS
    found = [each for each in tensors_of(results) if is_rounding or not is_real(each)]
    if found and func is not aten.view.dtype and any(map(is_real, tensors_of(args))):
        yield from found


def written_tensors(func: Any, args: Any) -> list[Any]:
    """The arguments that an operation writes into."""
    if not func._schema.is_mutable:
        return []
    return [
        args[i]
        for i, argument in enumerate(func._schema.arguments[: len(args)])
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def is_real(x: Any) -> bool:
    """True for a tensor of real or complex numbers."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results; ten times as fast as a traversal by pytree."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(part)


@functools.cache
def _name(func: Any) -> str:
    """The name of an operation, the same whether it writes into its operand or not."""
    return func.overloadpacket.__name__.removesuffix("_")


@contextlib.contextmanager
def _default_float32() -> Iterator[None]:
    """A context in which float32 is torch's default dtype, as in a user's program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
