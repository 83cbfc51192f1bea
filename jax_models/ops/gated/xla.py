"""The form "xla" of a recurrence, which computes the gradients of the weights after the loop.

The derivative of a product has one term that depends on the tangent of the state, dh_t. The terms
in parentheses do not, so they are computed for all steps at once, outside the loop:

    z_t = x_t W_x + h_t W        dz_t = dh_t W + (dx_t W_x + x_t dW_x + h_t dW)

JAX transposes this derivative to make the backward pass. Its loop therefore has one matrix product
for each product of the forward pass, and after the loop, the gradient of each weight is a single
matrix product. Forward mode and higher derivatives work as usual.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import affine
from jax_models.ops.gated.products import (
    Pair,
    Product,
    Recurrence,
    Step,
    computed_before,
    dense_tangent,
    direct_tangents,
    known_length,
    merge_products,
    merge_tangents,
    split_values,
    transposable_kernel,
    where,
    widths_of,
)
from jax_models.ops.rows import Rows, steps_first
from jax_models.ops.shard_map_axes import match_varying_axes


@jax.jit  # else eager calls would compile the scan each time
def run(call: Recurrence):
    """Runs the recurrence, as `definition.scan` does."""
    rows, call = call.rows, dataclasses.replace(call, rows=Rows())
    masks = rows.active, rows.restarts(reverse=call.reverse)
    call, masks = match_varying_axes((call, masks))
    x, inputs = steps_first((call.x, call.inputs))
    ys, last = _run(dataclasses.replace(call, x=x, inputs=inputs), *steps_first(masks))
    return jnp.swapaxes(ys, 0, 1), last


@jax.custom_jvp
def _run(call: Recurrence, active, reset):
    ys, last, *_ = _forward(call, active, reset)
    return ys, last


def _forward(call: Recurrence, active, reset):
    """Returns the outputs, the last state, and the arrays that the backward pass needs."""
    of_x = call.products_of_x()

    def body(state, at_step):
        inputs, of_x, active, reset = at_step
        state = where(reset, jax.tree.map(jnp.zeros_like, state), state)
        kept, h_kept = {}, {}

        def values(names, h):
            requested = [name for group in [*kept, names] for name in group]
            if len({*requested}) < len(requested) or not {*requested} <= call.products.keys():
                raise ValueError(
                    f"step: expected each of the products {[*call.products]} once, "
                    f"it asked for {requested}"
                )
            names = (*names,)
            group = [call.products[name] for name in names]
            merged = merge_products(names, group)  # XLA moves this out of the loop
            of_h = split_values(affine(h, merged.kernel, merged.bias), widths_of(group))
            parts = zip(names, group, of_h, strict=True)
            kept[names] = [product.stored(of_x[name], part) for name, product, part in parts]
            # If h is a field of the state, it is already stored with the state.
            fields[names] = next((i for i, field in enumerate(state) if field is h), None)
            if fields[names] is None:
                h_kept[names] = h
            return _values(call.products, of_x, names, kept[names])

        new = call.step(state, Step(values, inputs, call.params))
        if _types(new) != _types(state):
            raise ValueError(f"step: expected to return {_types(state)}, it returned {_types(new)}")
        requested = {name for names in kept for name in names}
        if requested != call.products.keys():
            raise ValueError(
                f"step: expected products {[*call.products]}, it asked for {[*requested]}"
            )
        new = new if active is None else where(active, new, state)
        return new, (new[0], state, kept, h_kept)

    fields = {}
    at_steps = (call.inputs, of_x, active, reset)
    length = known_length(call.x.shape[0])
    last, stored = lax.scan(body, call.state, at_steps, length, reverse=call.reverse)
    ys, before, kept, h_kept = stored
    h = {names: h_kept[names] if i is None else before[i] for names, i in fields.items()}
    return ys, last, _Residuals(before, of_x, h, kept)


class _Residuals(NamedTuple):
    """The arrays (time, batch, features) that the backward pass needs."""

    before: Any
    """The state before each step."""
    of_x: dict[str, Array | None]
    """The products of x, by name."""
    h: dict[tuple[str, ...], Array]
    """The h of each group of products that a step requests together."""
    kept: dict[tuple[str, ...], list[Array]]
    """The results of `Product.stored` for the products of each group."""


def _values(products: dict[str, Product], of_x, names, kept) -> list[Any]:
    """Returns the values that a step receives for the products of a group."""
    return [products[name].received(of_x[name], a) for name, a in zip(names, kept, strict=True)]


def _types(state) -> Any:
    return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", state)


@partial(_run.defjvp, symbolic_zeros=True)
def _run_jvp(primals, tangents):
    (call, active, reset), (d_call, *_) = primals, tangents
    products = call.products
    ys, last, (before, of_x, h, kept) = _forward(*primals)
    of_x = {name: a if isinstance(products[name], Pair) else None for name, a in of_x.items()}
    instantiate = partial(jax.tree.map, dense_tangent)

    # The tangents of the products that do not depend on the state's tangent, over all steps.
    d_kept, d_of_x, transposable = {}, {}, {}
    for names in kept:
        group = [products[name] for name in names]
        merged = merge_products(names, group)
        tangents = merge_tangents(group, [d_call.products[name] for name in names])
        d_of_h, of_group = direct_tangents(group, merged, tangents, call.x, d_call.x, h[names])
        by_name = [*zip(names, group, of_group, d_of_h, strict=True)]
        d_kept[names] = [product.stored(a, b) for _, product, a, b in by_name]
        d_of_x |= {name: a if of_x[name] is not None else None for name, _, a, _ in by_name}
        transposable[names] = transposable_kernel(merged.kernel)

    # The loop is linear in the state's tangent, so JAX can transpose it for the backward pass.
    @partial(jax.checkpoint, prevent_cse=False)
    def body(d_state, at_step):
        primals, tangents, active, reset = at_step

        def step(state, kept, of_x, inputs, params):
            def values(names, h):
                names = (*names,)
                widths = tuple(widths_of([products[name] for name in names]))
                stored = computed_before(widths, h, transposable[names], kept[names])
                return _values(products, of_x, names, stored)

            return call.step(state, Step(values, inputs, params))

        d_state = where(reset, jax.tree.map(jnp.zeros_like, d_state), d_state)
        _, d_new = jax.jvp(step, (*primals, call.params), (d_state, *tangents, d_params))
        d_new = d_new if active is None else where(active, d_new, d_state)
        return d_new, d_new[0]

    d_params = instantiate(call.params, d_call.params)
    tangents = d_kept, d_of_x, instantiate(call.inputs, d_call.inputs)
    at_steps = (before, kept, of_x, call.inputs), tangents, active, reset
    d_state = instantiate(call.state, d_call.state)
    length = known_length(call.x.shape[0])
    d_last, d_ys = lax.scan(body, d_state, at_steps, length, reverse=call.reverse)
    return (ys, last), (d_ys, d_last)
