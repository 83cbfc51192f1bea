"""The tolerances: how large an error may be. No other file defines one.

The oracle is y64, the result of the torch twin in float64 with the same weights and inputs. The
error of a tensor is the root mean square of its difference from y64, relative to the root mean
square of y64.

- float64: the relative error of JAX is at most `FLOAT64`. Both sides ignore casts to narrower
  dtypes, except where a decision is made from the rounded number (`torch_decisions.py`). If one
  side holds a constant rounded to float32, the float64 digits of the other side replace it
  (`rounded_constants.py`). If no float64 digits are known, a tensor may err by K times
  as much as it moves when such constants are off by `CONSTANT_ULPS`, but by no more than its bound
  in float32.
- float32 and bfloat16: JAX errs by at most K times as much as torch errs in that dtype, or by K ·
  `FLOOR_ULPS` ulp if torch happens to err by less than `FLOOR_ULPS`.
- If JAX errs by more, torch's single run may have been lucky: in an ill-conditioned computation, a
  few roundings cause most of the error. So the twin runs up to `ROUNDED_RUNS` times in float64,
  with the result of each operation off by up to `OPERATION_ULPS` at random (`torch_rounding.py`,
  `candidates/jax_rounding.py`). The largest error of these runs is the bound, if it is larger. The
  runs stop as soon as they settle the verdict: see `raise_bounds`.
- No bound is above `UNDETERMINED`: if rounding alone causes such an error in a dtype, the dtype
  does not determine the result, and the comparison shows nothing.

So the bound grows with the conditioning of the computation, as rounding errors do, and with nothing
else. `benchmarks/bound.py` measures how close to their bounds the errors of random configurations
come. A twin that errs by more than `UNSTABLE` in float32 is reported as unstable. A group of
tensors, such as all weight gradients, is judged by the error that is the largest relative to its
bound.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

K = 4.0
"""How many times as much as torch JAX may err."""
FLOOR_ULPS = 1.0
"""The smallest error of torch that the bound assumes, in ulp of the dtype."""
OPERATION_ULPS = 8.0
"""How far an operation may be off, in ulp. XLA's tanh alone is off by up to 5.6 ulp on a CPU."""
ROUNDED_RUNS = 8
"""The largest number of runs with random rounding."""
CLEAR_FACTOR = 1e4
"""An error clearly exceeds n runs if it is `CLEAR_FACTOR` ** (1 / n) times that of each of them.

With a probability of about p ** n, all n runs err by less than a fraction p of the largest error
that rounding can cause. So rounding explains an error that clearly exceeds them less than once in
`CLEAR_FACTOR` times.
"""
FLOAT64 = 1e-12
"""The largest relative error of JAX that is accepted in float64."""
CONSTANT_ULPS = 8.0
"""How far a constant computed in float32 may be off, in ulp of float32.

That is more than its own rounding: the power in 10000^(-i/d), for example, enlarges the rounding of
the exponent.
"""
DECISION_BITS = 44
"""How many bits of a float64 number a decision reads, such as a comparison or a floor.

So rounding errors of up to 2^-45, or 128 ulp, decide nothing: 3 − 4e-16 counts as 3. Numbers above
2^44 are read in full, because they may be integers.
"""
DECIMAL_DIGITS = 6
"""How many decimal digits a short float32 constant, such as 1e-5, may have.

Such a constant is assumed to be a decimal that a person wrote, and float64 uses that decimal.
"""
UNSTABLE = 1e-2
"""The error in float32 above which a reference is reported as unstable."""
UNDETERMINED = 0.5
"""The largest bound. If an error exceeds it, the verdict is `undetermined`."""


def rms(x: np.ndarray) -> float:
    """Root mean square, without overflow; 0 for an empty array."""
    x = np.atleast_1d(np.abs(x)).astype(np.float64, copy=False)
    largest = float(np.max(x, initial=0))
    if not 0 < largest < np.inf:
        return largest
    x /= largest
    return largest * float(np.sqrt(np.mean(np.square(x, out=x))))


def ulp(dtype) -> float:
    """The spacing of the dtype's numbers at 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def floor(dtype) -> float:
    """The smallest bound in the dtype."""
    return FLOAT64 if dtype == np.float64 else K * FLOOR_ULPS * ulp(dtype)


@dataclasses.dataclass(frozen=True)
class Error:
    """The relative errors of JAX and torch in a tensor, and the bound on JAX's error."""

    jax: float
    torch: float
    bound: float
    unstable: bool
    tensor: str
    """The tensor's name. For a group, the tensor with the largest error relative to its bound."""
    torch_array: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    """The tensor on the torch side, if `compare` was called with `arrays=True`."""
    jax_array: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    """The tensor on the JAX side, likewise."""

    @property
    def ratio(self) -> float | None:
        """JAX's error over torch's; None if torch has no error, as in float64: it is the oracle."""
        return self.jax / self.torch if self.torch else None

    @property
    def share(self) -> float:
        """The share of the bound that JAX's error takes; infinite if the error is not finite."""
        return self.jax / self.bound if np.isfinite(self.jax) else np.inf

    @property
    def passed(self) -> bool:
        """True if JAX's error is within the bound; NaN and infinity never are."""
        return self.share <= 1

    @property
    def verdict(self) -> str:
        """`pass`, `FAIL`, or `undetermined` if even the largest bound is exceeded."""
        if self.passed:
            return "pass"
        return "undetermined" if self.bound == UNDETERMINED else "FAIL"


