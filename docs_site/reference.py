"""Writes the pages of the API reference from the docstrings of all public names.

The public names are those in the `__all__` of a package. A name has its entry on the page of the
module that defines it, and `GROUPS` says which part of the reference holds a module's page. The
pages are MyST Markdown, which is the markup of our docstrings, except that sections such as `Args:`
become field lists, and indented blocks become examples or equations.
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
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from docs_site.blocks import ROOT
from docs_site.equations import is_equation, latex
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
"""The parts of the reference, by folder: the title, and the modules and packages that belong to it.
A module belongs to the part that names the longest part of its path."""

INTRODUCTIONS = {
    "layers": "Recurrent layers, convolutions, attention, blocks and norms, with their states. "
    "All of them share the contract of {py:obj}`jax_models.SequenceLayer`, and the options of "
    "{py:obj}`jax_models.options.LayerOptions`.",
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
SECTIONS = {"Args": "param", "Raises": "raises", "Warns": "raises", "Returns": "", "Yields": ""}
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
    def stem(self) -> str:
        """The last part of the name of the module that defines it."""
        return self.home.rpartition(".")[2]

    @property
    def is_main(self) -> bool:
        """Whether the module is called like this name, as `lstm.py` is like `LSTM`."""
        return self.name.lower().replace("_", "") == self.stem.replace("_", "")

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
    from train.config import TrainConfig

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
    """The Markdown of all pages of the reference, by path."""
    found: dict[str, str] = {}
    by_page: dict[tuple[str, str], list[Name]] = {}
    for name in public_names():
        by_page.setdefault((group_of(name.home), name.stem), []).append(name)
    for (group, stem), names in by_page.items():
        names.sort(key=lambda name: not name.is_main)
        found[f"reference/{group}/{stem}.md"] = _page(names)
    for group, (title, _) in GROUPS.items():
        members = {_title(names): names for (g, _), names in by_page.items() if g == group}
        members = dict(sorted(members.items(), key=lambda item: item[0].lower()))
        rows = [row for names in members.values() for row in map(_row, names)]
        stems = [names[0].stem for names in members.values()]
        found[f"reference/{group}/index.md"] = _index(
            title, [INTRODUCTIONS[group], "", "| | |", "|---|---|", *rows], stems
        )
    found["reference/command_line.md"] = _command_line()
    parts = ["All public names of the packages, as their docstrings describe them.", ""]
    parts += [
        f"- [{title}]({group}/index.md): {_plain(INTRODUCTIONS[group])}"
        for group, (title, _) in GROUPS.items()
    ]
    parts += ["- [Command line](command_line.md): the commands of `twinscan` and their options."]
    members = [*(f"{group}/index" for group in GROUPS), "command_line"]
    return found | {"reference/index.md": _index("API reference", parts, members)}


def _index(title: str, lines: list[str], members: list[str]) -> str:
    """A page that lists others, and the place of these in the navigation."""
    hidden = ["", "```{toctree}", ":hidden:", "", *members, "```", ""]
    return "\n".join([f"# {title}", "", *lines, *hidden])


def _plain(text: str) -> str:
    return re.sub(r"\{py:obj\}`(?:\w+\.)*(\w+)`", r"`\1`", text)


def _row(name: Name) -> str:
    first = (inspect.getdoc(name.value) or "").partition("\n")[0] if callable(name.value) else ""
    return f"| {{py:obj}}`{name.name} <{name.path}>` | {_inline(first, name.package)} |"


def _title(names: list[Name]) -> str:
    """The main name of a page, or a few names without states and aliases, or the module's name."""
    main = [n.name for n in names if callable(n.value) and not n.name.endswith("State")]
    main = [n for n in main if not n.endswith("Config")] or main or [n.name for n in names]
    if names[0].is_main or len(main) <= 3:
        return names[0].name if names[0].is_main else ", ".join(main)
    stem = names[0].stem.replace("_", " ")
    return stem[0].upper() + stem[1:]


def _page(names: list[Name]) -> str:
    entries = "\n\n".join(map(_entry, names))
    return f"# {_title(names)}\n\n{entries}\n"


def _entry(name: Name) -> str:
    """The entry of a name in MyST Markdown."""
    value = name.value
    first = canonical().get(id(value), name)
    # Sphinx looks up the types in a signature in this module first.
    module = f"```{{py:currentmodule}} {name.package}\n```\n\n"
    if first != name:
        text = f"The same as {{py:obj}}`{first.path}`."
        return module + _directive("py:data", name.name, text)
    if inspect.isclass(value):
        return module + _class(name, value)
    if inspect.isroutine(value):
        text = _markdown(inspect.getdoc(value) or "", name.package)
        return module + _directive("py:function", name.name + _signature(value), text)
    node, doc = _assignment(name)
    assigned = ast.unparse(node.value) if isinstance(node, ast.Assign) else ""
    options = [f":value: {assigned}"] if 0 < len(assigned) < 200 else []
    return module + _directive("py:data", name.name, _markdown(doc, name.package), *options)


def _directive(kind: str, argument: str, text: str, *options: str, depth: int = 5) -> str:
    colons = ":" * depth
    return "\n".join([f"{colons}{{{kind}}} {argument}", *options, "", text, colons])


