"""How the errors grow along a sequence.

The statistic is that of `tolerance`, of each step alone: the root mean square of the error over
batch and features, relative to that of the float64 twin's output at the same step. So a step is
judged by its own size, as a tensor is in the table, and outputs that grow do not hide the steps
before them.
"""

import copy
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.torch_module import tensors
from parity_tests.engine.problem import arrays
from parity_tests.registry import Case
from parity_tests.report.record import ErrorOverTime

STEPS = 128


def errors_over_time(case: Case, platform: str) -> Iterator[ErrorOverTime]:
    """Run both sides forward over `STEPS` steps, or as many as the layer takes."""
    twin, x = case.build_twin(), case.inputs(time=min(STEPS, case.max_length or STEPS))
    oracle = _run_torch(case, twin, x, "float64")
    for dtype in (dtype for dtype in case.dtypes if dtype != "float64"):
        theirs = by_step(_run_torch(case, twin, x, dtype), oracle)
        ours = by_step(_run_jax(case, twin, x, dtype, platform), oracle)
        yield ErrorOverTime(case.name, platform, dtype, theirs, ours)


def _run_torch(case: Case, twin: torch.nn.Module, x: np.ndarray, dtype: str) -> np.ndarray:
    with torch.no_grad():
        twin = copy.deepcopy(twin).to(getattr(torch, dtype))
        return case.call(twin, tensors(x, dtype))[0].double().numpy()


def _run_jax(
    case: Case, twin: torch.nn.Module, x: np.ndarray, dtype: str, platform: str
) -> np.ndarray:
    with jax.default_device(jax.devices(platform)[0]), jax.default_matmul_precision("highest"):
        graphdef, weights = nnx.split(case.build_layer(twin, jnp.dtype(dtype)))
        run = jax.jit(lambda weights, x: nnx.merge(graphdef, weights)(x)[0])
        return jax.device_get(run(weights, arrays(x, dtype)))


def by_step(y: np.ndarray, oracle: np.ndarray) -> tuple[float, ...]:
    """The relative error at each step, to three digits."""
    errors = (
        relative_errors({"y": y[:, t]}, {"y": oracle[:, t]})["y"] for t in range(oracle.shape[1])
    )
    return tuple(float(f"{error:.3g}") for error in errors)
