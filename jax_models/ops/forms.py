"""The forms of an operator, and the choice of the one that runs.

A form is one way to compute an operator, such as a kernel or a plain `lax.scan`.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.export import is_symbolic_dim

from jax_models.entry_points import broken_packages, by_name, failures_as_warnings
from jax_models.ops.by_platform import by_platform
from jax_models.ops.removed_forms import advice_for_removed

ENTRY_POINTS = "twinscan.forms"
"""The group of entry points by which other packages add forms.

An entry point names a module whose `FORMS` maps the name of an operator to a tuple of forms.
"""

PLATFORMS = ("cpu", "cuda", "tpu", "default")
"""The platforms for which a form is chosen. "default" stands for all others."""
ACCELERATORS = PLATFORMS[1:]
"""All platforms but the CPU."""


def never_refuses(call: Any) -> None:
    """The `refusal` of a form that supports every call."""


def always_pays(call: Any, platform: str, differentiated: bool) -> bool:
    """The `pays` of a form that should run wherever no form before it does."""
    return True


class Form(NamedTuple):
    """One way to compute an operator.

    Its functions receive the `call`: the arguments of the operator as a pytree, whose fields that
    are not arrays are static. Use functions of a module, because JAX caches compiled programs by
    the function.
    """

    name: str
    """What `method=` calls it."""
    run: Callable[[Any], Any]
    """`run(call)` returns the results of the operator."""
    platforms: tuple[str, ...] = ()
    """Where "auto" may choose it, such as `("cpu",)` or `("cuda", "tpu")`. Empty: everywhere."""
    refusal: Callable[[Any], str | None] = never_refuses
    """`refusal(call)` says why the form does not support the call, or returns None if it does."""
    pays: Callable[[Any, str, bool], bool] = always_pays
    """`pays(call, platform, differentiated)`: whether the form is likely to be faster than those
    after it. `differentiated` says whether a derivative is computed as well.
    """


def refusal_of_symbolic(*sizes: Any) -> str | None:
    """Returns why a form refuses these sizes, or None if all of them are known."""
    if any(map(is_symbolic_dim, sizes)):
        return "it takes known sizes, not the symbolic ones of jax.export"
    return None


def not_installed(name: str, package: str, command: str) -> Form:
    """Stands for a form of a package that is not installed. `command` installs the package."""

    def refusal(call: Any) -> str:
        return f"it needs the package {package} ({command}){broken_packages(ENTRY_POINTS)}"

    return Form(name, never_refuses, refusal=refusal)


NATIVE = not_installed("native", "twinscan-native", "pip install ./native")
"""Stands for a form of `twinscan-native`, the compiled kernels for CPUs."""


class Operator(NamedTuple):
    """An operator that chooses among its forms."""

    name: str
    own_forms: tuple[Form, ...]
    """The forms, the preferred one first. The last one is the definition, which computes the
    equation as it is written, and supports every call.
    """
    other_forms: tuple[Form, ...] = ()
    """What `not_installed` returns for the known forms of other packages."""
    derivative: Callable[["Operator", str, Any, Any], tuple[Any, Any]] | None = None
    """`derivative(operator, method, call, d_call)` returns the results and their tangents, from the
    call and its tangents. It runs the operator, by the same method. All forms but the definition
    share this derivative, so that a form has none of its own, and only forms that run are traced.
    None: JAX differentiates each form.
    """

    @property
    def forms(self) -> Mapping[str, Form]:
        """All forms by name. Those of other packages come first."""
        return _forms(self)

    def checked_method(self, method: str) -> str:
        """Returns "auto" or the name of a form, or raises an error."""
        if not isinstance(method, str) or method not in ("auto", *self.forms):
            raise ValueError(
                f"method: expected one of {['auto', *self.forms]}, got {method!r}"
                f"{advice_for_removed(self.name, method)}{broken_packages(ENTRY_POINTS)}"
            )
        return method

    def __call__(self, call: Any, method: str = "auto") -> Any:
        """Runs the form that `method` names, or with "auto" the best one.

        A program may run on another platform than the one on which it is traced. "auto" therefore
        chooses a form for each platform: the first one that supports the call and pays there.

        Raises:
            NotImplementedError: the form does not support the call.
            ValueError: there is no such form.

        """
        if explicit_axes := jax.sharding.get_abstract_mesh().explicit_axes:
            return self._with_auto_axes(call, method, explicit_axes)
        if _recording.value is not None:
            _recording.value.calls.append((self, call, method))
            with _recording(None):  # operators that the form calls are not recorded
                return self(call, method)
        # A form that was asked for by name runs on any platform, or raises an error.
        if self.checked_method(method) != "auto":
            form = self.forms[method]
            if reason := form.refusal(call):
                raise NotImplementedError(f"method={method!r}: {reason}; use method='auto'")
            if self.derivative is None or form is self.own_forms[-1]:
                return form.run(call)
            return _compiled_with_derivative(self, method, (("default", form),), call)
        supported = [form for form in self.forms.values() if form.refusal(call) is None]
        plain = _by_platform(supported, call, differentiated=False)
        if self.derivative is not None:
            return _compiled_with_derivative(self, method, plain, call)
        derived = _by_platform(supported, call, differentiated=True)
        if plain == derived and len(plain) == 1:
            return plain[0][1].run(call)
        return _compiled(plain, derived, call)

    def _with_auto_axes(self, call: Any, method: str, explicit_axes: tuple[str, ...]) -> Any:
        """Runs with Auto axes. The results are sharded as the definition shards them.

        JAX refuses some functions and kernels, such as `ragged_dot`, with Explicit axes.
        """
        results = jax.eval_shape(self.own_forms[-1].run, call)
        specs = jax.tree.map(lambda result: result.sharding.spec, results)
        run: Any = partial(self, method=method)
        return jax.sharding.auto_axes(run, axes=explicit_axes, out_sharding=specs)(call)


@cache  # the packages are read at the first call
def _packages() -> list[tuple[str, Mapping[str, tuple[Form, ...]]]]:
    """The other packages that add forms, each with its `FORMS`."""
    found = []
    for entry in entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist else entry.value
        with failures_as_warnings(ENTRY_POINTS, package):
            found.append((package, importlib.import_module(entry.module).FORMS))
    return found


@cache
def _forms(operator: Operator) -> Mapping[str, Form]:
    added = [(package, forms.get(operator.name, ())) for package, forms in _packages()]
    found = [*added, ("twinscan", operator.own_forms)]
    forms = by_name(
        f"form of {operator.name}",
        ((form.name, form, package) for package, forms in found for form in forms),
    )
    return forms | {form.name: form for form in operator.other_forms if form.name not in forms}


Choice = tuple[tuple[str, Form], ...]
"""The form for each platform, without platforms whose form is that of "default"."""


def _by_platform(forms: list[Form], call: Any, *, differentiated: bool) -> Choice:
    found = {p: _best(forms, call, p, differentiated) for p in PLATFORMS}
    return tuple((p, f) for p, f in found.items() if p == "default" or f != found["default"])


def _best(forms: list[Form], call: Any, platform: str, differentiated: bool) -> Form:
    return next(
        form
        for form in forms
        if (not form.platforms or platform in form.platforms)
        and form.pays(call, platform, differentiated)
    )


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(plain: Choice, derived: Choice, call: Any) -> Any:
    """Without a derivative, only the form that runs is traced."""
    return by_platform(call, **{platform: form.run for platform, form in plain})


@partial(_run.defjvp, symbolic_zeros=True)
def _run_jvp(plain: Choice, derived: Choice, primals, tangents):
    """Traces all forms, because a derivative by `by_platform` would run the forward pass twice."""
    leaves, structure = jax.tree.flatten(primals)
    tangents = jax.tree.leaves(tangents)
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

    def run(*moved):
        values = dict(enumerate(leaves)) | dict(zip(moving, moved, strict=True))
        (call,) = structure.unflatten(values.values())
        forms = {platform: form.run for platform, form in derived}
        return jax.lax.platform_dependent(call, **forms)

    return jax.jvp(run, [leaves[i] for i in moving], [tangents[i] for i in moving])


_compiled = jax.jit(_run, static_argnums=(0, 1))
"""Compiles once for all equal calls outside of `jax.jit`."""


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _run_with_derivative(operator: Operator, method: str, choice: Choice, call: Any) -> Any:
    if len(choice) == 1:
        return choice[0][1].run(call)
    return by_platform(call, **{platform: form.run for platform, form in choice})


@_run_with_derivative.defjvp
def _derivative_of_operator(operator: Operator, method: str, choice: Choice, primals, tangents):
    assert operator.derivative is not None
    return operator.derivative(operator, method, *primals, *tangents)


_compiled_with_derivative = jax.jit(_run_with_derivative, static_argnums=(0, 1, 2))


def runs_on_one_device(platform: str) -> bool:
    """Whether the program runs on one device of a platform, or on several by `jax.shard_map`.

    XLA does not divide a kernel over devices. It would gather the whole batch on each of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = not mesh.empty and mesh.are_all_axes_manual
    return by_hand or num_devices(platform) == 1


