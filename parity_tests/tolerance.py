"""How close is equal: the only place where a tolerance is written.

The oracle is y64, the torch twin in float64 on the same weights and inputs. The error of a tensor
is the root mean square of its difference from y64, relative to the root mean square of y64; that of
a group of tensors (all weight gradients, say) pools them, as a root mean square again.

- float64: JAX errs by at most `FLOAT64`.
- float32 and bfloat16: JAX errs by at most K times what torch errs in that dtype, or K ·
  `FLOOR_ULPS` ulp where torch happens to err by less.

So the bound grows with the conditioning of the computation, as rounding does, and with nothing
else. K = 4: over 150 random LSTMs, unstable ones among them, the ratio of maximal errors had
median 1.1, 95th percentile 2.0 and maximum 5.4, and root mean squares vary less than maxima.
A twin that errs by more than `UNSTABLE` in float32 does not determine the result: it is reported
as unstable, and its float64 bound grows as its float32 error did.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

K = 4.0
FLOOR_ULPS = 1.0
FLOAT64 = 1e-12
UNSTABLE = 1e-2
LONG_TRAJECTORY = 1e-10
"""For 2,000 steps of training in float64, whose rounding errors grow with the steps."""


def rms(x: np.ndarray) -> float:
    """Root mean square; 0 for an empty array."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def ulp(dtype) -> float:
    """The spacing of the dtype's numbers at 1."""
    return float(ml_dtypes.finfo(dtype).eps)


@dataclasses.dataclass(frozen=True)
class Error:
    """How far JAX and torch are from the oracle in a group of tensors, relative to its scale."""

    jax: float
    torch: float
    bound: float
    unstable: bool
    worst: str
    """The tensor in which JAX errs most."""

    @property
    def ratio(self) -> float | None:
        """JAX's error over torch's; None where torch has none, as in float64, the oracle itself."""
        return self.jax / self.torch if self.torch else None

    @property
    def passed(self) -> bool:
        """Is JAX within the bound? NaN is not."""
        return self.jax <= self.bound


Tensors = Mapping[str, np.ndarray]


def relative_errors(tensors: Tensors, oracle: Tensors) -> dict[str, float]:
    """Each tensor's relative error; the names and shapes must be the oracle's."""
    if tensors.keys() != oracle.keys():
        raise ValueError(f"expected the tensors {sorted(oracle)}, got {sorted(tensors)}")
    errors = {}
    for name, expected in oracle.items():
        actual = tensors[name]
        if actual.shape != expected.shape:
            raise ValueError(f"{name}: expected shape {expected.shape}, got {actual.shape}")
        errors[name] = rms(actual.astype(np.float64) - expected) / (rms(expected) or 1.0)
    return errors


def group_error(
    dtype,
    *,
    oracle: Tensors,
    torch: Tensors,
    jax: Tensors,
    torch32: Tensors,
    trajectory: bool = False,
) -> Error:
    """The error of a group in `dtype`; `torch32` is the twin in float32, for its stability.

    Along a trajectory rounding errors grow from step to step, and the float64 bound with them.
    """
    jax_errors = relative_errors(jax, oracle)
    torch_error, instability, jax_error = (
        rms(np.array([*errors.values()]))
        for errors in (relative_errors(torch, oracle), relative_errors(torch32, oracle), jax_errors)
    )
    unstable = not instability <= UNSTABLE
    if dtype == np.float64:
        grown = K * ulp(dtype) * instability / ulp(np.float32)
        bound = max(FLOAT64, grown) if unstable or trajectory else FLOAT64
    else:
        bound = K * max(torch_error, FLOOR_ULPS * ulp(dtype))
    worst = max(jax_errors, key=lambda name: np.nan_to_num(jax_errors[name], nan=np.inf))
    return Error(jax_error, torch_error, bound, unstable, worst)


def assert_same(actual, expected, what: str) -> None:
    """Assert that two ways to compute one thing in float64 agree to rounding."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    difference, scale = np.abs(actual - expected).max(initial=0), np.abs(expected).max(initial=0)
    assert difference <= FLOAT64 * scale, f"{what}: differ by {difference} at scale {scale}"
