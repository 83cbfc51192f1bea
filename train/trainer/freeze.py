"""Frozen parameters: which parameters of a model are trained."""

import re
from typing import Any, NamedTuple

from flax import nnx

from train.process.digest import leaves_by_path


class Trainable(NamedTuple):
    """The parts of a model's parameters: those that are trained, and those that stay as they are.

    Only the trained part has gradients, moments and averages.
    """

    frozen: frozenset[str] = frozenset()
    """The paths of the frozen parameters."""

    def split(self, tree: nnx.State) -> tuple[nnx.State, nnx.State]:
        """The trained and the frozen part of the parameters, or of anything of their structure."""
        if not self.frozen:
            return tree, nnx.State({})
        trained, frozen = nnx.split_state(tree, lambda path, _: _name(path) not in self.frozen, ...)
        return trained, frozen

    def join(self, trained: nnx.State, frozen: nnx.State) -> nnx.State:
        """The whole parameters."""
        return nnx.merge_state(trained, frozen) if self.frozen else trained


def trainable(params: nnx.State, patterns: tuple[str, ...]) -> Trainable:
    """Freezes the parameters whose path contains a match of one of the regular expressions.

    Raises:
        ValueError: a pattern is not a regular expression or matches no parameter, or all parameters
            would be frozen.

    """
    paths = [path.removesuffix(".value") for path in leaves_by_path(params)]
    frozen: set[str] = set()
    for pattern in patterns:
        try:
            found = {path for path in paths if re.search(pattern, path)}
        except re.error as error:
            raise ValueError(
                f"freeze: expected regular expressions, got {pattern!r}: {error}"
            ) from None
        if not found:
            raise ValueError(
                f"freeze: expected patterns that match the path of a parameter, got {pattern!r}; "
                f"the paths are {', '.join(paths)}"
            )
        frozen |= found
    if frozen and len(frozen) == len(paths):
        raise ValueError(
            f"freeze: expected patterns that leave parameters to train, got {' '.join(patterns)}, "
            f"which match all {len(paths)}"
        )
    return Trainable(frozenset(frozen))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
