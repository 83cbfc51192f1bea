"""The diagonal linear recurrence, in the forms that suit each device."""

import math
from functools import cache, partial
from typing import Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Inexact

from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.by_platform import by_platform
from jax_models.ops.checks import checked
from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.kernels.device_scan import DeviceScan, known_size
from jax_models.ops.kernels.row_scan import shapes
from jax_models.ops.linear_map import linear_map
from jax_models.ops.rows import DividedMasks, given_rows
from jax_models.ops.time_axis import states_between
from jax_models.ops.varying import alike

LinearRecurrenceMethod = Literal[
    "auto", "associative", "sequential", "chunked", "pallas", "pallas_interpreted"
]

BUSY, ENOUGH, SHORTEST = 2**15, 2**14, 32
"""Measured on an H100: rows × features keep its memory busy if they are at least ENOUGH. Fewer are
cut into chunks of at least SHORTEST steps, until about BUSY features run side by side."""


@checked()
def linear_recurrence(
    a: Inexact[Array, "batch time features"],
    b: Inexact[Array, "batch time features"],
    h0: Inexact[Array, "batch features"] | None = None,
    *,
    reverse: bool = False,
    method: LinearRecurrenceMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Inexact[Array, "batch time features"], Inexact[Array, "batch features"]]:
    """`h_t = a_t ⊙ h_{t−1} + b_t` for t = 0 … T−1, or `a_t ⊙ h_{t+1} + b_t` with `reverse`.

    The gradient is the same recurrence run the other way, and is computed so, by the same method:

        g_t = ∂L/∂h_t + a_{t+1} ⊙ g_{t+1},   ∂L/∂b_t = g_t,   ∂L/∂a_t = g_t ⊙ h_{t−1}

    which keeps a and h, and nothing else, for the backward pass. Forward mode and higher
    derivatives are linear recurrences, too. Where a_t is 0 nothing of h_{t−1} remains, not even of
    a NaN. If a or b is complex, so are all h; gradients are JAX's, without conjugation.

    Args:
        a: the factors of the state. The parallel methods form products of them, so |a| ≤ 1 keeps
            every method finite; a = 0 and a = 1 are exact.
        b: the inputs.
        h0: the state before the first step (with `reverse`, after the last); zeros when None. It is
            taken in the dtype of the accumulation.
        reverse: run from the last step to the first.
        method: "sequential", T steps in place; "associative", `jax.lax.associative_scan`, O(log T)
            deep; "chunked", √T chunks side by side, √T steps each, once for the states between them
            and once for all states; "pallas", the sequential steps in one kernel of the device
            (`ops.kernels.row_scan`), of real numbers; "pallas_interpreted", the TPU's kernel in an
            interpreter, which is slow but works anywhere. "auto" is sequential on a CPU and the
            kernel on a TPU. On an NVIDIA GPU it is the kernel, over chunks if the rows are few.
            Wherever no kernel can serve, it is associative.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`; a state restarts from
            zero. With P_t the product of a device's factors up to step t, and h⁰_t its states from
            zero, `h_t = P_t h + h⁰_t`, where h is the state before its steps: the devices exchange
            the last P and h⁰.

    Returns:
        All h and the last one, in at least float32, in which they are accumulated. The h beyond
        `lengths` carry no meaning.

    Raises:
        NotImplementedError: "pallas" has no kernel for this device, dtype or division over devices;
            when the program is lowered. Or `lengths` are given with a `time_axis`.
        TypeError: an array is of another kind of dtype, or h0 is complex while a and b are real.
        ValueError: the shapes differ, a length lies outside 0 … time, or there is no such method.

    """
    rows = given_rows(masks)
    dtype = common_carry_dtype(a, b)
    if h0 is None:
        h0 = jnp.zeros((a.shape[0], a.shape[2]), dtype)
    elif jnp.iscomplexobj(h0) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"h0: expected a floating dtype, as a and b have, got {h0.dtype}")
    h0 = h0.astype(dtype)
    if a.dtype != b.dtype:
        a, b = a.astype(dtype), b.astype(dtype)
    if 0 in a.shape:
        return b.astype(dtype), h0
    restart = rows.restarts(reverse=reverse)
    if restart is not None:
        a = jnp.where(restart[..., None], 0, a)
    if rows.active is not None:
        a, b = jnp.where(rows.active[..., None], a, 1), jnp.where(rows.active[..., None], b, 0)
    if rows.time_axis is not None:
        return _over_devices(method, reverse, rows.time_axis, a, b, h0)
    h = _compiled(method, reverse, *alike((a, b, h0)))
    return h, h[:, 0 if reverse else -1]


