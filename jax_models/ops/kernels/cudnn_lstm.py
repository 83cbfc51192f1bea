"""The LSTM of cuDNN, for NVIDIA GPUs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import rnn
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.arguments import checked
from jax_models.ops.keywords import suggests_arguments
from jax_models.ops.lstm import LSTMState
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


@checked(batch_axes=(0, 1))
def cudnn_lstm(
    x: Float[Array, "batch time in"],
    state: LSTMState,
    cells: list[dict[str, Array]],
    lengths: Int[Array, " batch"] | None = None,
    *,
    bidirectional: bool,
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """Layers of `lstm` in one call of cuDNN, forward and backward.

    Matrix products use TensorFloat-32 if `jax.default_matmul_precision` allows it, as by default,
    and full float32 if it asks for more ("highest"). Under `vmap`, the calls run one after the
    other. There is no forward-mode gradient. A second derivative is computed without cuDNN.

    Args:
        x: the inputs in float32, zero beyond `lengths`.
        state: the states before the first step. Their first axis runs over layers and directions:
            layer 0 forward, layer 0 backward, layer 1 forward, …
        cells: the weights of `lstm` for each layer and direction, in the same order. Missing biases
            are zero.
        lengths: row b runs only the steps t < lengths[b], and its backward direction starts there.
        bidirectional: whether each layer runs in both directions. The next layer reads the outputs
            of both.

    Returns:
        The outputs of the last layer, zero beyond `lengths`, and the last states.

    Source: `jax.experimental.rnn`.

    """
    batch, time, in_features = x.shape
    num_layers = len(cells) // (2 if bidirectional else 1)
    coarse = jax.default_matmul_precision.value in LOW_PRECISIONS
    precision = jax.lax.Precision.HIGH if coarse else jax.lax.Precision.HIGHEST
    options = Options(in_features, state.h.shape[2], num_layers, 0.0, bidirectional, precision)
    # cuDNN does not support rows of length 0 (github.com/jax-ml/jax/issues/17966), so they run one
    # step, whose results are discarded below.
    ends = jnp.full(batch, time, jnp.int32) if lengths is None else jnp.maximum(lengths, 1)
    results: Any = _forward(options, x, *state, packed_weights(cells), ends)
    y, *last, _ = results
    if lengths is None:
        return y, LSTMState(*last)
    last = [
        jnp.where((lengths > 0)[None, :, None], new, old)
        for new, old in zip(last, state, strict=True)
    ]
    return Rows.of(time, lengths).masked(y), LSTMState(*last)


@suggests_arguments
def cudnn_refusal(
    x: Float[Array, "batch time in"],
    cells: list[dict[str, Array]],
    reset: Bool[Array, "batch time"] | None,
) -> str | None:
    """Returns why cuDNN does not support these arguments, or None if it does."""
    batch, time, _ = x.shape
    if is_symbolic_dim(batch) or is_symbolic_dim(time):
        return "it takes known sizes, not the symbolic ones of jax.export"
    reasons = {
        f"it computes in float32, not in {x.dtype}": x.dtype != jnp.float32,
        "it has no projection (proj_features)": "kernel_hr" in cells[0],
        "it has no peepholes (use_peepholes)": "peephole" in cells[0],
        "it cannot restart a row in its midst (reset)": reset is not None,
        "it takes no empty batches or sequences": batch * time == 0,
        f"it takes up to {MAX_STEPS:,} steps, not {time:,}": time > MAX_STEPS,
        "it says nothing of varying axes (build the jax.shard_map with check_vma=False)": any(
            jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves((x, cells))
        ),
        "it needs an NVIDIA GPU, and JAX finds none": not num_gpus(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def cudnn_pays(x: Float[Array, "batch time in"]) -> bool:
    """Whether cuDNN is likely to be faster, if it supports the call.

    It is not for a single step, which would have to wait until the weights are packed. Nor is it
    for a single row: on an H200, the loops that XLA compiles for Equinox and Flax took 0.4 to 0.7
    of cuDNN's time (1,024 steps, 256 units). Nor is it if the compiler may divide the program over
    several GPUs, because the compiler would then gather the whole batch on each GPU.
    """
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = not mesh.empty and mesh.are_all_axes_manual
    return min(x.shape[:2]) > 1 and (num_gpus() == 1 or by_hand)


def num_gpus() -> int:
    """The number of NVIDIA GPUs that JAX can use."""
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        return 0
    return len(gpus)


def packed_weights(cells: list[dict[str, Array]]) -> Float[Array, " parameters"]:
    """The weights in cuDNN's format: all matrices, (out, in), then all biases."""
    no_bias = jnp.zeros_like(cells[0]["kernel_hh"][0])
    kernels = [cell[name].T.ravel() for cell in cells for name in ("kernel_ih", "kernel_hh")]
    biases = [cell.get(name, no_bias) for cell in cells for name in ("bias_ih", "bias_hh")]
    return jnp.concatenate(kernels + biases)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(options: Options, x, h, c, weights, ends):
    """Returns y, the last h and c, and the array that cuDNN keeps for the backward pass."""

    @sequential_vmap
    def forward(x, h, c, weights, ends):
        outputs, residuals = rnn.lstm_fwd(x, h, c, weights, ends, *options)
        return *outputs, residuals[-1]

    return forward(x, h, c, weights, ends)


def _forward_fwd(options: Options, *args):
    results: Any = _forward(options, *args)
    y, _, _, reserve = results
    return results, (*args, y, reserve)


def _forward_bwd(options: Options, residuals, gradients):
    primal_gradients: Any = _backward(options, residuals, gradients[:3])
    return *primal_gradients, None


_forward.defvjp(_forward_fwd, _forward_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(options: Options, residuals, gradients):
    """The gradients with respect to x, h, c and the weights."""

    @sequential_vmap
    def backward(residuals, gradients):
        return rnn.lstm_bwd(*options, residuals, gradients)[:4]

    return backward(residuals, gradients)


def _backward_fwd(options: Options, residuals, gradients):
    return _backward(options, residuals, gradients), (residuals, gradients)


def _second_derivative(options: Options, residuals, second_gradients):
    (*primals, ends, _, _), gradients = residuals
    input_size, hidden_size, num_layers, dropout, bidirectional, _ = options

    def reference(x, h, c, weights):
        sizes = (input_size, hidden_size, num_layers)
        unpacked = rnn.unpack_lstm_weights(weights, *sizes, bidirectional)
        return rnn.lstm_ref(x, h, c, *unpacked, ends, *sizes, dropout, bidirectional)

    def backward(primals, gradients):
        return jax.vjp(reference, *primals)[1](gradients)

    _, pull_back = jax.vjp(backward, tuple(primals), gradients)
    primal_gradients, gradient_gradients = pull_back(second_gradients)
    return (*primal_gradients, None, None, None), gradient_gradients


_backward.defvjp(_backward_fwd, _second_derivative)
