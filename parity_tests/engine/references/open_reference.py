"""Open the reference that a user names."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from flax import nnx

from parity_tests.engine.candidates.adapters import foreign_model
from parity_tests.engine.problem import is_torch_module, kind_of
from parity_tests.engine.references import jax_reference, recorded_reference
from parity_tests.engine.references.source import Source


def refuse_onnx(twin: Any) -> None:
    """Refuse a model of ONNX, or the path of one. Imports no onnx."""
    onnx = sys.modules.get("onnx")
    is_path = isinstance(twin, str | os.PathLike) and os.fspath(twin).endswith(".onnx")
    if is_path or (onnx is not None and isinstance(twin, onnx.ModelProto)):
        raise TypeError(
            "twin: ONNX models are no longer references: run the model in PyTorch (onnx2torch, for "
            "example) and pass that module, or pass a file that `record` wrote of it; "
            "jax_models.from_onnx imports recurrent layers"
        )


@contextlib.contextmanager
def open_reference(twin: Any) -> Iterator[Source]:
    """Open a torch module, a JAX model or the path of a record as the source of a reference."""
    refuse_onnx(twin)
    if isinstance(twin, str | os.PathLike):
        yield recorded_reference.source_of(twin)
        return
    is_class = isinstance(twin, type)
    if (
        isinstance(twin, nnx.Module)
        or foreign_model(twin) is not None
        or (callable(twin) and not is_class and not is_torch_module(twin))
    ):
        yield jax_reference.source_of(twin)
        return
    if not is_torch_module(twin):
        raise TypeError(
            "twin: expected a torch.nn.Module, a JAX model or the path of a record, got "
            f"{kind_of(twin)}"
        )
    # Where the reference is a record or a JAX model, torch need not be installed.
    from parity_tests.engine.candidates.torch_module import checked_twin
    from parity_tests.engine.candidates.torch_run import one_thread
    from parity_tests.engine.references.torch_reference import TorchReference, reference_weights

    twin = checked_twin(twin)
    with one_thread():
        submodules = [name for name, _ in twin.named_modules()]
        yield Source(twin, reference_weights(twin), TorchReference, submodules=submodules)