def _over_devices(
    method: LinearRecurrenceMethod, reverse: bool, time_axis: str, a, b, h0
) -> tuple[Array, Array]:
    from_zero = _compiled(method, reverse, *alike((a, b, jnp.zeros_like(h0))))
    products = _compiled(method, reverse, *alike((a, jnp.zeros_like(b), jnp.ones_like(h0))))
    end = 0 if reverse else -1
    h, last = states_between(
        lambda steps, h: _advance(steps[0], h, steps[1]),
        (products[:, end], from_zero[:, end]),
        h0,
        time_axis,
        reverse=reverse,
    )
    return _advance(products, h[:, None], from_zero), last


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _recurrence(method: LinearRecurrenceMethod, reverse: bool, a, b, h0):
    return _solve(method, a, b, h0, reverse=reverse)


@_recurrence.defjvp
def _recurrence_jvp(method: LinearRecurrenceMethod, reverse: bool, primals, tangents):
    a, b, h0 = primals
    h = _recurrence(method, reverse, a, b, h0)
    tangent, gradient = _Tangent(method, reverse), _Gradient(method, reverse)
    return h, linear_map(tangent, gradient, (a, h, h0), tangents)


_compiled = jax.jit(_recurrence, static_argnums=(0, 1))
"""Compiled once for all calls that nobody else compiles."""


class _Tangent(NamedTuple):
    """`dh_t = a_t dh_{t−1} + (da_t h_{t−1} + db_t)`, the same recurrence."""

    method: LinearRecurrenceMethod
    reverse: bool

    def __call__(self, residuals, tangents):
        a, h, h0 = residuals
        d_a, d_b, d_h0 = tangents
        d_b = d_a.astype(h.dtype) * _before(h, h0, self.reverse) + d_b.astype(h.dtype)
        return _recurrence(self.method, self.reverse, a, d_b, d_h0)


class _Gradient(NamedTuple):
    """Its transpose, the recurrence run the other way."""

    method: LinearRecurrenceMethod
    reverse: bool

    def __call__(self, residuals, h_gradient):
        a, h, h0 = residuals
        g = _ahead(self.method, not self.reverse, a, h_gradient)
        first = -1 if self.reverse else 0
        h0_gradient = _advance(a[:, first].astype(g.dtype), g[:, first], 0)
        a_gradient = g * _before(h, h0, self.reverse)
        return a_gradient.astype(a.dtype), g.astype(a.dtype), h0_gradient


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _ahead(method: LinearRecurrenceMethod, reverse: bool, a, b):
    """The recurrence from zero whose step t is multiplied by a_{t−1} instead of a_t."""
    return _solve(method, a, b, jnp.zeros_like(b[:, 0]), reverse=reverse, ahead=True)


@_ahead.defjvp
def _ahead_jvp(method: LinearRecurrenceMethod, reverse: bool, primals, tangents):
    def with_factors_moved(a, b):
        a = jnp.roll(a, -1 if reverse else 1, axis=1)
        return _recurrence(method, reverse, a, b, jnp.zeros_like(b[:, 0]))

    return jax.jvp(with_factors_moved, primals, tangents)


def _before(h, h0, reverse: bool):
    """The state before each step."""
    if reverse:
        return jnp.concatenate([h[:, 1:], h0[:, None]], axis=1)
    return jnp.concatenate([h0[:, None], h[:, :-1]], axis=1)


