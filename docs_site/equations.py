"""Turns the equations of docstrings, which are plain Unicode as `help` shows them, into LaTeX.

An indented block of a docstring is an equation unless it is valid Python. Subscripts follow `_`,
exponents `^`, both with braces if they are longer than one name. Words are set upright, and two or
more spaces begin a remark. docutils knows the LaTeX of Unicode's mathematical signs.
"""

import ast
import re
import textwrap
import unicodedata

from docutils.utils.math.unichar2tex import uni2tex_table

SIGNS = uni2tex_table | {ord("Σ"): r"\sum ", ord("Π"): r"\prod ", ord("·"): r"\cdot "}
SCRIPTS = {"^": "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", "_": "₀₁₂₃₄₅₆₇₈₉"}
NAME = re.compile(r"(?<![\\A-Za-z])[A-Za-zα-ω]\u0302?[A-Za-z0-9]*(?:_[A-Za-z0-9α-ω]+)*")
GROUP = r"\(((?:[^()]|\([^()]*\))*)\)"
BESIDE_OPERATOR = re.compile(r"(?<=[-=<←+−·⊙×*∗⋆/≤]) | (?=[-=<←+−·⊙×*∗⋆/≤])")


def is_equation(block: str) -> bool:
    """Whether an indented block of a docstring is an equation, not an example or other code."""
    try:
        ast.parse(textwrap.dedent(block))
    except SyntaxError:
        return not block.lstrip().startswith(">>>")
    return False


def latex(block: str) -> str:
    """An equation of a docstring in LaTeX, whose lines are aligned at their first `=` or `←`."""
    rows = []
    for line in textwrap.dedent(block).splitlines():
        cells = [_latex(cell) for cell in re.split(" {2,}", line.strip())]
        left, *right = re.split(r"(=|\\leftarrow )", cells[0], maxsplit=1)
        cells[0] = f"{left} & {' '.join(right)}" if right else f"& {left}"
        rows.append(r" \qquad ".join(cells))
    return r"\begin{aligned}" + r" \\ ".join(rows) + r"\end{aligned}"


def _latex(text: str) -> str:
    """A part of a line in LaTeX."""
    # A combining hat stays a character of its own: ĥ becomes h and the hat.
    text = unicodedata.normalize("NFD", text).replace("`", "")
    text = re.sub(r"1e[-−](\d+)", r"10^{-\1}", text)
    text = re.sub(rf"√(?:{GROUP}|(\w+))", r"\\sqrt{\1\2}", text)
    text = re.sub(rf"\^{GROUP}", r"^{\1}", text)
    for script, small in SCRIPTS.items():
        text = re.sub(f"[{small}]+", lambda m, s=script: f"{s}{{{_full_size(m[0])}}}", text)
    # LaTeX leaves space around an operator by itself, and drops all other spaces.
    text = BESIDE_OPERATOR.sub("", text).replace(" ", r"\ ")
    return NAME.sub(_name, text).translate(SIGNS)


def _full_size(small: str) -> str:
    return unicodedata.normalize("NFKC", small)


def _name(match: re.Match[str]) -> str:
    """A name: `W_ih` has a subscript, and so has `wkv_t`, but `embedding_scale` is one word."""
    base, _, below = match[0].partition("_")
    if len(base.rstrip("\u0302")) > 1 and len(below) > 1:
        base, _, below = match[0].rpartition("_") if match[0][-2] == "_" else (match[0], "", "")
    letters = _upright(base.rstrip("\u0302"))
    letters = rf"\hat{{{letters}}}" if base.endswith("\u0302") else letters
    return f"{letters}_{{{_upright(below)}}}" if below else letters


def _upright(name: str) -> str:
    """A word in upright letters, and a single letter as it is."""
    return rf"\mathrm{{{name}}}".replace("_", r"\_") if len(name) > 1 else name
