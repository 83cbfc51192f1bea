"""Open the reference that a user gives."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from flax import nnx

from parity_tests.engine.candidates.adapters import foreign_model
from parity_tests.engine.problem import is_torch_module, kind_of
from parity_tests.engine.references.jax_reference import JaxReference
from parity_tests.engine.references.recorded_reference import RecordedReference
from parity_tests.engine.references.reference import Reference


@contextlib.contextmanager
def open_reference(twin: Any) -> Iterator[Reference]:
    """Open a torch module, a JAX model or the path of a record as the reference."""
    refuse_onnx(twin)
    if isinstance(twin, str | os.PathLike):
        yield RecordedReference(twin)
    elif is_torch_module(twin):
        # If the reference is a record or a JAX model, torch need not be installed.
        from parity_tests.engine.candidates.torch_module import checked_twin
        from parity_tests.engine.candidates.torch_run import one_thread
        from parity_tests.engine.references.torch_reference import TorchReference

        with one_thread():
            yield TorchReference(checked_twin(twin))
    elif (
        isinstance(twin, nnx.Module)
        or foreign_model(twin) is not None
        or (callable(twin) and not isinstance(twin, type))
    ):
        yield JaxReference(twin)
    else:
        raise TypeError(
            "twin: expected a torch.nn.Module, a JAX model or the path of a record, got "
            f"{kind_of(twin)}"
        )


def refuse_onnx(twin: Any) -> None:
    """Refuse an ONNX model, or the path of one. This function does not import onnx."""
    onnx = sys.modules.get("onnx")
    is_path = isinstance(twin, str | os.PathLike) and os.fspath(twin).endswith(".onnx")
    if is_path or (onnx is not None and isinstance(twin, onnx.ModelProto)):
        raise TypeError(
            "twin: ONNX models are no longer references: run the model in PyTorch (onnx2torch, for "
            "example) and pass that module, or pass a file that `record` wrote of it; "
            "jax_models.from_onnx imports recurrent layers"
        )
