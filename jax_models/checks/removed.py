"""What to use instead of names that a module had."""

from collections.abc import Callable, Mapping
from typing import NoReturn


def refusing(module: str, removed: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Returns the `__getattr__` of a module, which says what to do instead of using a removed name.

    `removed` has the advice for each name.
    """

    def refuse(name: str) -> NoReturn:
        if name in removed:  # `from … import` would hide an AttributeError
            raise ImportError(f"{module}.{name}: {removed[name]}: see docs/migration.md")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse
