"""Runs a JAX side and records the calls of its modules, whatever their framework.

No framework is imported here, because no module can belong to one that has not been imported.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any
from unittest import mock

import jax
from flax import nnx

from jax_models.weights.rows import join
from jax_models.weights.trees import path_of
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results
from parity_tests.engine.traces.hyperparameters import hyperparameters_of
from parity_tests.engine.traces.tap import observe, tapped
from parity_tests.engine.traces.trace import Call, Trace

METHODS = ("__call__", "sequence", "attend")
"""The methods by which modules call each other; `sequence` is used by this package's layers."""


class Recorder:
    """Records the calls of modules in a trace.

    `on_weights` is called with each call and the leaves of its module, which may be JAX tracers.
    """

    def __init__(self, trace: Trace, on_weights: Callable[[Call, list[Any]], None] | None):
        self.trace, self.on_weights = trace, on_weights
        self._running: set[tuple[int, str]] = set()
        self._named: dict[int, tuple[str, Any]] = {}  # modules stay alive, so that ids stay theirs

    def call(
        self,
        module: Any,
        name_of: Callable[[Any], str],
        weights_of: Callable[[Any], Any],
        method: Callable[..., Any],
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Calls a method, records the call, and returns the method's result.

        If a module calls its own methods, these are part of the same call.
        """
        key = (id(module), name := name_of(module))
        if key in self._running:
            return method(*args, **kwargs)
        call = self.trace.begin(
            name, type(module).__name__, hyperparameters=hyperparameters_of(module)
        )
        if self.on_weights is not None:
            self.on_weights(call, jax.tree.leaves(weights_of(module)))
        self._running.add(key)
        try:
            with self.trace.running(call):
                args, kwargs = observe(
                    self.trace, call, "inputs", "input gradients", (args, kwargs)
                )
                result = method(*args, **kwargs)
        finally:
            self._running.discard(key)
        return observe(self.trace, call, "outputs", "output gradients", result)

    @property
    def outer_name(self) -> str:
        """The name of the innermost call that has not returned; "" outside of all calls."""
        return self.trace.open_calls[-1].name if self.trace.open_calls else ""

    def register(self, prefix: str, modules: Iterator[tuple[str, Any]]) -> None:
        """Names a module and its submodules, except those that already have a name."""
        for path, module in modules:
            self._named.setdefault(id(module), (join(prefix, path) if path else prefix, module))

    def name(self, module: Any, submodules: Callable[[Any], Iterator[tuple[str, Any]]]) -> str:
        """A module's path.

        A transformation may split and merge a module, which makes a new object. The new object gets
        the path of a module of the same class that is inside the current call and has not been
        called there yet.
        """
        if id(module) not in self._named:
            self.register(self._guess_name(module), submodules(module))
        return self._named[id(module)][0]

    def _guess_name(self, module: Any) -> str:
        parent = self.trace.open_calls[-1] if self.trace.open_calls else None
        called = {call.name for call in self.trace.calls if call.parent is parent}
        named = self._named.values()
        same_class = [name for name, other in named if type(other) is type(module)]
        inside = join(self.outer_name, "")
        similar = [name for name in same_class if name.startswith(inside)] or same_class
        uncalled = [name for name in similar if name not in called]
        if similar:
            return (uncalled or similar[-1:])[0]
        return "" if parent is None else join(self.outer_name, type(module).__name__)


def nnx_modules(module: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """The paths of a module and its submodules; the module's own path is empty."""
    for path, submodule in nnx.iter_modules(module):
        yield ".".join(map(str, path)), submodule


def _equinox_modules(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The paths of an Equinox module and its submodules; the module's own path is `name`."""
    kind = sys.modules["equinox"].Module
    yield name, module
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        module, is_leaf=lambda node: isinstance(node, kind) and node is not module
    ):
        if isinstance(leaf, kind):
            yield from _equinox_modules(leaf, join(name, path_of(path)))


def _subclasses(cls: type) -> Iterator[type]:
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _subclasses(sub)


@contextlib.contextmanager
def _patched(
    recorder: Recorder, classes: Iterable[type], name_of: Callable, weights_of: Callable
) -> Iterator[None]:
    """A context in which the methods of these classes are called through the recorder."""

    def recorded(method):
        @wraps(method)
        def wrapper(self, *args, **kwargs):
            return recorder.call(self, name_of, weights_of, partial(method, self), args, kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        for cls in dict.fromkeys(classes):
            for name in METHODS:
                method = vars(cls).get(name)
                if callable(method) and not isinstance(method, type):
                    stack.enter_context(mock.patch.object(cls, name, recorded(method)))
        yield


def _interceptor(recorder: Recorder, name_of: Callable, weights_of: Callable) -> Callable:
    """A function that Linen and haiku call instead of each method."""

    def intercept(method, args, kwargs, context):
        if context.method_name not in METHODS:
            return method(*args, **kwargs)
        return recorder.call(context.module, name_of, weights_of, method, args, kwargs)

    return intercept


def _contexts(recorder: Recorder) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """For each framework that has been imported, a context in which its calls are recorded."""
    patched, interceptor = partial(_patched, recorder), partial(_interceptor, recorder)
    linen, haiku, equinox, keras = map(sys.modules.get, ("flax.linen", "haiku", "equinox", "keras"))
    yield patched(
        _subclasses(nnx.Module),
        lambda module: recorder.name(module, nnx_modules),
        nnx.state,
    )
    if linen is not None:
        yield linen.intercept_methods(
            interceptor(lambda module: ".".join(module.path), lambda module: module.variables)
        )
    if haiku is not None:
        yield haiku.intercept_methods(
            interceptor(
                lambda module: module.module_name.replace("/~/", "/").replace("/", "."),
                lambda module: [module.params_dict(), module.state_dict()],
            )
        )
    if equinox is not None:
        yield patched(
            _subclasses(equinox.Module),
            lambda module: recorder.name(module, _equinox_modules),
            lambda module: equinox.filter(module, equinox.is_array),
        )
    if keras is not None:
        yield patched(
            [keras.layers.Layer],
            lambda module: join(recorder.outer_name, module.name),
            lambda module: [variable.value for variable in module.variables],
        )


@contextlib.contextmanager
def recording(
    trace: Trace,
    problem: Problem,
    on_weights: Callable[[Call, list[Any]], None] | None = None,
) -> Iterator[Problem]:
    """A context that yields the problem with a JAX side whose module calls are recorded.

    JAX runs without jit, operation by operation, so that no transformation traces a module once and
    calls it twice, and `scan` is a loop. `jax.checkpoint` would still trace, so in this context it
    returns its function unchanged.
    """
    recorder = Recorder(trace, on_weights)
    lengths: list[int] = []

    def call(model: Any, *inputs: Any) -> Any:
        # A model that cannot be traced under x64 is traced again. The calls of the first attempt,
        # some of which are still open, do not count.
        lengths[:] = lengths or [len(trace.calls), len(trace.open_calls)]
        del trace.calls[lengths[0] :], trace.open_calls[lengths[1] :]
        if isinstance(model, nnx.Module):
            recorder.register("", nnx_modules(model))
        return problem.call(model, *inputs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.disable_jit())
        for name in ("checkpoint", "remat"):
            stack.enter_context(mock.patch.object(jax, name, lambda function, **_: function))
        for context in _contexts(recorder):
            stack.enter_context(context)
        stack.enter_context(tapped(trace))
        yield dataclasses.replace(problem, call=call)


def trace_jax(
    problem: Problem,
    dtype: str,
    oracle: Results,
    cast_to: Sequence[str] = (),
    *,
    noise: int = 0,
    **options: Any,
) -> Trace:
    """The calls of a JAX side. The arguments are those of `JaxSide.run` and of `JaxSide`."""
    trace = Trace()
    whole = trace.begin("", "run")
    with recording(trace, problem) as side, trace.running(whole):
        results = JaxSide(side, **options).run(side, dtype, oracle, cast_to, noise)
    return trace.finish(problem, results)