def _class(name: Name, cls: type) -> str:
    """The entry of a class: its constructor, its fields and its own public methods."""
    parts = [_markdown(inspect.getdoc(cls) or "", name.package)]
    bases = [canonical()[id(base)] for base in cls.__bases__ if id(base) in canonical()]
    if bases:
        parts.append("Bases: " + ", ".join(f"{{py:obj}}`{base.path}`" for base in bases))
    fields = _fields(cls)
    for field, (kind, default, doc) in fields.items():
        options = [f":type: {kind}", *([f":value: {default}"] if default else [])]
        text = _markdown(doc, name.package)
        parts.append(_directive("py:attribute", field, text, *options, depth=4))
    for key, value in vars(cls).items():
        function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
        doc = getattr(function, "__doc__", None)
        if key.startswith("_") or key in fields or not doc or not inspect.isfunction(function):
            continue
        text = _markdown(inspect.cleandoc(doc), name.package)
        if isinstance(value, property | functools.cached_property):
            parts.append(_directive("py:property", key, text, depth=4))
        else:
            options = [":classmethod:"] if isinstance(value, classmethod) else []
            signature = _signature(function, skip=not isinstance(value, staticmethod))
            parts.append(_directive("py:method", key + signature, text, *options, depth=4))
    if fields:
        signature = f"({', '.join(fields)})"
    else:
        signature = _signature(cls.__init__, skip=True) if _is_own(cls.__init__) else ""
        signature = signature.partition(" -> ")[0]
    return _directive("py:class", name.name + signature, "\n\n".join(parts))


def _is_own(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] in OWN


def _signature(function: Any, *, skip: bool = False) -> str:
    """The arguments of a function as its source has them, without `self` or `cls` if `skip`."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    [node] = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    if skip:
        node.args.args = node.args.args[1:]
    for each in ast.walk(node):
        if isinstance(each, ast.arg) and isinstance(each.annotation, ast.Constant):
            each.annotation = ast.parse(str(each.annotation.value), mode="eval").body
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def _fields(cls: type) -> dict[str, tuple[str, str, str]]:
    """The type, the default and the docstring of each field of a NamedTuple or a dataclass."""
    has_fields = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or cls.__base__ is dict
    if not has_fields:
        return {}
    found = {}
    for base in getattr(cls, "__orig_bases__", cls.__bases__):
        if inspect.isclass(base) and _is_own(base):
            found |= _fields(base)
    [node] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    for statement, doc in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(statement.annotation)
            if not kind.startswith("ClassVar") and statement.target.id[0] != "_":
                default = ast.unparse(statement.value) if statement.value else ""
                found[statement.target.id] = (kind, default, _docstring(doc))
    return found


def _docstring(node: ast.stmt | None) -> str:
    """The docstring that follows an assignment, or ""."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return inspect.cleandoc(str(node.value.value))
    return ""


def _assignment(name: Name) -> tuple[ast.stmt | None, str]:
    """The statement that defines a value, and its docstring."""
    for module in (name.home, *(m for m in sys.modules if m.startswith(name.package))):
        body = _parsed(module).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if any(isinstance(t, ast.Name) and t.id == name.name for t in targets):
                return node, _docstring(after)
    return None, ""


def _markdown(docstring: str, package: str) -> str:
    """A docstring as MyST Markdown."""
    parts, kind = [], None
    for chunk in re.split(r"\n\s*\n", docstring):
        section = re.match(r"(\w+):\n(?= )", chunk)
        if section and section[1] in SECTIONS:
            kind, chunk = section[1], chunk[section.end() :]
        elif not chunk.startswith("    "):
            kind = None
        if kind:
            parts.append(_field_list(kind, chunk, package))
        elif chunk.startswith("    "):
            code = textwrap.dedent(chunk)
            if is_equation(chunk):
                parts.append(f"```{{math}}\n{latex(chunk)}\n```")
            else:
                language = "pycon" if code.startswith(">>>") else "python"
                parts.append(f"```{language}\n{code}\n```")
        else:
            parts.append(_inline(chunk, package))
    return "\n\n".join(parts)


def _field_list(kind: str, chunk: str, package: str) -> str:
    """The items of a section such as `Args:` as a field list."""
    items = re.split(r"\n(?! )", textwrap.dedent(chunk))
    fields = []
    for item in items:
        text = " ".join(item.split())
        if kind in ("Returns", "Yields"):
            fields.append(f":returns: {_inline(text, package)}")
            continue
        name, _, what = text.partition(": ")
        name = name.replace("*", r"\*")
        fields.append(f":{SECTIONS[kind]} {name}: {_inline(what, package)}")
    return "\n".join(fields)


def _inline(text: str, package: str) -> str:
    """Text with links from names in backticks to their entries, and nothing else that is markup."""
    pieces = re.split(r"(`[^`\n]+(?:\n[^`]+)?`)", text)
    return "".join(
        _code(piece, package) if piece.startswith("`") and len(piece) > 2 else _escaped(piece)
        for piece in pieces
    )


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\n)(?<!^)([*<$])|(?<=\w)([*])", lambda m: "\\" + m[0], text)


def _code(code: str, package: str) -> str:
    name = " ".join(code.strip("`").split())
    for path in (f"{package}.{name}", f"jax_models.{name}", f"jax_models.ops.{name}", name):
        if path in _paths():
            return f"{{py:obj}}`{name} <{path}>`"
    return f"`{name}`"


@functools.cache
def _paths() -> set[str]:
    return {name.path for name in public_names()}


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
