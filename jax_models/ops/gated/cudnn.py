"""The form "cudnn" of a stack: the LSTM of cuDNN, for NVIDIA GPUs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import rnn
from jaxtyping import Array, Float

from jax_models.ops.forms import Form, num_devices, refusal_of_symbolic, runs_on_one_device
from jax_models.ops.gated.definition import LSTMState, lstm
from jax_models.ops.gated.stack import Results, Stack, run_xla
from jax_models.ops.library_function import LibraryFunction
from jax_models.ops.rows import Rows

MAX_STEPS = 65_535
"""The longest sequence that cuDNN supports (github.com/pytorch/pytorch/issues/133751)."""
LOW_PRECISIONS = (
    *(None, "default", "fastest", "high", "bfloat16", "bfloat16_3x", "tensorfloat32"),
    *("BF16_BF16_F32", "TF32_TF32_F32"),
)
"""The settings of `jax_default_matmul_precision` with which JAX's own matrix products on a GPU
round their operands to TensorFloat-32 or less.
"""


class Options(NamedTuple):
    """The static arguments of `jax.experimental.rnn`, in its order."""

    input_size: int
    hidden_size: int
    num_layers: int
    dropout: float
    bidirectional: bool
    precision: jax.lax.Precision


@jax.jit  # otherwise each of its arrays would be a program of its own
def run(call: Stack) -> Results:
    """Runs all layers in one call of cuDNN, forward and backward.

    Matrix products use TensorFloat-32 if `jax.default_matmul_precision` allows it, as by default,
    and full float32 if it asks for more ("highest"). Under `vmap`, the calls run one after the
    other. Source: `jax.experimental.rnn`.
    """
    (batch, time, in_features), lengths = call.x.shape, call.rows.lengths
    num_layers = len(call.cells) // call.num_directions
    coarse = jax.default_matmul_precision.value in LOW_PRECISIONS
    precision = jax.lax.Precision.HIGH if coarse else jax.lax.Precision.HIGHEST
    sizes = in_features, call.state.h.shape[2], num_layers
    options = Options(*sizes, 0.0, call.num_directions == 2, precision)
    # cuDNN does not support rows of length 0 (github.com/jax-ml/jax/issues/17966), so they run one
    # step, whose results are discarded below.
    ends = jnp.full(batch, time, jnp.int32) if lengths is None else jnp.maximum(lengths, 1)
    y, last = _layers(options, (call.x, call.state, call.cells), ends)
    if lengths is None:
        return y, last
    is_run = (lengths > 0)[None, :, None]
    last = jax.tree.map(lambda new, old: jnp.where(is_run, new, old), last, call.state)
    return call.rows.masked(y), last


def refusal(call: Stack) -> str | None:
    """Returns why cuDNN does not support the call, or None if it does."""
    batch, time, _ = call.x.shape
    if reason := refusal_of_symbolic(batch, time):
        return reason
    reasons = {
        "it supports only the lstm": call.recurrence is not lstm,
        f"it supports float32, not {call.x.dtype}": call.x.dtype != jnp.float32,
        "it does not support projections (proj_features)": "kernel_hr" in call.cells[0],
        "it does not support peepholes (use_peepholes)": "peephole" in call.cells[0],
        "it does not support reset": call.rows.reset is not None,
        "it does not support empty batches or sequences": batch * time == 0,
        f"it takes up to {MAX_STEPS:,} steps, not {time:,}": time > MAX_STEPS,
        "it does not support check_vma (build the jax.shard_map with check_vma=False)": any(
            jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves((call.x, call.cells))
        ),
        "it needs an NVIDIA GPU, and JAX finds none": not num_devices("cuda"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def pays(call: Stack, platform: str, differentiated: bool) -> bool:
    """Whether cuDNN is likely to be faster than XLA.

    It is not for a single step, which would have to wait until the weights are packed. Nor is it
    for a single row: on an H200, the loops that XLA compiles for Equinox and Flax took 0.4 to 0.7
    of cuDNN's time (1,024 steps, 256 units).
    """
    return min(call.x.shape[:2]) > 1 and runs_on_one_device("cuda")


CUDNN = Form("cudnn", run, ("cuda",), refusal, pays)


def packed_weights(cells: list[dict[str, Array]]) -> Float[Array, " parameters"]:
    """The weights in cuDNN's format: all matrices, (out, in), then all biases."""
    no_bias = jnp.zeros_like(cells[0]["kernel_hh"][0])
    kernels = [cell[name].T.ravel() for cell in cells for name in ("kernel_ih", "kernel_hh")]
    biases = [cell.get(name, no_bias) for cell in cells for name in ("bias_ih", "bias_hh")]
    return jnp.concatenate(kernels + biases)


def _by_xla(options: Options, floats, ends):
    x, state, cells = floats
    directions = 2 if options.bidirectional else 1
    return run_xla(Stack(lstm, (), x, state, cells, Rows.of(x.shape[1], ends), directions))


def _forward(options: Options, keep: bool, floats, ends):
    """Returns y and the last state, and the array that cuDNN keeps for the backward pass."""
    x, state, cells = floats

    @sequential_vmap
    def forward(x, h, c, weights, ends):
        outputs, residuals = rnn.lstm_fwd(x, h, c, weights, ends, *options)
        return *outputs, residuals[-1]

    y, h, c, reserve = forward(x, *state, packed_weights(cells), ends)
    return (y, LSTMState(h, c)), reserve if keep else ()


def _gradient(options: Options, floats, ends, results, reserve, gradients):
    """Returns the gradients with respect to x, the state and the weights."""
    x, state, cells = floats
    weights, unpack = jax.vjp(packed_weights, cells)

    @sequential_vmap
    def backward(residuals, gradients):
        return rnn.lstm_bwd(*options, residuals, gradients)[:4]

    residuals = x, *state, weights, ends, results[0], reserve
    dy, d_last = gradients
    dx, dh, dc, d_weights = backward(residuals, (dy, *d_last))
    return dx, LSTMState(dh, dc), *unpack(d_weights)


_layers = LibraryFunction(_by_xla, _forward, _gradient)
