"""The families of benchmarks, each in a file of this folder.

The first line of a family's docstring is its title. A family has either `contenders` and
`problems(quick)`, or its own `measure(session) -> Outcome`. A new file needs no registration.
"""

import importlib
import pkgutil
from types import ModuleType

from benchmarks.compare import Session, compare
from benchmarks.outcome import Outcome
from benchmarks.problem import NATIVE, OURS, Contenders

ORDER = ("limits", "gated", "linear_recurrence", "wkv", "long_conv")
FAMILIES = sorted(
    (module.name for module in pkgutil.iter_modules(__path__)),
    key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name),
)
TUNED = {"gated": (OURS, NATIVE, "torch.nn"), "long_conv": (OURS, "torch.fft")}
"""The families that are also measured with the tuned allocator, and their contenders with it.

In these families, the allocator changes whether PyTorch is faster. The JAX packages are left out,
because it helps them as much as ours.
"""


def family(name: str) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(f"benchmarks.families.{name}")


def title(name: str) -> str:
    """The title of a family: the first line of its docstring, without the period."""
    return (family(name).__doc__ or name).splitlines()[0].rstrip(".")


def measure(name: str, session: Session) -> Outcome:
    """Measures a whole family."""
    module = family(name)
    if hasattr(module, "measure"):
        return module.measure(session)
    contenders = module.contenders
    if session.workers.allocator == "tuned" and name in TUNED:
        contenders = Contenders({key: contenders[key] for key in TUNED[name]})
    return compare(session, module.__name__, contenders, module.problems(session.quick))
