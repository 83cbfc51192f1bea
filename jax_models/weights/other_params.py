"""Parameters that a layer can train in the place of its own, if the weights to load have those.

Such a layer has rows with an `otherwise`, and the methods of `HasOtherParams`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from flax import nnx

from jax_models.weights.keys import joined
from jax_models.weights.layouts import params_of
from jax_models.weights.tables import Table


class HasOtherParams(Protocol):
    """A layer that can train another parameter in the place of its own."""

    def other_param(self, name: str) -> nnx.Param:
        """Returns the other parameter, with the shape, the dtype and the sharding of the present.

        Raises:
            ValueError: the layer was built for the parameter that it has.

        """
        ...

    def adopt(self, name: str, param: nnx.Param) -> None:
        """Replaces the present parameter by the other one."""
        ...


def other_params(layer: nnx.Module, table: Table) -> dict[str, nnx.Param]:
    """The parameters in a table that the layer does not have, but can train, by path.

    The layer is left unchanged; `adopt` gives it the parameters.

    Raises:
        ValueError: the layer was built for the parameters that it has.

    """
    own = params_of(layer)
    rows = [(path, row) for row in table for path in row.params if path not in own]
    modules, found, refused = _modules(layer) if rows else {}, {}, {}
    for path, row in rows:
        place, _, name = path.rpartition(".")
        try:
            found[path] = modules[place].other_param(name)
        except ValueError as error:
            refused.setdefault(str(error), []).extend(row.keys)
    if refused:
        lines = (f"{', '.join(joined(keys))}: {reason}" for reason, keys in refused.items())
        raise ValueError(f"state_dict: {'; '.join(lines)}")
    return found


def adopt(layer: nnx.Module, params: Mapping[str, nnx.Param]) -> None:
    """Replaces parameters of a layer by those that `other_params` returned."""
    modules = _modules(layer) if params else {}
    for path, param in params.items():
        place, _, name = path.rpartition(".")
        modules[place].adopt(name, param)


def _modules(layer: nnx.Module) -> dict[str, Any]:
    """The layer and its submodules, by path."""
    return {".".join(map(str, path)): module for path, module in nnx.iter_modules(layer)}
