"""What a comparison starts from: where the reference and its weights come from."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from jax_models.ops.checks import checked_bool, described
from parity_tests.engine.candidates.model_weights import ReferenceWeights
from parity_tests.engine.candidates.port import Start
from parity_tests.engine.problem import (
    DTYPES,
    Problem,
    called,
    check_functions,
    checked_arrays,
    checked_dtypes,
    checked_int,
    with_kwargs,
)
from parity_tests.engine.progress import Say
from parity_tests.engine.references.reference import Reference


class Opener(Protocol):
    """Makes the reference of a problem; `say` is told what runs."""

    def __call__(self, problem: Problem, say: Say) -> Reference: ...


@dataclasses.dataclass(frozen=True)
class Request:
    """What the arguments of a comparison ask for; None leaves the choice to the reference."""

    inputs: tuple[Any, ...]
    has_kwargs: bool
    """Whether the last input is a dict of inputs by name."""
    dtypes: tuple[str, ...] | None
    seed: int | None
    call_twin: Callable[..., Any] | None


@dataclasses.dataclass(frozen=True)
class Source:
    """A reference that has been opened, before the candidate is known."""

    twin: Any
    """What the problem gets as its twin."""
    known: ReferenceWeights
    reference: Opener
    submodules: Collection[str] | None = dataclasses.field(default=None, kw_only=True)
    """The names of its submodules, with "" for the module itself; None if unknown."""
    no_calls: str = dataclasses.field(default="", kw_only=True)
    """Why its submodules cannot be compared one by one; empty if they can."""

    def completed(self, request: Request) -> Request:
        """The request, completed by what the reference itself prescribes."""
        return request

    def checked_locate(self, locate: bool | None, names: Any) -> bool:
        """Whether to locate a failure; None means True if submodules can be compared."""
        is_chosen = locate is not None and checked_bool("locate", locate)
        if (is_chosen or names) and self.no_calls:
            raise ValueError(f"locate: {self.no_calls}")
        return is_chosen if locate is not None else not self.no_calls

    def start(self, request: Request, logits: str | bool) -> Start:
        """A function that makes the problem from the fields of its JAX side."""
        call_twin = request.call_twin or called
        return partial(
            Problem,
            twin=self.twin,
            call_twin=with_kwargs(call_twin) if request.has_kwargs else call_twin,
            inputs=request.inputs,
            dtypes=request.dtypes or DTYPES[:2],
            seed=request.seed or 0,
            logits=logits,
        )


def requested(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtypes: Iterable[str] | None,
    seed: int | None,
    call_twin: Callable[..., Any] | None,
) -> Request:
    """Check a user's arguments and return them as a request."""
    check_functions({}, {"call_twin": call_twin})
    given = checked_arrays("inputs", inputs, flags=True)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs: expected a dict of inputs by name, got {described(kwargs)}")
    if kwargs:
        given = (*given, checked_arrays("kwargs", dict(kwargs), flags=True))
    return Request(
        given,
        bool(kwargs),
        None if dtypes is None else checked_dtypes(dtypes),
        None if seed is None else checked_int("seed", seed, 0),
        call_twin,
    )
