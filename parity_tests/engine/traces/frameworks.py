"""Record the calls of a JAX side's modules, whatever their framework.

A framework that has not been imported is not imported here, because no module can belong to it.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import jax
from flax import nnx

from parity_tests.engine.problem import Problem
from parity_tests.engine.traces.hyperparameters import hyperparameters_of
from parity_tests.engine.traces.tap import observe, tapped
from parity_tests.engine.traces.trace import Call, Trace

METHODS = ("__call__", "sequence", "attend")
"""How modules call each other; `sequence` is that of this package's layers."""


class Recorder:
    """Tells a trace of the calls of modules.

    `name_of(module)` and `weights_of(module)`, its arrays, differ by framework. `on_weights` gets a
    call and its weights, which may be traced.
    """

    def __init__(self, trace: Trace, on_weights: Callable[[Call, list[Any]], None] | None):
        self.trace, self.on_weights = trace, on_weights
        self._running: set[tuple[int, str]] = set()
        self.names: dict[int, str] = {}
        self._known: list[Any] = []  # so that no other module gets its id

    def call(
        self,
        module: Any,
        name: str,
        weights: Callable[[], Any],
        method: Callable[..., Any],
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """What the method returns; a module's calls of its own methods are part of the call."""
        key = (id(module), name)
        if key in self._running:
            return method(*args, **kwargs)
        call = self.trace.begin(
            name, type(module).__name__, hyperparameters=hyperparameters_of(module)
        )
        if self.on_weights is not None:
            leaves = [leaf for leaf in jax.tree.leaves(weights()) if hasattr(leaf, "shape")]
            self.on_weights(call, leaves)
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

    def register(self, prefix: str, modules: Iterator[tuple[str, Any]]) -> None:
        """Name a module's submodules, except those that have a name already."""
        for path, module in modules:
            name = ".".join(part for part in (prefix, path) if part)
            if self.names.setdefault(id(module), name) == name:
                self._known.append(module)

    def name(self, module: Any, submodules: Callable[[Any], Iterator[tuple[str, Any]]]) -> str:
        """A module's path.

        A module that a transformation has split and merged is a new object. It gets the path of a
        module of its class inside the current call that has not been called there.
        """
        if id(module) not in self.names:
            self.register(self._guess(module), submodules(module))
        return self.names[id(module)]

    def _guess(self, module: Any) -> str:
        parent = self.trace.open[-1] if self.trace.open else None
        inside = "" if parent is None else f"{parent.name}." if parent.name else ""
        called = {call.name for call in self.trace.calls if call.parent is parent}
        known = [self.names[id(other)] for other in self._known if type(other) is type(module)]
        similar = [name for name in known if name.startswith(inside)] or known
        fresh = [name for name in similar if name not in called]
        if fresh or similar:
            return (fresh or similar[-1:])[0]
        return "" if parent is None else f"{inside}{type(module).__name__}"


def _subclasses(cls: type) -> Iterator[type]:
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _subclasses(sub)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextlib.contextmanager
def _methods_replaced(base: type, name_of: Callable, weights_of: Callable, recorder: Recorder):
    """A context in which the methods of all classes with this base tell the recorder."""

    def telling(method):
        @wraps(method)
        def wrapper(self, *args, **kwargs):
            return recorder.call(
                self,
                name_of(self),
                lambda: weights_of(self),
                lambda *args, **kwargs: method(self, *args, **kwargs),
                args,
                kwargs,
            )

        return wrapper

    with contextlib.ExitStack() as stack:
        for cls in dict.fromkeys(_subclasses(base)):
            for name in METHODS:
                method = vars(cls).get(name)
                if callable(method) and not isinstance(method, type):
                    stack.enter_context(_replaced(cls, name, telling(method)))
        yield


def nnx_modules(module: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """The paths of a module and its submodules; the module's own path is empty."""
    for path, submodule in nnx.iter_modules(module):
        yield ".".join(map(str, path)), submodule


def _of_nnx(recorder: Recorder):
    return _methods_replaced(
        nnx.Module,
        lambda module: recorder.name(module, nnx_modules),
        lambda module: jax.tree.leaves(nnx.state(module)),
        recorder,
    )


def _interceptor(recorder: Recorder, name_of: Callable, weights_of: Callable) -> Callable:
    """A function that Linen and haiku call in place of each method."""

    def intercept(method, args, kwargs, context):
        module = context.module
        if context.method_name not in METHODS:
            return method(*args, **kwargs)
        return recorder.call(
            module, name_of(module), lambda: weights_of(module), method, args, kwargs
        )

    return intercept


def _of_linen(recorder: Recorder):
    interceptor = _interceptor(
        recorder, lambda module: ".".join(module.path), lambda module: module.variables
    )
    return sys.modules["flax.linen"].intercept_methods(interceptor)


def _of_haiku(recorder: Recorder):
    interceptor = _interceptor(
        recorder,
        lambda module: module.module_name.replace("/~/", "/").replace("/", "."),
        lambda module: [module.params_dict(), module.state_dict()],
    )
    return sys.modules["haiku"].intercept_methods(interceptor)


def _of_equinox(recorder: Recorder):
    equinox = sys.modules["equinox"]

    def submodules(module):
        leaves = jax.tree_util.tree_leaves_with_path
        nodes, todo = [("", module)], [("", module)]
        while todo:
            prefix, node = todo.pop(0)
            inside = leaves(
                node, is_leaf=lambda x, node=node: isinstance(x, equinox.Module) and x is not node
            )
            for path, leaf in inside:
                if isinstance(leaf, equinox.Module):
                    name = prefix + jax.tree_util.keystr(path)
                    nodes.append((_dotted(name), leaf))
                    todo.append((name, leaf))
        return iter(nodes)

    return _methods_replaced(
        equinox.Module,
        lambda module: recorder.name(module, submodules),
        lambda module: equinox.filter(module, equinox.is_array),
        recorder,
    )


def _dotted(path: str) -> str:
    return path.replace("[", ".").replace("]", "").replace("'", "").lstrip(".")


def _of_keras(recorder: Recorder):
    layer = sys.modules["keras"].layers.Layer
    method = layer.__call__

    def wrapper(self, *args, **kwargs):
        return recorder.call(
            self,
            self.name if not recorder.trace.open else f"{recorder.trace.open[-1].name}.{self.name}",
            lambda: [variable.value for variable in self.variables],
            lambda *args, **kwargs: method(self, *args, **kwargs),
            args,
            kwargs,
        )

    return _replaced(layer, "__call__", wrapper)


FRAMEWORKS = {
    "flax.nnx": _of_nnx,
    "flax.linen": _of_linen,
    "haiku": _of_haiku,
    "equinox": _of_equinox,
    "keras": _of_keras,
}


@contextlib.contextmanager
def recording(
    trace: Trace,
    problem: Problem,
    on_weights: Callable[[Call, list[Any]], None] | None = None,
) -> Iterator[Problem]:
    """A context that gives the problem with a JAX side whose modules tell the trace of their calls.

    JAX runs operation by operation, so that no transformation traces a module once and calls it
    twice, and `scan` is a loop. `jax.checkpoint` would still trace, so it returns its function.
    """
    recorder = Recorder(trace, on_weights)

    def call(model: Any, *inputs: Any) -> Any:
        if isinstance(model, nnx.Module):
            recorder.register("", nnx_modules(model))
        return problem.call(model, *inputs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.disable_jit())
        for name in ("checkpoint", "remat"):
            stack.enter_context(_replaced(jax, name, lambda function, **_: function))
        for name, of in FRAMEWORKS.items():
            if name in sys.modules:
                stack.enter_context(of(recorder))
        stack.enter_context(tapped(trace))
        yield dataclasses.replace(problem, call=call)
