"""A torch module and any JAX port of it, as a problem."""

from functools import partial
from typing import Any

import torch

from parity_tests.engine.candidates.port import kind_of, port
from parity_tests.engine.candidates.torch_module import converted, weight_owners
from parity_tests.engine.candidates.torch_run import changes_result
from parity_tests.engine.problem import Problem, arrays_of
from parity_tests.engine.references.reference_weights import Known


def checked_twin(twin: Any) -> torch.nn.Module:
    """A copy of a torch module on the CPU, in evaluation mode.

    Raises:
        TypeError: it is none.
        ValueError: it has no weights.

    """
    if not isinstance(twin, torch.nn.Module):
        raise TypeError(f"twin: expected a torch.nn.Module, got {kind_of(twin)}")
    if any(weight.is_meta for weight in twin.state_dict().values()):
        raise ValueError("twin: expected weights, got a module on the device meta, which has none")
    return converted(twin, torch.Tensor.cpu).eval()


def weights_known(twin: torch.nn.Module) -> Known:
    """What the module says of its weights."""
    parameters = [name for name, _ in twin.named_parameters(remove_duplicate=False)]
    return Known(
        arrays_of(twin.state_dict()),
        weight_owners(twin),
        parameters,
        lambda problem, key: changes_result(problem, [key]),
    )


def port_of(
    twin: Any, model: Any, weights: Any, call: Any = None, **fields: Any
) -> tuple[Problem, list[str], list[str]]:
    """The problem with these fields, the faults of the weights, and what cannot be compared."""
    twin = checked_twin(twin)
    return port(partial(Problem, twin=twin, **fields), weights_known(twin), model, weights, call)
