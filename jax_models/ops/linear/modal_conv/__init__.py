"""The causal convolution with a sum of complex exponentials, whose state has a fixed size."""

from typing import Annotated, Unpack

from jax import lax
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.forms import Form, Operator
from jax_models.ops.linear.modal_conv import chunked, definition
from jax_models.ops.linear.modal_conv.definition import ModalConv, ModalConvState
from jax_models.ops.rows import DividedMasks, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes

MODAL_CONV = Operator(
    "modal_conv",
    (
        Form("chunked", chunked.run, pays=chunked.pays),
        Form("definition", definition.scan, refusal=definition.refusal),
    ),
)

ModalConvMethod = Annotated[str, "auto or the name of a form"]
"""What runs a modal convolution."""


@checked()
def modal_conv(
    v: Float[Array, "batch time features"],
    state: ModalConvState,
    *,
    poles: Float[Array, "features modes 2"],
    residues: Float[Array, "features modes 2"],
    skip: Float[Array, " features"],
    method: ModalConvMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time features"], ModalConvState]:
    """`y_t = Σ_{i ≤ t} h_{t−i} v_i + skip ⊙ v_t` with `h_t = Re Σ_n R_n λ_n^t`, as a recurrence.

        s_t = λ ⊙ s_{t−1} + v_t
        y_t = Re Σ_n R_n s_{t,n} + skip ⊙ v_t

    λ are the poles and R the residues, n for each feature. Complex numbers are stored as pairs of
    real numbers along the last axis. The computation is in at least float32, and y has the dtype of
    v.

    In chunks, a product with the taps computes what a chunk contributes to its own outputs, and
    `linear_recurrence` computes the states between chunks, so the states take 2n/32 of the memory
    of v. A NaN reaches all steps of its chunk. With `reset` or a symbolic number of steps, a chunk
    is one step, and the states take 2n times the memory of v.

    Args:
        v: the inputs.
        state: the modes before the first step.
        poles: |λ| ≤ 1 for a filter that does not grow.
        residues: the weights of the modes.
        skip: the factor by which the current input is multiplied and added to the output.
        method: the form that runs. "definition" is a plain `lax.scan`. "chunked" divides time into
            chunks of 32 steps. "auto" is the definition on a CPU, unless the backward pass would
            have to store many states, and chunked on other platforms and with a `time_axis`.
        **masks: `lengths`, `reset` and `time_axis`, or `rows`, as in `DividedMasks`. With a time
            axis, the size of a chunk is the largest power of two, up to 32, that divides the number
            of steps of a device.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`, or the definition is asked for
            with one.
        TypeError: an array is not floating.
        ValueError: the shapes do not fit each other, a length lies outside 0 … time, or there is no
            such method.

    """
    rows = given_rows(masks)
    dtype = common_carry_dtype(v, poles, residues)
    poles, residues, start = (
        lax.complex(x[..., 0], x[..., 1])
        for x in (array.astype(dtype) for array in (poles, residues, state.modes))
    )
    u, skip = rows.masked(v.astype(dtype)), skip.astype(dtype)
    call = ModalConv(u, start, poles, residues, skip, rows)
    y, last = MODAL_CONV(match_varying_axes(call), method)
    return y.astype(v.dtype), ModalConvState(chunked.real_and_imag(last))
