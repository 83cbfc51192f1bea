"""The problem of a comparison: a torch module, its JAX port, and their inputs."""

import contextlib
import dataclasses
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.checks.values import as_array, checked_choice, described
from jax_models.weights import Table
from jax_models.weights.stored import as_numpy

DTYPES = ("float64", "float32", "bfloat16")
COMPLEX = {"float64": "complex128", "float32": "complex64", "bfloat16": "complex64"}
"""The complex dtype for each dtype of a comparison; a complex bfloat16 does not exist."""
PLATFORMS = ("cpu", "gpu", "tpu")
PRECISIONS = ("highest", "high", "default")
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A torch module, its JAX port, and the inputs of both.

    The result of a side is an array or a tree of arrays. In a tuple, the first entry is the
    outputs, and the rest is the final state. The leaves of both sides have the same order.
    A reference makes the problem with its own side, and `port` replaces the fields of the JAX side.
    """

    twin: Any
    """The torch module, or another object with a `state_dict()`."""
    build: Callable[[Arrays, str], tuple[Any, Any]] = lambda state_dict, dtype: (state_dict, None)
    """`build(state_dict, dtype)` makes the JAX side's weights, and the rest of its model."""
    call: Callable[..., Any] = lambda model, *inputs: model(*inputs)
    """`call(model, *inputs)` returns the JAX side's result."""
    to_torch: Callable[[Any, Any], Arrays] | None = None
    """`to_torch(gradient, rest)` returns the weights' gradients under the twin's names.

    None if it is unknown how the weights correspond, so that their gradients are not compared.
    """
    load: Callable[[Any, Any], Any] = lambda weights, rest: weights
    """`load(weights, rest)` makes the model from the results of `build`.

    JAX differentiates through this function.
    """
    constants: frozenset[str] = frozenset()
    """The twin's buffers that the JAX side does not read because it has these numbers itself."""
    call_twin: Callable[..., Any] = lambda twin, *inputs: twin(*inputs)
    """`call_twin(twin, *inputs)` returns the torch side's result."""
    inputs: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    seed: int = 0
    table: Table | None = None
    """The weight table, if there is one."""
    logits: str | bool = False
    """The name of the output that holds logits. True means the only output; False means none."""
    has_padding_gradients: bool = False
    """Whether the gradients of an embedding's `padding_idx` row are compared, too."""

    @functools.cached_property
    def state_dict(self) -> Arrays:
        """The weights of the twin in its own dtypes."""
        return state_dict_arrays(self.twin.state_dict())


def state_dict_arrays(state_dict: Mapping[str, Any]) -> Arrays:
    """The tensors of a `state_dict` as arrays."""
    return {
        key: as_numpy(value.resolve_conj() if hasattr(value, "resolve_conj") else value)
        for key, value in state_dict.items()
        if hasattr(value, "shape")
    }


def all_in_dtype(arrays: Mapping[str, np.ndarray], dtype: str) -> Arrays:
    """The arrays, with the floating ones cast to a dtype."""
    return {key: in_dtype(array, dtype) for key, array in arrays.items()}


def in_one_line(error: BaseException) -> str:
    """The type of an exception, and the first line of its message if it has one."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_inexact(leaf: Any) -> bool:
    """True for an array of real or complex numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_torch_module(value: Any) -> bool:
    """True if the value is a torch module. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_function(value: Any) -> bool:
    """True for a callable that is neither a class nor a module of NNX or torch."""
    is_module = isinstance(value, type | nnx.Module) or is_torch_module(value)
    return callable(value) and not is_module


def call_model(model: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Calls a model with the inputs and returns its result."""
    return model(*inputs, **kwargs)


def with_kwargs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a call so that its last input, a dict, is passed as keyword arguments."""
    return lambda model, *inputs: call(model, *inputs[:-1], **inputs[-1])


def checked_dtypes(dtypes: str | Iterable[str]) -> tuple[str, ...]:
    """The dtypes to compare in: at least one, without repetitions."""
    given = (dtypes,) if isinstance(dtypes, str) or not isinstance(dtypes, Iterable) else dtypes
    chosen = tuple(given)
    if not chosen or not all(isinstance(name, str) and name in DTYPES for name in chosen):
        raise ValueError(f"dtypes: expected some of {', '.join(DTYPES)}, got {chosen}")
    return tuple(dict.fromkeys(chosen))


def available_platforms() -> list[str]:
    """The platforms on which JAX can run on this machine."""
    found = []
    for platform in PLATFORMS:
        with contextlib.suppress(RuntimeError):
            jax.devices(platform)
            found.append(platform)
    return found


def checked_platform(platform: str) -> str:
    """The platform, which this machine must have."""
    here = available_platforms()
    if checked_choice("platform", platform, PLATFORMS) not in here:
        raise ValueError(f"platform: this machine has no {platform}, only {', '.join(here)}")
    return platform


def check_functions(needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Refuses everything except functions; the optional ones may be None."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**needed, **given}.items():
        if not is_function(value):
            raise TypeError(f"{name}: expected a function, got {described(value)}")


def checked_arrays(name: str, tree: Any, *, flags: bool = False) -> Any:
    """The tree with NumPy arrays as leaves. Floating arrays are cast to float64.

    A list of numbers counts as an array. With `flags`, bools, Python numbers and strings are kept
    unchanged.
    """

    def array(path: Any, value: Any) -> Any:
        if flags and is_flag(value):
            return value
        place = name + jax.tree_util.keystr(path)
        result = as_array(place, value, as_numpy)
        if not any(jnp.issubdtype(result.dtype, kind) for kind in (jnp.number, jnp.bool_)):
            raise TypeError(f"{place}: expected an array of numbers, got {described(value)}")
        return in_dtype(result, "float64")

    return jax.tree_util.tree_map_with_path(
        array, with_plain_containers(tree), is_leaf=is_list_of_numbers
    )


def is_list_of_numbers(node: Any) -> bool:
    """True if the node is a list of Python numbers, or a list of such lists."""
    leaves = jax.tree.leaves(node) if isinstance(node, list) else []
    return bool(leaves) and all(isinstance(leaf, int | float) for leaf in leaves)


def with_plain_containers(tree: Any) -> Any:
    """The tree with other mappings, such as a tokenizer's output, converted to dicts."""
    if isinstance(tree, Mapping) and type(tree) is not OrderedDict:
        return {key: with_plain_containers(value) for key, value in tree.items()}
    if type(tree) is tuple:
        return tuple(map(with_plain_containers, tree))
    return [*map(with_plain_containers, tree)] if type(tree) is list else tree


def is_flag(value: Any) -> bool:
    """True if the value is a Python number or string, on which both sides may branch."""
    return isinstance(value, str) or type(value) in (bool, int, float)


def arrays(tree: Any, dtype: str) -> Any:
    """The tree as JAX arrays, with the floating ones cast to a dtype."""

    def array(values: Any) -> Any:
        return values if is_flag(values) else jnp.asarray(in_dtype(np.asarray(values), dtype))

    return jax.tree.map(array, tree)


def in_dtype(array: Any, dtype: str) -> Any:
    """The array, cast to a dtype if it is floating, or to the matching complex dtype if complex."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(COMPLEX[dtype])
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def in_every_dtype(x: np.ndarray) -> np.ndarray:
    """The numbers rounded to bfloat16, so that every dtype starts from the same numbers."""
    return x.astype(jnp.bfloat16).astype(np.float64)
