"""The command `twinscan`, and what Python programs use of the trainer.

`from twinscan import Run` works in any folder, whereas `import train` may find a `train.py` of your
own. From then on, `import train` finds twinscan's in this process: give your own module another
name. `Run` is imported when it is first used, because the trainer needs the extra `train`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinscan.own_packages import pin

if TYPE_CHECKING:
    from train.run import Run

__all__ = ["Run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    pin("train")
    try:
        value = getattr(import_module("train.run"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name}: {error.name} is not installed: run pip install '.[train]' in a clone of "
            "twinscan",
            name=error.name,
        ) from error
    globals()[name] = value
    return value
