"""The calls of one side's modules, with the arrays of each call, forward and backward."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from parity_tests.engine.problem import Arrays, Problem, is_flag
from parity_tests.engine.results import Results

SLOTS = ("inputs", "outputs", "output gradients", "input gradients", "weight gradients")
"""The kinds of arrays of a call.

The gradient of a weight belongs to the first call of the module that holds the weight or, if that
module is not called, of the innermost called module around it.
"""


class Direction(NamedTuple):
    """The slots whose arrays a call takes and gives, in the forward or in the backward pass.

    Forward, a call takes inputs and gives outputs. Backward, it takes the gradients of its outputs
    and gives those of its inputs.
    """

    name: str
    incoming: str
    outgoing: str


FORWARD = Direction("forward", "inputs", "outputs")
BACKWARD = Direction("backward", "output gradients", "input gradients")


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module, or one value that `tap` names in a function (it has only outputs)."""

    name: str
    """The path of the module; "" for the whole module and for the whole run."""
    kind: str
    """The module's class, "tap", or "run" for the call of the whole run."""
    index: int
    """The index of the call in its trace."""
    parent: "Call | None" = None
    function: str = ""
    """The `forward` that runs in torch, such as `torch.nn.modules.rnn.LSTM.forward`.

    It tells torch's own LSTM, and a subclass that inherits its `forward`, from other classes that
    are called LSTM.
    """
    weights: frozenset[str] = frozenset()
    """The torch keys of the weights that the module holds."""
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slots: dict[str, Arrays] = dataclasses.field(default_factory=lambda: {s: {} for s in SLOTS})
    dtypes: dict[str, dict[str, str]] = dataclasses.field(
        default_factory=lambda: {s: {} for s in SLOTS}
    )
    """The dtype of each floating array by slot and label, as the module computes it."""
    sources: "set[Call]" = dataclasses.field(default_factory=set)
    """The calls from whose outputs the inputs are computed without another call (only in torch)."""
    identities: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    """Identifiers of the arrays, by slot and label; equal arrays have equal identifiers."""
    differentiated: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """The slot and label of each input and output that a differentiated weight or input reaches.

    If such an array has no gradient, its gradient is zero. The others are computed from constants,
    from integers, or behind a stopped gradient.
    """

    @property
    def ancestors(self) -> Iterator["Call"]:
        """The calls around this one, the innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


@dataclasses.dataclass
class Trace:
    """The calls of one run, in the order in which they began.

    The first call stands for the whole run: it takes the inputs and gives the results.
    """

    calls: list[Call] = dataclasses.field(default_factory=list)
    open_calls: list[Call] = dataclasses.field(default_factory=list)
    results: Results = dataclasses.field(default_factory=Results)
    is_forward: bool = False
    """Whether gradients are kept only as labels, without their values."""

    @property
    def root(self) -> Call:
        """The call of the whole run."""
        return self.calls[0]

    def begin(self, name: str, kind: str, **fields: Any) -> Call:
        """Begins a call inside the innermost call that has not returned."""
        parent = self.open_calls[-1] if self.open_calls else None
        call = Call(name, kind, len(self.calls), parent, **fields)
        self.calls.append(call)
        return call

    def calls_inside(self, call: Call, direction: Direction) -> list[Call]:
        """The calls made directly by a call, in order; backward, in reverse order."""
        calls = [each for each in self.calls if each.parent is call]
        return calls if direction is FORWARD else calls[::-1]

    @contextlib.contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """A context in which a call is open. A call that raises an error stays open.

        So after an error, the innermost open call is the one that raised it.
        """
        self.open_calls.append(call)
        yield
        self.open_calls.remove(call)

    def keep(self, call: Call, slot: str, label: str, value: Any) -> None:
        """Keeps a value; a later value under the same label replaces it."""
        is_kept = not self.is_forward or slot in ("inputs", "outputs")
        call.slots[slot][label] = np.array(value if is_kept else ())

    def finish(self, problem: Problem, results: Results) -> "Trace":
        """Keeps the results, and assigns each weight's gradient to a call."""
        # The call of the whole run gets the problem's inputs and the results.
        self.results = results
        self.root.slots["inputs"] = {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(problem.inputs)
            if not is_flag(leaf)
        }
        for group, slot in (
            ("outputs", "outputs"),
            ("final state", "outputs"),
            ("input gradient", "input gradients"),
        ):
            self.root.slots[slot] |= {
                f"{group} {name}": np.array(array) for name, array in results.get(group, {}).items()
            }

        # A weight's gradient goes to the first call of the innermost called module around it.
        called = {"": self.root} | {
            call.name: call for call in reversed(self.calls[1:]) if call.kind != "tap"
        }
        for key, gradient in results.get("weight gradients", {}).items():
            owner = key.rpartition(".")[0]
            while owner not in called:
                owner = owner.rpartition(".")[0]
            called[owner].slots["weight gradients"][key] = np.asarray(gradient)
        return self


def map_arrays(
    tree: Any, change: Callable[[str, Any], Any], is_array: Callable, path: str = ""
) -> Any:
    """A copy of nested containers in which the arrays are changed and everything else is kept.

    Containers are tuples, lists, mappings, and dataclasses, such as a ModelOutput. Modules of Linen
    and Equinox are dataclasses, too, but they are not containers.
    """
    recurse = partial(map_arrays, change=change, is_array=is_array)
    if is_array(tree):
        return change(path, tree)
    if isinstance(tree, tuple) and (names := getattr(tree, "_fields", None)):
        entries = zip(names, tree, strict=True)
        return type(tree)(*(recurse(value, path=f"{path}.{name}") for name, value in entries))
    if type(tree) in (tuple, list):
        return type(tree)(recurse(value, path=f"{path}[{i}]") for i, value in enumerate(tree))
    # In a copy, set only the entries that have changed, because a class may compute the others.
    if isinstance(tree, dict):
        changed = {key: recurse(value, path=f"{path}[{key!r}]") for key, value in tree.items()}
        changed = {key: value for key, value in changed.items() if value is not tree[key]}
        result = copy.copy(tree) if changed else tree
        for key, value in changed.items():
            result[key] = value
        return result
    if dataclasses.is_dataclass(tree) and not callable(tree):
        result = copy.copy(tree)
        for name in (field.name for field in dataclasses.fields(tree)):
            value = recurse(getattr(tree, name), path=f"{path}.{name}")
            if value is not getattr(tree, name):
                object.__setattr__(result, name, value)
        return result
    return tree
