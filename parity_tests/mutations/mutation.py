"""What a planted fault says, and the ways to plant one."""

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import jax

from parity_tests.checks import CHECKS, Subject
from parity_tests.engine.measure import measure
from parity_tests.registry import CASES

Plant = Callable[[], contextlib.AbstractContextManager[Any]]
"""The fault is there as long as the context lasts."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault in a case of the registry, and what must find it.

    What is built and computed under `plant()` has the fault: the layer, its problem, its results.
    """

    name: str
    case: str
    kind: Literal["weights", "forward", "states and masks", "training"]
    plant: Plant
    check: str | None = None
    """One of `CHECKS`; None is the comparison with the twin."""
    dtypes: tuple[str, ...] = ("float64",)
    """Those in which the comparison must fail."""
    culprit: str | None = None
    """The twin's submodule that `locate` must name; "" is the whole module."""

    def __str__(self) -> str:
        """The case, what is wrong, and what must find it."""
        return f"{self.case}: {self.name} ({self.check or 'agrees with twin'})"


def is_caught(mutation: Mutation) -> bool:
    """Does the check fail that is there to find the fault, on a CPU?"""
    case = CASES[mutation.case]
    with mutation.plant(), jax.default_device(jax.devices("cpu")[0]):
        if mutation.check is None:
            report = measure(case.problem(), mutation.dtypes)
            return {dtype for dtype, _, _ in report.failures} == {*mutation.dtypes}
        try:
            CHECKS[mutation.check](Subject(case))
        except AssertionError:
            return True
        return False


def replaced(targets: str | Sequence[str], wrong: Callable[[Any], Any]) -> Plant:
    """What is at `module.attribute`, or `module.Class.attribute`, is `wrong` of it.

    What was compiled from it before is compiled anew, and again afterwards.
    """

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(jax.clear_caches)
            for target in [targets] if isinstance(targets, str) else targets:
                path, _, name = target.rpartition(".")
                owner = pkgutil.resolve_name(path)
                stack.enter_context(mock.patch.object(owner, name, wrong(getattr(owner, name))))
            jax.clear_caches()
            yield

    return plant


def edited(edit: Callable[[Any], None]) -> Plant:
    """Every layer is edited as soon as it has its weights."""

    def wrong(build_layer):
        def build_edited(*args):
            layer = build_layer(*args)
            edit(layer)
            return layer

        return build_edited

    return replaced("parity_tests.registry.Case.build_layer", wrong)


def at(model: Any, path: str) -> Any:
    """The submodule or parameter of a model at a path."""
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model
