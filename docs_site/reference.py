"""Writes the pages of the API reference from the docstrings of all public names.

The public names are those in the `__all__` of a package. `GROUPS` says which page has the
entries of the names that a module defines. Sphinx's autodoc makes the entries.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sphinx.pycode import ModuleAnalyzer

from docs_site.blocks import ROOT
from docs_site.docstrings import rest
from twinscan.__main__ import COMMANDS

GROUPS = {
    "layers": ("Layers", "jax_models jax_models.layers jax_models.options"),
    "models": ("Models", "jax_models.models"),
    "operators": ("Operators", "jax_models.ops"),
    "weights": ("Weights", "jax_models.weights"),
    "importers": ("Importers", "jax_models.importers"),
    "parity": ("Parity", "parity_tests"),
    "training": ("Training", "train jax_models.allocator"),
    "twins": ("PyTorch twins", "torch_ref"),
}
"""The pages of the reference: the title, and the modules and packages that belong to it. A module
belongs to the page that names the longest part of its path."""

INTRODUCTIONS = {
    "layers": "Recurrent layers, convolutions, attention, blocks and norms, with their states. "
    "All of them share the contract of `jax_models.SequenceLayer`, and the options of "
    "`jax_models.options.LayerOptions`.",
    "models": "Language models with their configs, published checkpoints, and generation.",
    "operators": "The recurrences as pure functions of arrays, in `jax_models.ops`. Use them for a "
    "layer of your own.",
    "weights": "Weights from PyTorch and back, and the rows and tables that describe how.",
    "importers": "Recurrent layers from ONNX and Keras.",
    "parity": "Comparisons of any PyTorch module with its JAX port, and the registry of the pairs "
    "of this package.",
    "training": "The options of a run, as `twinscan train` takes them and `config.json` stores "
    "them, and what a training process needs besides.",
    "twins": "The references in plain PyTorch, in `torch_ref`.",
}
OWN = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["packages"]
)
"""The packages of the distribution."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A public name: where it is imported from, and the module that defines it."""

    package: str
    name: str
    home: str

    @property
    def path(self) -> str:
        """The name by which the reference knows it, such as `jax_models.ops.lstm`."""
        return f"{self.package}.{self.name}"

    @property
    def value(self) -> Any:
        """What the name stands for."""
        return getattr(importlib.import_module(self.package), self.name)


def public_packages() -> list[str]:
    """The packages of the distribution that have an `__all__`, the outer ones first."""
    packages = [*OWN]
    for name in OWN:
        path = importlib.import_module(name).__path__
        found = pkgutil.walk_packages(path, f"{name}.")
        packages += [module.name for module in found if module.ispkg]
    public = [name for name in packages if hasattr(importlib.import_module(name), "__all__")]
    return sorted(public, key=lambda name: name.count("."))


@functools.cache
def public_names() -> list[Name]:
    """All public names, and the fields of the options that are not in an `__all__`."""
    names = []
    for package in public_packages():
        homes = dict(_imports(package))
        names += [
            Name(package, name, homes.get(name, package))
            for name in importlib.import_module(package).__all__
        ]
    names += [Name("jax_models.options", "LayerOptions", "jax_models.options")]
    return names + [Name(c.__module__, c.__name__, c.__module__) for c in _run_options()]


@functools.cache
def _parsed(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _imports(package: str) -> Iterator[tuple[str, str]]:
    """The names that a package imports from its own modules, and their modules."""
    for node in ast.walk(_parsed(package)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OWN):
            if node.names[0].name == "*":
                names = importlib.import_module(node.module).__all__
                yield from ((name, node.module) for name in names)
            else:
                yield from ((each.name, node.module) for each in node.names)


def _run_options() -> list[type]:
    """The dataclasses of a run's options, as `TrainConfig` contains them."""
    from train.run.config import TrainConfig

    found, todo = [], [TrainConfig]
    while todo:
        found.append(todo.pop(0))
        kinds = [field.type for field in dataclasses.fields(found[-1])]
        todo += [kind for kind in kinds if getattr(kind, "__module__", "").startswith("train.")]
    return found


@functools.cache
def canonical() -> dict[int, Name]:
    """The name under which each object is described, by its id: the first of its public names."""
    found: dict[int, Name] = {}
    for name in public_names():
        if callable(name.value):
            found.setdefault(id(name.value), name)
    return found


def group_of(module: str) -> str:
    """The part of the reference that holds a module's page."""
    known = {place: group for group, (_, places) in GROUPS.items() for place in places.split()}
    while module not in known:
        module, _, last = module.rpartition(".")
        if not last:
            raise LookupError("no part of the reference holds this module")
    return known[module]


def pages() -> dict[str, str]:
    """The texts of all pages of the reference, by path."""
    found = {"reference/command_line.md": _command_line()}
    lines = ["All public names of the packages, as their docstrings describe them.", ""]
    for group, (title, _) in GROUPS.items():
        names = [name for name in public_names() if group_of(name.home) == group]
        names.sort(key=lambda name: name.home)
        table = [".. autosummary::", "   :nosignatures:", "", *(f"   ~{n.path}" for n in names), ""]
        entries = [INTRODUCTIONS[group], "", *table, *map(_entry, names)]
        found[f"reference/{group}.rst"] = _page(title, entries)
        lines.append(f"- :doc:`{title} <{group}>`: {INTRODUCTIONS[group]}")
    lines += ["- :doc:`command_line`: the commands of ``twinscan`` and their options.", ""]
    members = [f"   {member}" for member in (*GROUPS, "command_line")]
    index = _page("API reference", [*lines, ".. toctree::", "   :hidden:", "", *members])
    return found | {"reference/index.rst": index}


def _page(title: str, lines: list[str]) -> str:
    return "\n".join([title, "=" * len(title), "", *lines, ""])


def _entry(name: Name) -> str:
    """The directive that describes a name: autodoc's, except for values and second names."""
    value, path = name.value, f"{name.package}::{name.name}"
    first = canonical().get(id(value), name)
    if first != name:
        return f".. py:data:: {name.path}\n\n   The same as `{first.path}`.\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {path}\n"
    if not inspect.isclass(value):
        shown = [f"   :value: {value!r}"] if len(repr(value)) < 200 else []
        analyzer = ModuleAnalyzer.for_module(name.home)
        doc = rest("\n".join(analyzer.find_attr_docs().get(("", name.name), [])).strip())
        return "\n".join([f".. py:data:: {name.path}", *shown, "", *(f"   {line}" for line in doc)])
    has_fields = dataclasses.is_dataclass(value) or issubclass(value, tuple | dict)
    bases = [
        f"`{canonical()[id(base)].path}`" for base in value.__bases__ if id(base) in canonical()
    ]
    lines = [f".. autoclass:: {path}", *(["   :undoc-members:"] if has_fields else []), ""]
    return "\n".join([*lines, *([f"   Bases: {', '.join(bases)}", ""] if bases else [])])


def _command_line() -> str:
    """What each command prints with `--help`."""
    parts = ["# Command line\n", "Every command runs as `twinscan COMMAND`.\n"]
    for command, (module, what) in COMMANDS.items():
        printed = io.StringIO()
        with (
            mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}),
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            importlib.import_module(module).main(["--help"], f"twinscan {command}")
        text = re.sub(r"\x1b\[[\d;]*m", "", printed.getvalue())
        parts.append(
            f"## twinscan {command}\n\n{what[0].upper() + what[1:]}.\n\n```text\n{text}\n```\n"
        )
    return "\n".join(parts)
