"""Chooses the implementation of a function by platform, and traces only the one that runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

Function = Callable[..., Sequence[Array]]
Functions = tuple[tuple[str, Function], ...]
"""The implementations ("forms") of a function, each with the name of its platform, "default" or
"export".
"""


def by_platform(*args: Any, **forms: Callable[..., Any]) -> Any:
    """Calls the form for the platform on which the program runs, or `forms["default"]`.

    A form is an implementation for one platform. A form "export" is the one that programs of
    `jax.export` contain, on every platform. The default also runs where another form raises a
    NotImplementedError when it is lowered, as a kernel does if it does not support the program.

    Whereas `jax.lax.platform_dependent` traces every form immediately, this function traces only
    the first form, to find the shapes of the results. The form that runs is traced when the program
    is lowered, with the matrix precision of this call. All forms must return the same tree of
    floating or complex arrays. There is no derivative: callers give one by `jax.custom_jvp`.
    """
    leaves, structure = jax.tree.flatten(args)
    precision = jax.default_matmul_precision.value

    def flat(form):
        def on_leaves(*leaves):
            with jax.default_matmul_precision(precision):
                return jax.tree.leaves(form(*structure.unflatten(leaves)))

        return on_leaves

    results = jax.tree.structure(jax.eval_shape(next(iter(forms.values())), *args))
    return results.unflatten(_bind(leaves, {name: flat(form) for name, form in forms.items()}))


by_platform_p = Primitive("by_platform")
by_platform_p.multiple_results = True


def _bind(leaves: Sequence[Any], forms: dict[str, Function]) -> list[Array]:
    return by_platform_p.bind(*leaves, forms=tuple(forms.items()))


@by_platform_p.def_impl
def _run(*leaves, forms: Functions):
    """Runs under `jax.disable_jit`, where nothing is compiled: the default device decides."""
    return _form(forms, jax.default_backend())(*leaves)


@by_platform_p.def_effectful_abstract_eval
def _shapes(*leaves, forms: Functions):
    _, first = forms[0]
    traced = jax.make_jaxpr(first)(*leaves)
    return traced.out_avals, traced.effects


def _form(forms: Functions, platform: str) -> Function:
    return dict(forms).get(platform) or dict(forms)["default"]


def _lowering(platform: str):
    def rule(ctx, *leaves, forms: Functions):
        exported = ctx.module_context.lowering_parameters.for_export
        form = dict(forms).get("export") if exported else None
        form, default = form or _form(forms, platform), dict(forms)["default"]
        try:
            return mlir.lower_fun(form, multiple_results=True)(ctx, *leaves)
        except NotImplementedError:
            if form is default:
                raise
        return mlir.lower_fun(default, multiple_results=True)(ctx, *leaves)

    return rule


def _batch(leaves, axes, *, forms: Functions):
    y = _bind(leaves, {name: jax.vmap(form, in_axes=tuple(axes)) for name, form in forms})
    return y, [0] * len(y)


batching.primitive_batchers[by_platform_p] = _batch
mlir.register_lowering(by_platform_p, _lowering("default"))
for _platform in ("cpu", "cuda", "tpu"):
    mlir.register_lowering(by_platform_p, _lowering(_platform), platform=_platform)