def known_size(*axes: Any) -> int:
    """The product of sizes, or 0 if one of them is symbolic."""
    return 0 if any(map(is_symbolic_dim, axes)) else math.prod(axes)


def num_devices(platform: str) -> int:
    """The number of devices of a platform that JAX can use."""
    try:
        return len(jax.devices(platform))
    except RuntimeError:
        return 0


class FormTable(NamedTuple):
    """The forms of one call of an operator, as `forms_of` returns them."""

    operator: str
    platform: str
    chosen: str
    """The form that runs."""
    reasons: tuple[tuple[str, str], ...]
    """The other forms, each with why it does not run."""

    def __str__(self) -> str:
        """A line for each form."""
        lines = [(self.chosen, "runs"), *self.reasons]
        width = max(len(name) for name, _ in lines)
        rows = (f"  {name:{width}}  {line}" for name, line in lines)
        return "\n".join([f"{self.operator} on {self.platform}", *rows])


def forms_of(
    function: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    differentiated: bool = False,
    **kwargs: Any,
) -> list[FormTable]:
    """Shows which forms would run in a call of an operator, a layer or a model, and why.

        >>> layer = LSTM(64, 256, rngs=nnx.Rngs(0))
        >>> [table] = ops.forms_of(layer, jnp.ones((8, 100, 64)))
        >>> print(table)
        recurrent_stack on cpu
          xla         runs
          cudnn       it needs an NVIDIA GPU, and JAX finds none
          definition  "xla" is preferred
          native      it needs the package twinscan-native (pip install ./native)

    The call is traced, but not run.

    Args:
        function: the operator, layer or model.
        *args: its arguments.
        platform: "cpu", "cuda" or "tpu", on which the program would run. None: JAX's default.
        differentiated: whether a derivative would be computed as well.
        **kwargs: its keyword arguments.

    Returns:
        The tables of all calls of operators with forms, in their order. Equal ones come once.

    """
    recording = _Recording()
    with _recording(recording):
        jax.eval_shape(lambda: function(*args, **kwargs))
    platform = platform or jax.default_backend()
    platform = {"gpu": "cuda"}.get(platform, platform)
    tables = (_table(*call, platform, differentiated) for call in recording.calls)
    return list(dict.fromkeys(tables))


class _Recording:
    """The calls of operators while `forms_of` traces a function."""

    def __init__(self):
        self.calls: list[tuple[Operator, Any, str]] = []


_recording = jax.make_user_context(None)
"""The current `_Recording`. A context of JAX, because JAX traces functions again in another one."""


def _table(
    operator: Operator, call: Any, method: str, platform: str, differentiated: bool
) -> FormTable:
    refusals = {name: form.refusal(call) for name, form in operator.forms.items()}
    supported = [form for name, form in operator.forms.items() if not refusals[name]]
    chosen = method
    if method == "auto":
        chosen = _best(supported, call, platform, differentiated).name

    def reason(form: Form) -> str:
        if refusal := refusals[form.name]:
            return refusal
        if form.platforms and platform not in form.platforms:
            return f"it runs on {' and '.join(form.platforms)}"
        if method == "auto" and not form.pays(call, platform, differentiated):
            return "it is not likely to be faster"
        return f'"{chosen}" is preferred'

    reasons = ((name, reason(form)) for name, form in operator.forms.items() if name != chosen)
    return FormTable(operator.name, platform, chosen, tuple(reasons))
