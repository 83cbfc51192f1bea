"""Operators that onnx's evaluator computes in float32 alone, or not as ONNX defines them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_batch_normalization import BatchNormalization_9
from onnx.reference.ops.op_loop import Loop
from scipy import special

RECURRENT = ("LSTM", "GRU", "RNN")
IGNORED = ("activation_alpha", "activation_beta", "clip", "input_forget")
"""Attributes of recurrent operators that the evaluator ignores."""
ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}
OF_FLOAT32 = ("GridSample",)
"""What computes in float32 in between, so that its results do not tell."""


class Erf(OpRun):
    """In the dtype that it is given."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (special.erf(x).astype(x.dtype),)


class Normalization(BatchNormalization_9):
    """Before opset 14, what has one output uses the running statistics."""

    def _run(self, *args: Any, epsilon: Any = None, **_: Any) -> Any:
        if len(self.onnx_node.output) > 1:
            raise NotImplementedError("it is in training mode")
        return super()._run(*args, epsilon=epsilon, momentum=None)


class Repeated(Loop):
    """A loop whose condition may be left out, and whose steps' results are stacked."""

    def _run(self, M: Any, cond: Any, *args: Any, **options: Any) -> tuple[Any, ...]:
        body, shapes = self._run_body, [()] * self.K

        def observed(*inputs: Any, **kwargs: Any) -> Any:
            outputs = body(*inputs, **kwargs)
            shapes[:] = [y.shape for y in outputs[len(outputs) - self.K :]]
            return outputs

        self._run_body = observed
        try:
            results = super()._run(M, np.array(True) if cond is None else cond, *args, **options)
        finally:
            self._run_body = body
        carried, stacked = results[: self.N], results[self.N :]
        return (
            *carried,
            *(y.reshape(-1, *shape) for y, shape in zip(stacked, shapes, strict=True)),
        )


def own_operator(op_type: str, version: int) -> type[OpRun] | None:
    """What to compute an operator by; None for the evaluator's own."""
    if op_type == "BatchNormalization" and 7 <= version < 14:
        return Normalization
    return {"Erf": Erf, "Loop": Repeated}.get(op_type)


def unsupported(op: OpRun, args: Sequence[Any]) -> str | None:
    """What the evaluator would ignore, if there is some."""
    if op.op_type not in RECURRENT:
        return None
    for name in IGNORED:
        if getattr(op, name, None) and (op.op_type, name[:10]) != ("RNN", "activation"):
            return f"onnx's evaluator ignores its {name}"
    given = getattr(op, "activations", None) or []
    expected = ACTIVATIONS.get(op.op_type, given[:1])
    if given and given != expected * (len(given) // len(expected)):
        return f"onnx's evaluator ignores its activations {', '.join(given)}"
    lengths = args[4] if len(args) > 4 else None
    steps = args[0].shape[1 if getattr(op, "layout", 0) else 0]
    if lengths is not None and np.any(lengths != steps):
        return "onnx's evaluator ignores its sequence_lens"
    return None
