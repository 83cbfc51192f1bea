"""Imports the packages of twinscan from the folder that this file is in.

Python first looks for a module in the working folder or in the folder of the script. If a user has
a `train.py` or a `jax_models.py` there, Python would execute it in the place of ours.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1]


class OwnPackages(MetaPathFinder):
    """Finds packages in `FOLDER`, before Python looks anywhere else."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of one of the packages; None for any other module."""
        if fullname in self.names:
            return PathFinder.find_spec(fullname, [str(FOLDER)])
        return None


FINDER = OwnPackages()
sys.meta_path.insert(0, FINDER)


def pin(*names: str) -> None:
    """Makes this process import these packages from `FOLDER` only.

    Raises:
        ImportError: a module of the same name from another place is already imported.

    """
    for name in names:
        place = getattr(sys.modules.get(name), "__file__", None)
        if place is not None and Path(place).resolve().parent != (FOLDER / name).resolve():
            raise ImportError(
                f"{name}: expected the package of twinscan, in {FOLDER}, but {place} is already "
                "imported under this name; rename that module"
            )
    FINDER.names.update(names)
