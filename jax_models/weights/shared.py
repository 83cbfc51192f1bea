"""Layers that several architectures share, each of which saves the layer under keys of its own.

A shared layer has parameters, but knows no keys. The file of an architecture declares them.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from jax_models.checks.arguments import checked
from jax_models.weights.tables import Layouts


class SharedLayer:
    """The base class of layers whose layouts the architectures declare with `layouts_of`."""

    _declared: ClassVar[dict[tuple[str, str], Callable[[Any], Layouts]]] = {}
    """The functions that return the layouts, by their modules and names. A subclass has those of
    its base class until it gets its own.
    """

    def torch_layouts(self) -> Layouts:
        """The layouts that the architectures declare for this layer.

        Raises:
            ValueError: two architectures declare a layout of the same name.

        """
        layouts: Layouts = {}
        for (module, _), function in self._declared.items():
            added = function(self)
            if twice := sorted(layouts.keys() & added):
                raise ValueError(
                    f"layouts_of({type(self).__name__}): expected new names in {module}, got "
                    f"{', '.join(twice)}, which another architecture declares"
                )
            layouts |= added
        return layouts


Shared = TypeVar("Shared", bound=SharedLayer)


def layouts_of(
    layer: type[Shared], *, default: bool = False
) -> Callable[[Callable[[Shared], Layouts]], Callable[[Shared], Layouts]]:
    """Declares the layouts in which an architecture saves a layer that others share.

        @layouts_of(GatedMLP)
        def mlp_layouts(mlp: GatedMLP) -> Layouts:
            return {"my_model": mlp.rows("w1", "w3", "w2")}

    The decorated function receives a layer and returns its tables by the names of their layouts. It
    returns none if the architecture has no layer with these options, for example none with biases.
    From then on, every layer of the class has these layouts.

    Args:
        layer: the class of the layer, such as `Attention`.
        default: whether these layouts come before those declared so far. `to_torch` writes the
            first layout, unless the caller names another.

    Raises:
        TypeError: `layer` is not a class of a shared layer, or a value that is not a function is
            decorated.

    """
    if not (isinstance(layer, type) and issubclass(layer, SharedLayer)):
        got = layer.__name__ if isinstance(layer, type) else f"a {type(layer).__name__}"
        raise TypeError(
            "layouts_of: expected a class of layers that architectures share, such as Attention, "
            f"got {got}: build its table in the torch_layouts of your block"
        )

    @checked()
    def declare(function: Callable[[Shared], Layouts]) -> Callable[[Shared], Layouts]:
        # If its module is reloaded, a function keeps its place.
        added = {(function.__module__, function.__qualname__): function}
        before = vars(layer).get("_declared", {})
        layer._declared = (added if default else {}) | before | added
        return function

    return declare
