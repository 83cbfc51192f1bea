"""Opens the reference that a user gives."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jax_models.checks.values import described
from parity_tests.engine.candidates.adapters import foreign_model
from parity_tests.engine.problem import is_function, is_torch_module
from parity_tests.engine.references.jax_reference import JaxReference
from parity_tests.engine.references.recorded_reference import RecordedReference
from parity_tests.engine.references.reference import Reference

ABOUT_ONNX = (
    ". ONNX models are no longer references: run the model in PyTorch (onnx2torch, for example) "
    "and pass that module, or pass a file that `record` wrote of it; jax_models.from_onnx imports "
    "recurrent layers"
)


@contextlib.contextmanager
def open_reference(twin: Any) -> Iterator[Reference]:
    """Opens a torch module, a JAX model or the path of a record as the reference."""
    is_path = isinstance(twin, str | os.PathLike)
    if is_path and not os.fspath(twin).endswith(".onnx"):
        yield RecordedReference(twin)
    elif is_torch_module(twin):
        # If the reference is a record or a JAX model, torch need not be installed.
        from parity_tests.engine.candidates.torch_run import checked_twin, one_thread
        from parity_tests.engine.references.torch_reference import TorchReference

        with one_thread():
            yield TorchReference(checked_twin(twin))
    elif isinstance(twin, nnx.Module) or foreign_model(twin) is not None or is_function(twin):
        yield JaxReference(twin)
    else:
        is_onnx = is_path or type(twin).__name__ == "ModelProto"
        raise TypeError(
            "twin: expected a torch.nn.Module, a JAX model or the path of a record, got "
            f"{described(twin)}{ABOUT_ONNX if is_onnx else ''}"
        )
