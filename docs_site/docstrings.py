"""What Sphinx's autodoc needs to show our docstrings and types as a reader wants them.

Docstrings are Markdown with the sections of Google's style. Sphinx's napoleon reads the sections.
This module converts the rest of what differs between Markdown and reStructuredText: examples and
equations, which are indented, and names in single backticks.
"""

import dataclasses
import re
import textwrap
from typing import Any

from sphinx.domains.python import PyAttribute
from sphinx.ext.napoleon.docstring import GoogleDocstring

from docs_site.equations import is_equation, latex

SECTION = re.compile(r"(Args|Raises|Warns|Returns|Yields):\n")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w)?)")
MARKUP = re.compile(r"[*|]|_\b")


def rewrite(app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Rewrites the lines of a docstring, when autodoc has read them."""
    text = "\n".join(lines).strip("\n")
    # Fields of a NamedTuple have a docstring from Python, and values have the one of their type.
    is_ours = kind != "data" and not text.startswith("Alias for field number")
    lines[:] = rest(text) if is_ours else []


def rest(text: str) -> list[str]:
    """The lines of a docstring in reStructuredText."""
    in_section, parts = False, []
    for part in re.split(r"\n\s*\n", text):
        section = SECTION.match(part)
        if section and section[1] in ("Returns", "Yields"):
            # napoleon takes what precedes a colon for a type.
            part, section = ":returns: " + " ".join(part[section.end() :].split()), None
        indented = part.startswith("    ")
        in_section = bool(section) or (in_section and indented)
        parts.append(
            _block(textwrap.dedent(part)) if indented and not in_section else _inline(part)
        )
    return GoogleDocstring("\n\n".join(parts)).lines()


def _block(text: str) -> str:
    """An indented block: an equation, an example of what Python prints, or other Python code."""
    if is_equation(text):
        return ".. math::\n\n   " + latex(text)
    if text.startswith(">>>"):
        return text
    return ".. code-block:: python\n\n" + textwrap.indent(text, "   ")


def _inline(text: str) -> str:
    """Text with links from names in backticks to their entries, and nothing else that is markup."""
    pieces, start = [], 0
    for code in CODE.finditer(text):
        mark = "`" if re.fullmatch(r"[A-Za-z][\w.]*", code[1]) else "``"
        space = r"\ " if code[2] else ""
        pieces += [_escaped(text[start : code.start()]), f"{mark}{code[1]}{mark}{space}"]
        start = code.end()
    return "".join([*pieces, _escaped(text[start:])])


def _escaped(text: str) -> str:
    return MARKUP.sub(r"\\\g<0>", text)


def signature(
    app: Any, kind: str, name: str, value: Any, options: Any, args: str | None, returns: str | None
) -> tuple[str, str] | None:
    """The fields of a class that has them, and the arguments and the result of anything else."""
    if kind == "class" and (dataclasses.is_dataclass(value) or hasattr(value, "_fields")):
        fields = getattr(value, "_fields", ()) or [f.name for f in dataclasses.fields(value)]
        return f"({', '.join(fields)})", ""
    return (plain(args), plain(returns or "")) if args else None


def plain(text: str) -> str:
    """Types and defaults as they are written in the code, without what Python adds to them."""
    text = re.sub(r"<(?:class|function) '?([\w.]+)(?:'| at \w+)>", r"\1", text)
    text = text.replace("jaxlib._jax.Array", "Array").replace("collections.abc.", "")
    return re.sub(
        r"[~\w.]*Annotated\[((?:[^][]|\[[^][]*\])*?), (?:[^][]|\[[^][]*\])*\]", r"\1", text
    )


class Attribute(PyAttribute):
    """An attribute with a plain type, and with its value if this is short."""

    def run(self) -> list[Any]:
        """Describes the attribute."""
        plain_options = {
            key: plain(self.options[key]) for key in {"type", "value"} & {*self.options}
        }
        self.options |= plain_options
        if len(self.options.get("value", "")) > 80:
            del self.options["value"]
        return super().run()
