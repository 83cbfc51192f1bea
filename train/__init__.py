"""Training of the language models: `python -m train`.

The packages, each of which imports only those before it:

- `checks`: the types of options; `process`: files, digests, hosts and signals.
- `data`: from files to tokens, and from tokens to batches.
- `trainer`: the loss, the training step and the optimizer, on a mesh of devices.
- `run`: the options of a run, its folder, its checkpoints, and the loop over its steps.
- `command`: the commands `train`, `generate`, `convert`, `evaluate` and `export`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path

# The folder of a user may have modules of the same names as the packages that this one imports.
sys.path.insert(0, str(Path(__file__).parents[1]))
import_module("twinscan.own_packages").pin("twinscan", "jax_models", "torch_ref")
del sys.path[0]


class MovedModules(MetaPathFinder):
    """Names the new place of a module that was beside this file, such as `train.optimizer`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        """Raises an error for a module that moved into one of the packages."""
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return
        for place in Path(__file__).parent.glob(f"*/{name}.py"):
            moved = f"{__name__}.{place.parent.name}.{name}"
            raise ImportError(f"{fullname} is now {moved}: see docs/migration.md", name=fullname)


sys.meta_path.append(MovedModules())