def _solve(method: LinearRecurrenceMethod, a, b, h0, *, reverse: bool, ahead: bool = False):
    """All h. With `ahead`, step t is multiplied by the factor of the step before it in the scan.

    The first step then has no factor. It needs none, because h0 is zero. A symbolic number of steps
    runs sequentially: a tree needs to know it.
    """
    if method == "auto" and is_symbolic_dim(a.shape[1]):
        method = "sequential"
    if method == "auto":
        forms = {
            "cpu": partial(_solve, "sequential", reverse=reverse, ahead=ahead),
            "default": partial(_solve, "associative", reverse=reverse, ahead=ahead),
        }
        if not jnp.iscomplexobj(h0):
            fallback = _without_kernel(reverse, ahead)
            forms["tpu"] = partial(_in_kernel, fallback, reverse=reverse, ahead=ahead)
            if known_size(*a.shape) >= SHORTEST * ENOUGH:
                forms["cuda"] = forms["tpu"]
        return by_platform(a, b, h0, **forms)
    if method in ("pallas", "pallas_interpreted"):
        if jnp.iscomplexobj(h0):
            raise NotImplementedError(
                f'method: expected "auto" or "associative" for complex numbers, which the kernel '
                f"does not have, got {method!r}"
            )
        interpret = method == "pallas_interpreted"
        return _in_kernel(None, a, b, h0, reverse=reverse, ahead=ahead, interpret=interpret)
    a, b = a.astype(h0.dtype), b.astype(h0.dtype)
    if method == "sequential":
        return _sequential(a, b, h0, reverse=reverse, ahead=ahead)
    if method == "chunked":
        count = math.isqrt(a.shape[1] - 1) + 1
        return _in_chunks(_scan_rows, count, a, b, h0, reverse=reverse, ahead=ahead)
    if ahead:
        first = jnp.zeros_like(a[:, :1])  # not the other end's factor, which may be NaN
        parts = [a[:, 1:], first] if reverse else [first, a[:, :-1]]
        a = jnp.concatenate(parts, axis=1)
    if reverse:
        a, b = jnp.flip(a, axis=1), jnp.flip(b, axis=1)
    h = _associative(a, b, h0)
    return jnp.flip(h, axis=1) if reverse else h


def _sequential(a, b, h0, *, reverse: bool, ahead: bool):
    """One step after the other, each h_t in the place of its b_t."""
    time = a.shape[1]
    behind = (1 if reverse else -1) if ahead else 0

    def step(i, carry):
        h, hs = carry
        t = time - 1 - i if reverse else i
        a_t = lax.dynamic_index_in_dim(a, t + behind, axis=1, keepdims=False)
        b_t = lax.dynamic_index_in_dim(hs, t, axis=1, keepdims=False)
        h = lax.optimization_barrier(_advance(a_t, h, b_t))  # XLA would copy hs to read b_t again
        return h, lax.dynamic_update_index_in_dim(hs, h, t, axis=1)

    return lax.fori_loop(0, time, step, (h0, b))[1]


def _in_kernel(fallback, a, b, h0, *, reverse: bool, ahead: bool, interpret: bool = False):
    step = _step_ahead if ahead else _step
    options = {"outputs": 1, "reverse": reverse, "interpret": interpret, "fallback": fallback}
    (h,), _ = _by_kernel(step, (h0,), (a, b), **options)
    return h