Tensors = Mapping[str, np.ndarray]


def relative_errors(
    tensors: Tensors, oracle: Tensors, *, negligible: bool = False
) -> dict[str, float]:
    """Each tensor's relative error; the names and shapes must be the oracle's.

    With `negligible`, a tensor so small that it is only rounding beside the largest one, such as
    the gradient of an attention's key bias, is measured relative to the largest tensor.
    """
    if tensors.keys() != oracle.keys():
        raise ValueError(f"expected the tensors {sorted(oracle)}, got {sorted(tensors)}")
    scales = {
        name: rms(np.where(np.isfinite(expected), expected, 0)) for name, expected in oracle.items()
    }
    largest = max(scales.values(), default=0.0)
    errors = {}
    for name, expected in oracle.items():
        actual = tensors[name]
        if actual.shape != expected.shape:
            raise ValueError(f"{name}: expected shape {expected.shape}, got {actual.shape}")
        scale = scales[name]
        if negligible and scale <= FLOAT64 * largest:
            scale = largest
        errors[name] = rms(difference(actual, expected)) / (scale or 1.0)
    return errors


def difference(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The difference in float64 (complex128 for complex arrays); ∞ − ∞ is zero."""
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    actual, expected = (x.astype(wide, copy=False) for x in (actual, expected))
    both = np.isinf(expected) & (actual == expected)
    if both.any():
        actual, expected = (np.where(both, 0, x) for x in (actual, expected))
    return actual - expected


def raise_bounds(
    bounds: Mapping[Any, float],
    errors: Mapping[Any, float],
    runs: Iterable[Mapping[Any, float]],
    clear_excess: Mapping[Any, float],
) -> Mapping[Any, float]:
    """The bounds, raised to the largest errors of runs with random rounding where these are larger.

    The runs stop as soon as each error is either within its bound or clearly too large. Before the
    first run, an error above `clear_excess` is clearly too large; after n runs, `CLEAR_FACTOR`
    decides.
    """
    for count, scatter in enumerate(itertools.chain([{}], runs)):
        bounds = {name: max(bound, scatter.get(name, 0.0)) for name, bound in bounds.items()}
        if count:
            clear_excess = {
                name: CLEAR_FACTOR ** (1 / count) * bound for name, bound in bounds.items()
            }
        if all(
            errors[n] <= bound or not errors[n] <= clear_excess[n] for n, bound in bounds.items()
        ):
            break
    return bounds


def tensor_errors(
    dtype,
    *,
    torch: Mapping[str, float],
    jax: Mapping[str, float],
    torch32: Mapping[str, float],
    rounded: Iterable[Mapping[str, float]],
    constants: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Error]:
    """The errors of a group's tensors in `dtype`, with their bounds.

    Args:
        dtype: the dtype of both runs.
        torch: the reference's errors in that dtype.
        jax: JAX's errors in that dtype.
        torch32: the reference's errors in float32, which tell whether it is stable.
        rounded: the errors of each of the reference's runs with random rounding.
        constants: how far each tensor moves when the constants that are known only to float32's
            precision change by as much as their rounding. In float64, a tensor may err by K times
            as much, but by no more than its bound in float32. By default there are none.

    """
    float32_bounds = {name: max(floor(np.float32), K * error) for name, error in torch32.items()}
    bounds = {
        name: max(floor(dtype), K * error, min(K * constants.get(name, 0.0), float32_bounds[name]))
        for name, error in torch.items()
    }
    # If rounding to float32 causes a small error, rounding to float64 causes a far smaller one, so
    # an error of float32's size in float64 needs no run to be clearly too large.
    clear_excess = {
        name: max(error, ulp(np.float32)) if dtype == np.float64 and error <= UNSTABLE else np.inf
        for name, error in torch32.items()
    }
    bounds = raise_bounds(bounds, jax, rounded, clear_excess)
    return {
        name: Error(
            jax[name],
            torch[name],
            min(bound, UNDETERMINED),
            unstable=not (bound < UNDETERMINED and torch32[name] <= UNSTABLE),
            tensor=name,
        )
        for name, bound in bounds.items()
    }


def worst(errors: Mapping[str, Error]) -> Error:
    """The error of a group: the one that is the largest relative to its bound."""
    return max(errors.values(), key=lambda error: error.share)


def group_error(
    dtype,
    *,
    oracle: Tensors,
    torch: Tensors,
    jax: Tensors,
    torch32: Tensors,
    rounded: Iterable[Mapping[str, float]],
) -> Error:
    """The worst error of the tensors."""
    errors = {
        name: relative_errors(tensors, oracle)
        for name, tensors in {"torch": torch, "jax": jax, "torch32": torch32}.items()
    }
    return worst(tensor_errors(dtype, **errors, rounded=rounded))


def assert_same(actual, expected, what: str) -> None:
    """Asserts that two ways to compute the same result in float64 agree up to rounding."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    error, scale = (
        np.abs(difference(actual, expected)).max(initial=0),
        np.abs(expected).max(initial=0),
    )
    assert error <= FLOAT64 * scale, f"{what}: differ by {error} at scale {scale}"
