"""What a comparison starts from: where the reference and its weights come from."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from flax import nnx

from jax_models.ops.checks import described
from parity_tests.engine.candidates.adapters import adapted
from parity_tests.engine.candidates.port import Start, called, kind_of
from parity_tests.engine.problem import (
    DTYPES,
    Problem,
    check_functions,
    checked_arrays,
    checked_dtypes,
    checked_int,
    is_torch_module,
)
from parity_tests.engine.progress import Say
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.references.reference_weights import Known


class Opener(Protocol):
    """Makes the reference of a problem; `say` is told what runs."""

    def __call__(self, problem: Problem, say: Say) -> Reference: ...


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a user asks a comparison for; None is for the reference to say."""

    inputs: tuple[Any, ...]
    has_kwargs: bool
    """Is the last input to be given by name?"""
    dtypes: tuple[str, ...] | None
    seed: int | None
    call_twin: Callable[..., Any] | None


@dataclasses.dataclass(frozen=True)
class Source:
    """A reference before it is known what is measured against it."""

    twin: Any
    """What the problem gets as its twin."""
    known: Known
    reference: Opener
    submodules: Collection[str] | None = dataclasses.field(default=None, kw_only=True)
    """The names of its submodules, itself "" among them; None if they are not known."""
    no_calls: str = dataclasses.field(default="", kw_only=True)
    """Why it cannot tell call by call what it computes; empty if it can."""

    def settled(self, asked: Asked) -> Asked:
        """What is asked for, where the reference has something to say of it."""
        return asked

    def start(self, asked: Asked, logits: str | bool) -> Start:
        """A problem but for its JAX side."""
        call_twin = asked.call_twin or called
        return partial(
            Problem,
            twin=self.twin,
            call_twin=with_kwargs(call_twin) if asked.has_kwargs else call_twin,
            inputs=asked.inputs,
            dtypes=asked.dtypes or DTYPES[:2],
            seed=asked.seed or 0,
            logits=logits,
        )


def asked_for(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtypes: Iterable[str] | None,
    seed: int | None,
    call_twin: Callable[..., Any] | None,
) -> Asked:
    """What a user's arguments ask for, checked."""
    check_functions({}, {"call_twin": call_twin})
    given = checked_arrays("inputs", inputs, flags=True)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs: expected a dict of inputs by name, got {described(kwargs)}")
    if kwargs:
        given = (*given, checked_arrays("kwargs", dict(kwargs), flags=True))
    return Asked(
        given,
        bool(kwargs),
        None if dtypes is None else checked_dtypes(dtypes),
        None if seed is None else checked_int("seed", seed, 0),
        call_twin,
    )


def with_kwargs(call: Callable[..., Any]) -> Callable[..., Any]:
    """The last input has the arguments by name."""
    return lambda model, *inputs: call(model, *inputs[:-1], **inputs[-1])


def refuse_onnx(twin: Any) -> None:
    """Refuse a model of ONNX, or the path of one. Imports no onnx.

    Raises:
        TypeError: it is one.

    """
    onnx = sys.modules.get("onnx")
    is_path = isinstance(twin, str | os.PathLike) and os.fspath(twin).endswith(".onnx")
    if is_path or (onnx is not None and isinstance(twin, onnx.ModelProto)):
        raise TypeError(
            "twin: ONNX models are no longer references: run the model in PyTorch (onnx2torch, for "
            "example) and pass that module, or a file that `record` wrote of it; a recurrent layer "
            "is imported by jax_models.from_onnx"
        )


@contextlib.contextmanager
def opened(twin: Any) -> Iterator[Source]:
    """The source that a user names: a torch module, a JAX model, or a record."""
    refuse_onnx(twin)
    if isinstance(twin, str | os.PathLike):
        from parity_tests.engine.references.recorded_reference import source_of

        yield source_of(twin)
        return
    is_class = isinstance(twin, type)
    if (
        isinstance(twin, nnx.Module)
        or adapted(twin) is not None
        or (callable(twin) and not is_class and not is_torch_module(twin))
    ):
        from parity_tests.engine.references.jax_reference import source_of

        yield source_of(twin)
        return
    if not is_torch_module(twin):
        raise TypeError(
            "twin: expected a torch.nn.Module, a JAX model or the path of a record, got "
            f"{kind_of(twin)}"
        )
    from parity_tests.engine.candidates.torch_run import one_thread
    from parity_tests.engine.references.torch_port import checked_twin, weights_known
    from parity_tests.engine.references.torch_reference import TorchReference

    twin = checked_twin(twin)
    with one_thread():
        submodules = [name for name, _ in twin.named_modules()]
        yield Source(twin, weights_known(twin), TorchReference, submodules=submodules)
