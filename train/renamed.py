"""Paths of parameters in the runs of earlier versions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

Path = tuple[Any, ...]


def with_old_paths(state: Any) -> list[Any]:
    """A training state with the paths of earlier versions: `layers.layers.0` for `blocks.0`.

    Returns two states, because HyenaDNA called its head `lm_head`, and other models called theirs
    `head`.
    """
    return [_renamed(state, partial(_old, head=head)) for head in ("head", "lm_head")]


def with_new_paths(state: Any) -> Any:
    """A training state with the paths of this version, from the old or the new paths."""
    return _renamed(state, _new)


def _old(path: Path, head: str) -> Path:
    match path:
        case ("blocks", int(), *_):
            return ("layers", "layers", *path[1:])
        case ("blocks", *rest):
            return ("layers", *rest)
        case ("head", *rest):
            return (head, *rest)
    return path


def _new(path: Path) -> Path:
    match path:
        case ("layers", "layers", *rest) | ("layers", *rest):
            return ("blocks", *rest)
        case ("lm_head", *rest):
            return ("head", *rest)
    return path


def _renamed(tree: Any, rename: Callable[[Path], Path]) -> Any:
    """The tree with other paths for parameters, and for their moments and averages."""

    def renamed(state: Any) -> Any:
        if not isinstance(state, nnx.State):
            return state
        flat = [(rename(path), leaf) for path, leaf in nnx.to_flat_state(state)]
        return nnx.from_flat_state(flat)

    return jax.tree.map(renamed, tree, is_leaf=lambda node: isinstance(node, nnx.State))