def _scan_gpu(step, start, xs, *, outputs: int, reverse: bool):
    """The GPU's kernel, over chunks of time if the rows alone are too few to keep a GPU busy."""
    (a, b), (h0,) = xs, start
    batch, time, features = a.shape
    count = min(BUSY // (batch * features), time // SHORTEST)
    if count < 2 or batch * features >= ENOUGH:
        return row_scan_gpu.row_scan(step, start, xs, outputs=outputs, reverse=reverse)
    scan, ahead = row_scan_gpu.row_scan, step is _step_ahead
    h = _in_chunks(scan, count, a, b, h0, reverse=reverse, ahead=ahead)
    return [h], [h[:, 0 if reverse else -1]]  # with `ahead`, nobody reads the last state


def _step(state, a, b):
    (h,) = state
    h = _advance(a, h, b)
    return (h,), (h,)


def _step_ahead(state, a, b):
    """Carries what the factor makes of h for the step after it."""
    (carried,) = state
    h = carried + b
    return (_advance(a, h, 0),), (h,)


def _map(state, a, b):
    """The map `h ↦ P h + E` of all steps so far."""
    p, e = state
    return (_advance(a, p, 0), _advance(a, e, b)), ()


def _map_ahead(state, a, b):
    p, e = state
    return (_advance(a, p, 0), _advance(a, e + b, 0)), ()


_by_kernel = DeviceScan(
    "linear_scan",
    tpu=row_scan_tpu.row_scan,
    gpu=_scan_gpu,
    shapes=shapes,
    axis_of_rows=lambda _: 0,
    instead="associative",
)


@cache
def _without_kernel(reverse: bool, ahead: bool):
    """The associative form of a `row_scan`."""

    def solve(start, xs):
        h = _solve("associative", *xs, *start, reverse=reverse, ahead=ahead)
        end = 0 if reverse else -1
        last = h[:, end]
        return [h], [_advance(xs[0][:, end].astype(h.dtype), last, 0) if ahead else last]

    return solve


def _advance(a, h, b):
    """`a h + b`, and b where a is 0, whatever h is."""
    return jnp.where(a == 0, b, a * h + b)


def _combine(first, second):
    """Two steps as one: `h ↦ a₂ (a₁ h + b₁) + b₂`."""
    (a1, b1), (a2, b2) = first, second
    return _advance(a2, a1, 0), _advance(a2, b1, b2)


def _associative(a, b, h0):
    first = _advance(a[:, :1], h0[:, None], b[:, :1])
    b = jnp.concatenate([first, b[:, 1:]], axis=1)  # so that the products of a are no result
    return lax.associative_scan(_combine, (a, b), axis=1)[1]


def _scan_rows(step, start, xs, *, outputs: int, reverse: bool):
    """As `row_scan`, by `jax.lax.scan`."""
    xs = tuple(jnp.moveaxis(x, 1, 0) for x in xs)
    last, ys = lax.scan(lambda state, x: step(state, *x), start, xs, reverse=reverse)
    return [jnp.moveaxis(y, 0, 1) for y in ys], last


def _in_chunks(scan, count: int, a, b, h0, *, reverse: bool, ahead: bool):
    """Runs chunks of time side by side, as rows of their own.

    The first scan finds what each chunk makes of any state, `h ↦ P h + E`. The second scan runs
    each chunk from its own state.
    """
    batch, time, features = a.shape
    size = -(-time // count)
    count = -(-time // size)
    if padding := count * size - time:  # steps that leave the state as it is
        a = jnp.pad(a, ((0, 0), (0, padding), (0, 0)), constant_values=1)
        b = jnp.pad(b, ((0, 0), (0, padding), (0, 0)))
    a, b = (x.reshape(batch * count, size, features) for x in (a, b))
    step, maps = (_step_ahead, _map_ahead) if ahead else (_step, _map)
    identity = [jnp.full((batch * count, features), x, h0.dtype) for x in (1, 0)]
    one, zero, a, b, h0 = alike((*identity, a, b, h0))
    _, (p, e) = scan(maps, (one, zero), (a, b), outputs=0, reverse=reverse)

    chunks = p.reshape(batch, count, features), e.reshape(batch, count, features)
    if reverse:
        chunks = jax.tree.map(partial(jnp.flip, axis=1), chunks)
    ends = _associative(*chunks, h0)
    starts = jnp.concatenate([h0[:, None], ends[:, :-1]], axis=1)
    if reverse:
        starts = jnp.flip(starts, axis=1)

    starts = (starts.reshape(batch * count, features),)
    (h,), _ = scan(step, starts, (a, b), outputs=1, reverse=reverse)
    return h.reshape(batch, count * size, features)[:, :time]
