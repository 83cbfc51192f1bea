"""What the calls of one side's modules take and return, forward and backward."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Rows = dict[str, np.ndarray]
"""Arrays by label."""

SLOTS = ("inputs", "outputs", "output gradients", "input gradients", "weight gradients")
"""A weight's gradient belongs to the first call of the innermost called module around it."""


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module, or one named value of a function (a tap, which has outputs only)."""

    name: str
    kind: str
    parent: "Call | None" = None
    weights: frozenset[str] = frozenset()
    """The torch keys of the weights that the module holds."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of these weights, sorted."""
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slots: dict[str, Rows] = dataclasses.field(default_factory=lambda: {s: {} for s in SLOTS})
    dtypes: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    """The dtype of each floating array by slot and label, as the module computes it."""
    sources: "set[Call]" = dataclasses.field(default_factory=set)
    """For torch's calls: those whose outputs are the last ones that its inputs come from."""
    identities: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    """What identifies its arrays by their numbers, by slot and label."""

    def dtypes_in(self, slot: str) -> set[str]:
        """The dtypes of a slot's floating arrays, as the module computes them."""
        return {dtype for (at, _), dtype in self.dtypes.items() if at == slot}

    @property
    def ancestors(self) -> Iterator["Call"]:
        """The calls that this one is made in, the innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


@dataclasses.dataclass
class Trace:
    """The calls of one run in the order in which they began, and when each slot was filled."""

    calls: list[Call] = dataclasses.field(default_factory=list)
    events: list[tuple[Call, str]] = dataclasses.field(default_factory=list)
    open: list[Call] = dataclasses.field(default_factory=list)
    nodes: dict[Any, Call | None] = dataclasses.field(default_factory=dict)
    """The call that gives a node of torch's graph; None for a node that a call takes."""
    is_forward: bool = False
    """Whether gradients are kept only as labels, without their values."""

    def begin(self, name: str, kind: str, **fields: Any) -> Call:
        """Begin a call inside of the innermost call that has not returned."""
        call = Call(name, kind, self.open[-1] if self.open else None, **fields)
        self.calls.append(call)
        return call

    def fed_by(self) -> dict[Call, set[Call]]:
        """For each call, the calls that take what it gives: the reverse of `sources`."""
        fed: dict[Call, set[Call]] = {}
        for call in self.calls:
            for source in call.sources:
                fed.setdefault(source, set()).add(call)
        return fed

    @contextlib.contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """A context in which a call is open; if it raises, it stays open, which says where."""
        self.open.append(call)
        yield
        self.open.remove(call)

    def keep(self, call: Call, slot: str, label: str, value: Any) -> None:
        """Keep a value; a later value under the same label replaces it."""
        self.events.append((call, slot))
        is_kept = not self.is_forward or slot in ("inputs", "outputs")
        call.slots[slot][label] = np.array(value if is_kept else ())


def mapped(tree: Any, change: Callable[[str, Any], Any], is_array: Callable, path: str = "") -> Any:
    """A copy of nested containers with changed arrays; anything else in them is kept.

    Containers are tuples, lists, mappings, and dataclasses, such as a ModelOutput. Modules of Linen
    and Equinox are dataclasses, too, but they are not containers.
    """
    again = partial(mapped, change=change, is_array=is_array)
    if is_array(tree):
        return change(path, tree)
    if isinstance(tree, tuple) and (names := getattr(tree, "_fields", None)):
        return type(tree)(*(again(v, path=f"{path}.{n}") for n, v in zip(names, tree, strict=True)))
    if type(tree) in (tuple, list):
        return type(tree)(again(value, path=f"{path}[{i}]") for i, value in enumerate(tree))
    if isinstance(tree, dict):
        changed = {key: again(value, path=f"{path}[{key!r}]") for key, value in tree.items()}
        if all(changed[key] is tree[key] for key in tree):
            return tree
        if type(tree) is dict:
            return changed
        result = copy.copy(tree)
        for key, value in changed.items():
            result[key] = value
        return result
    if dataclasses.is_dataclass(tree) and not callable(tree):
        changed = {
            field.name: again(getattr(tree, field.name), path=f"{path}.{field.name}")
            for field in dataclasses.fields(tree)
        }
        result = copy.copy(tree)
        for name, value in changed.items():
            if value is not getattr(tree, name):
                object.__setattr__(result, name, value)
        return result
    return tree


def is_jax_array(value: Any) -> bool:
    """True for an array of numbers, including a traced one."""
    return isinstance(value, jax.Array | np.ndarray) and (
        jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool
    )


tell_p = Primitive("tell")
"""Returns its operand, and gives the value to a function under any transformation."""
tell_p.def_abstract_eval(lambda x, *, tell: x)


@tell_p.def_impl
def _tell(x: jax.Array, *, tell: Callable[[np.ndarray], None]) -> jax.Array:
    tell(np.asarray(x))
    return x


def _tell_batch(operands, axes, *, tell):
    """A vmapped axis comes first."""
    return tell_p.bind(jnp.moveaxis(operands[0], axes[0], 0), tell=tell), 0


def _tell_from_device(x: jax.Array, *, tell: Callable[[np.ndarray], None]) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.asarray(_tell(x, tell=tell)), shape, x)


batching.primitive_batchers[tell_p] = _tell_batch
mlir.register_lowering(tell_p, mlir.lower_fun(_tell_from_device, multiple_results=False))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def observed(forward: Callable, backward: Callable, x: jax.Array) -> jax.Array:
    """The same array; `forward` gets its value, and `backward` that of its gradient."""
    return tell_p.bind(x, tell=forward)


def _forward(forward, backward, x):
    return tell_p.bind(x, tell=forward), None


def _backward(forward, backward, _, gradient):
    if gradient.dtype == jax.dtypes.float0:
        return (None,)
    return (tell_p.bind(gradient, tell=backward),)


observed.defvjp(_forward, _backward)


def observe(trace: Trace, call: Call, forward: str, backward: str, tree: Any) -> Any:
    """The same arrays, whose values and gradients the trace keeps as these slots of the call."""

    def one(label: str, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            call.dtypes[forward, label] = str(x.dtype)
        return observed(
            partial(trace.keep, call, forward, label),
            partial(trace.keep, call, backward, label),
            jnp.asarray(x),
        )

    return mapped(tree, one, is_jax_array)


_active: list[Trace] = []


@contextlib.contextmanager
def tapped(trace: Trace) -> Iterator[None]:
    """A context in which `tap` tells the trace."""
    _active.append(trace)
    try:
        yield
    finally:
        _active.remove(trace)


def tap(name: str, x: Any) -> Any:
    """Name what a function computes after the torch submodule that returns the same.

    `x = tap("layers.0.mlp", mlp(x))` lets `compare(…, locate=True)` compare `x` with the output of
    the submodule `layers.0.mlp`. Outside of such a comparison it returns `x` and does nothing else.

    Args:
        name: the name of the torch submodule; if it is called several times, `tap` each call.
        x: an array, or a tree of arrays.

    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a torch submodule, got {name!r:.100}")
    for trace in _active:
        x = observe(trace, trace.begin(name, "tap"), "outputs", "output gradients", x)
    return x
