"""Monte Carlo arithmetic: how far rounding errors could carry a torch computation.

Each operation, forward and backward, is computed in float64. A number that the dtype cannot
represent is moved by up to 8 ulp at random, and then rounded. The scatter of a few such runs shows
how well the computation is conditioned, whereas a single run in the dtype itself may be lucky.

Source: Parker, Pierce and Eggert, "Monte Carlo arithmetic: how to gamble with floating point and
win" (2000).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from parity_tests.engine.bounds.tolerance import OPERATION_ULPS, ulp
from parity_tests.engine.bounds.torch_decisions import (
    COARSER,
    DOUBLE,
    Decisions,
    decisions_in,
    tensors_of,
    written_tensors,
)
from parity_tests.engine.bounds.torch_functions import function_name

Replace = Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""Takes an operation and its arguments, and returns other arguments."""
aten = torch.ops.aten
FUSED = get_decompositions(
    [
        aten.gelu,
        aten.gelu_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.sigmoid_backward,
        aten.silu_backward,
        aten.tanh_backward,
    ]
)
"""Operations that consist of several steps, which are rounded one by one.

Rounding their result alone would be too little: a GELU, for example, cancels far from zero.
"""


class Float64Mode(TorchDispatchMode):
    """Within this mode, tensors that a module makes without naming a dtype are in float64."""

    def __init__(self):
        super().__init__()
        self._before: list[torch.dtype] = []

    def __enter__(self):
        """Makes float64 torch's default dtype."""
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception):
        """Restores torch's default dtype."""
        torch.set_default_dtype(self._before.pop())
        return super().__exit__(*exception)


def is_rounded_number(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if a single number, such as Gemma's √features, is cast to half precision.

    Such a cast is kept, because both sides need the rounded number. JAX's code rounds it, too.
    """
    is_half = kwargs.get("dtype") in (torch.bfloat16, torch.float16)
    is_cast = is_half and func is aten._to_copy.default
    return is_cast and args[0].ndim == 0 and not args[0].requires_grad


def widen_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operation, all cast to float64 if some of them are in float64.

    A tensor that the operation writes into is not cast.
    """
    if is_rounded_number(func, args, kwargs):
        return args, kwargs
    if kwargs.get("dtype") in COARSER:
        kwargs = {**kwargs, "dtype": COARSER[kwargs["dtype"]]}
    dtypes = {tensor.dtype for tensor in tensors_of((args, kwargs))}
    if dtypes.isdisjoint(COARSER) or dtypes.isdisjoint(DOUBLE):
        return args, kwargs
    written = written_tensors(func, args)

    def widen(leaf: Any) -> Any:
        is_coarse = isinstance(leaf, torch.Tensor) and leaf.dtype in COARSER and leaf.ndim
        if not is_coarse or any(leaf is each for each in written):
            return leaf
        return leaf.to(COARSER[leaf.dtype])

    return tree_map(widen, (args, kwargs))


class InFloat64(Float64Mode):
    """Within this mode, a float64 module ignores casts to a coarser dtype. The casts are counted.

    So the oracle has float64's accuracy even if the module computes a norm, for example, in
    float32. Casts that lead to a decision are not ignored (`torch_decisions.py`). The decisions are
    kept so that other runs can reuse them. `replace` may change the arguments of operations.
    """

    def __init__(self, replace: Replace = lambda func, args, kwargs: (args, kwargs)):
        super().__init__()
        self._replace = replace
        self.casts = 0
        self.cast_to: set[str] = set()
        """The dtypes of casts, as JAX calls them."""
        self.draws: set[str] = set()
        """Operations that draw random numbers."""
        self.decisions: list[torch.Tensor] = []
        self._run = Decisions().run
        self.functions: set[str] = set()
        """The names of the functions that the module calls, as torch's operations have them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operation, in float64 even if it asks for a coarser dtype."""
        self.functions.add(function_name(func))
        args, kwargs = self._replace(func, args, kwargs or {})
        if kwargs.get("dtype") in COARSER and not is_rounded_number(func, args, kwargs):
            if func is aten._to_copy.default and args[0].dtype in COARSER.values():
                self.casts += 1
            self.cast_to.add(str(kwargs["dtype"]).removeprefix("torch."))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.add(str(func).split(".")[1])
        wide = widen_arguments(func, args, kwargs)
        results = self._run(func, (args, kwargs), wide)
        self.decisions += [decision.clone() for decision in decisions_in(func, wide, results)]
        return results


class RandomRounding(Float64Mode):
    """Within this mode, results of operations on float64 tensors are rounded to a dtype at random.

    Numbers that the dtype represents count as exact and are kept. For float64 itself, a number
    counts as exact if bfloat16 represents it and all operands. Comparisons and indices are those of
    a run without rounding, so that rounding does not send a computation down another branch.
    """

    def __init__(self, dtype: str, seed: int, decisions: Sequence[torch.Tensor] = ()):
        super().__init__()
        self._dtype, self._ulp = getattr(torch, dtype), ulp(dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self._decisions = iter(decisions)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operation and rounds the tensors that it writes; views are left alone."""
        kwargs = kwargs or {}
        if func in FUSED:
            with self:
                return FUSED[func](*args, **kwargs)
        args, kwargs = widen_arguments(func, args, kwargs)
        exact_operands = self._dtype == torch.float64 and all(map(_is_in_bfloat16, _floating(args)))
        results = func(*args, **kwargs)
        for decision in decisions_in(func, (args, kwargs), results):
            known = next(self._decisions, decision)
            if known.shape == decision.shape and known.dtype == decision.dtype:
                decision.copy_(known)
        if all(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns):
            for result in _floating(results):
                self._round(result, exact_operands)
        return results

    def noise(self) -> float:
        """A random number between -1 and 1."""
        return float(2 * torch.rand((), generator=self._generator, dtype=torch.float64) - 1)

    def _round(self, x: torch.Tensor, exact_operands: bool) -> None:
        if x.is_complex():
            x = torch.view_as_real(x)
        if self._dtype == torch.float64:
            is_exact = (x.bfloat16() == x) & exact_operands
        else:
            is_exact = x.to(self._dtype) == x
        noise = 2 * torch.rand(x.shape, generator=self._generator, dtype=x.dtype) - 1
        moved = (x * (1 + OPERATION_ULPS * self._ulp * noise)).to(self._dtype).double()
        x.copy_(torch.where(is_exact, x, moved))


def _floating(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in float64 or complex128."""
    return (tensor for tensor in tensors_of(tree) if tensor.dtype in DOUBLE)


def _is_in_bfloat16(x: torch.Tensor) -> bool:
    """True if bfloat16 represents all numbers of the tensor exactly."""
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return bool((real.bfloat16() == real).all())
