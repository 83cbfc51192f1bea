"""What a comparison runs: a torch module, its JAX port, and their inputs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_models.ops.checks import described
from jax_models.weights import Table
from jax_models.weights.transfer import as_numpy

DTYPES = ("float64", "float32", "bfloat16")
PLATFORMS = ("cpu", "gpu", "tpu")
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A torch module, its JAX port, and what both run on.

    A result is one array, or any tree of arrays; of a tuple, the first entry is the outputs and the
    rest the final state. Both sides' leaves come in the same order.
    """

    twin: torch.nn.Module
    build: Callable[[torch.nn.Module, str], Any]
    """`build(twin, dtype)`: the JAX side's weights, those of the twin."""
    call: Callable[..., Any]
    """`call(weights, *inputs)`: the JAX side's result."""
    to_torch: Callable[[Any], Arrays] | None
    """Names a gradient with respect to the weights as the twin does; None where nobody can."""
    call_twin: Callable[..., Any] = lambda twin, *inputs: twin(*inputs)
    """`call_twin(twin, *inputs)`: the torch side's result."""
    inputs: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    seed: int = 0
    table: Table | None = None
    """The weight table, which says what submodules correspond."""
    logits: str | bool = False
    """The name of the output that is logits; True is the only one."""


def checked_dtypes(dtypes: str | Iterable[str]) -> tuple[str, ...]:
    """The dtypes to compare in, at least one, each once.

    Raises:
        ValueError: there is none, or one that is not compared.

    """
    given = (dtypes,) if isinstance(dtypes, str) or not isinstance(dtypes, Iterable) else dtypes
    chosen = tuple(given)
    if not chosen or not all(isinstance(name, str) and name in DTYPES for name in chosen):
        raise ValueError(f"dtypes: expected some of {', '.join(DTYPES)}, got {chosen}")
    return tuple(dict.fromkeys(chosen))


def available_platforms() -> list[str]:
    """The platforms of this machine."""

    def has(platform: str) -> bool:
        try:
            return bool(jax.devices(platform))
        except RuntimeError:
            return False

    return [platform for platform in PLATFORMS if has(platform)]


def checked_platform(platform: str) -> str:
    """A platform that this machine has.

    Raises:
        ValueError: it is another, or none.

    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform: expected one of {', '.join(PLATFORMS)}, got {platform!r}")
    here = available_platforms()
    if platform not in here:
        raise ValueError(f"platform: this machine has no {platform}, only {', '.join(here)}")
    return platform


def check_functions(needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Refuse what is no function, as a class or a module is none; an optional one may be None.

    Raises:
        TypeError: one is none.

    """
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**needed, **given}.items():
        if not callable(value) or isinstance(value, type | nnx.Module | torch.nn.Module):
            raise TypeError(f"{name}: expected a function, got {described(value)}")


def checked_arrays(name: str, tree: Any) -> Any:
    """A tree of arrays as NumPy's, the floating ones in float64; a list of numbers is an array.

    Raises:
        TypeError: a leaf is no array of numbers.

    """

    def is_list_of_numbers(node: Any) -> bool:
        leaves = jax.tree.leaves(node) if isinstance(node, list) else []
        return bool(leaves) and all(isinstance(leaf, int | float) for leaf in leaves)

    def array(path: Any, value: Any) -> np.ndarray:
        try:
            result = as_numpy(value)
        except (TypeError, ValueError, RuntimeError):
            result = np.empty(0, object)
        if not any(jnp.issubdtype(result.dtype, kind) for kind in (jnp.number, jnp.bool_)):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)}: expected an array of numbers, "
                f"got {described(value)}"
            )
        return result.astype(float) if jnp.issubdtype(result.dtype, jnp.floating) else result

    return jax.tree_util.tree_map_with_path(array, tree, is_leaf=is_list_of_numbers)


def checked_int(name: str, value: int, least: int) -> int:
    """An integer of at least so much.

    Raises:
        ValueError: it is another, or none.

    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return int(value)


def tensors(tree: Any, dtype: str) -> Any:
    """A tree of arrays as tensors, the floating ones in a dtype."""

    def tensor(array: Any) -> torch.Tensor:
        result = torch.tensor(np.asarray(array))
        return result.to(getattr(torch, dtype)) if result.is_floating_point() else result

    return jax.tree.map(tensor, tree)


def in_double(tree: Any) -> Any:
    """The floating tensors of a tree in float64."""
    return jax.tree.map(lambda t: t.double() if t.is_floating_point() else t, tree)


def arrays(tree: Any, dtype: str) -> Any:
    """A tree of arrays as JAX's, the floating ones in a dtype."""

    def array(values: Any) -> jax.Array:
        values = np.asarray(values)
        return jnp.asarray(values, dtype if np.issubdtype(values.dtype, np.floating) else None)

    return jax.tree.map(array, tree)


def in_every_dtype(x: np.ndarray) -> np.ndarray:
    """The numbers rounded to bfloat16, so that every dtype starts from the same."""
    return x.astype(jnp.bfloat16).astype(np.float64)
