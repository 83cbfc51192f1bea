"""Arguments of torch's functions that JAX's functions of the same name have with another value.

The other values are tried when a pair differs in float64. If the two sides then agree, the report
names the argument, as it names the hyperparameters of layers that differ.
"""

import functools
from collections.abc import Iterator, Set
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """An argument of torch functions, and the value that JAX has in its place."""

    functions: tuple[str, ...]
    name: str
    other: Any
    remark: str
    """Which function of JAX has the other value."""


NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm")
ARGUMENTS = (
    Argument(("softplus",), "threshold", 50.0, "jax.nn.softplus has no threshold"),
    Argument(("gelu",), "approximate", "tanh", "as jax.nn.gelu by default"),
    Argument(("gelu",), "approximate", "none", "as jax.nn.gelu with approximate=False"),
    Argument(
        ("var", "std", "var_mean", "std_mean"), "correction", 0, "as jnp.var and jnp.std by default"
    ),
    Argument(NORMS, "eps", 1e-6, "as the norms of Flax by default"),
)


class OtherArgument:
    """Gives the functions of torch the other value of an argument."""

    def __init__(self, argument: Argument):
        self._argument = argument
        self.description = ""
        """Which value has replaced which; empty if none has."""

    def replace(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of an operation, forward or backward, with the other value."""
        functions, name, other, remark = self._argument
        function = function_name(func)
        names = [argument.name for argument in func._schema.arguments]
        if function not in functions or name not in names:
            return args, kwargs
        i = names.index(name)
        is_positional = i < len(args)
        given = (
            args[i] if is_positional else kwargs.get(name, func._schema.arguments[i].default_value)
        )
        if given == other:
            return args, kwargs
        given = 1 if given is None else given  # the default of a correction
        self.description = (
            f"{function.removeprefix('native_')} with {name} {other} instead of {given}: {remark}"
        )
        if is_positional:
            return (*args[:i], other, *args[i + 1 :]), kwargs
        return args, {**kwargs, name: other}


@functools.cache
def function_name(func: Any) -> str:
    """The name of a function, which is the same for its backward pass."""
    return func.overloadpacket.__name__.removesuffix("_backward")


def other_arguments(functions: Set[str]) -> Iterator[OtherArgument]:
    """The other arguments to try for a module that calls these functions."""
    for argument in ARGUMENTS:
        if not functions.isdisjoint(argument.functions):
            yield OtherArgument(argument)
