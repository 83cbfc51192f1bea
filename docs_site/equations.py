"""Typesets the equations of docstrings, which are written in plain Unicode, as `help` shows them.

An indented block of a docstring is an equation unless it is valid Python. Subscripts follow `_`,
exponents `^`, both with braces if they are longer than one name; two or more spaces begin a new
column, such as a remark. `latex` turns this notation into LaTeX, and nothing else is assumed about
it: words are set upright, single letters in italics.
"""

import ast
import re
import textwrap
import unicodedata

SYMBOLS = {
    "⊙": r"\odot", "·": r"\cdot", "×": r"\times", "−": "-", "∗": r"\ast", "*": r"\ast",
    "⋆": r"\star", "←": r"\leftarrow", "→": r"\to", "≤": r"\le", "≥": r"\ge", "≠": r"\ne",
    "∂": r"\partial", "∞": r"\infty", "Σ": r"\sum", "Π": r"\prod", "…": r"\ldots",
    "‖": r"\|", "±": r"\pm", "∈": r"\in",
    "{": r"\{", "}": r"\}", "%": r"\%", "#": r"\#", "&": r"\&",
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ε": r"\varepsilon",
    "θ": r"\theta", "κ": r"\kappa", "λ": r"\lambda", "μ": r"\mu", "σ": r"\sigma", "φ": r"\varphi",
}  # fmt: skip
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", [*"0123456789-", r"\top"], strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
TOKENS = re.compile(
    "|".join(
        [
            r"(?P<verbatim>`[^`]*`)",
            r"(?P<number>\d+(?:\.\d+)?(?:e[-−]?\d+)?)",
            r"(?P<name>[A-Za-zα-ω](?:[A-Za-z0-9α-ω\u0302]|_(?=[A-Za-z0-9]))*)",
            f"(?P<raised>[{''.join(SUPERSCRIPTS)}]+)",
            f"(?P<lowered>[{''.join(SUBSCRIPTS)}]+)",
            r"(?P<script>[_^])",
            r"(?P<space>\s+)",
            r"(?P<other>.)",
        ]
    )
)


def is_equation(block: str) -> bool:
    """Whether an indented block of a docstring is an equation, not an example or other code."""
    try:
        ast.parse(textwrap.dedent(block))
    except SyntaxError:
        return not block.lstrip().startswith(">>>")
    return False


def latex(block: str) -> str:
    """An equation of a docstring in LaTeX, with a column for each side of its first sign."""
    rows = []
    for line in textwrap.dedent(block).strip("\n").splitlines():
        equation, *remarks = re.split(r"(?<=\S) {2,}(?=\S)", line)
        left, sign, right = _at_sign(equation)
        cells = rf"{_Parser(left).all()} & {sign} {_Parser(right).all()}"
        rows.append(cells + "".join(rf" \qquad {_Parser(remark).all()}" for remark in remarks))
    return r"\begin{aligned}" + r" \\ ".join(rows) + r"\end{aligned}"


def _at_sign(line: str) -> tuple[str, str, str]:
    """The parts of a line before and after its first `=` or `←`, at which lines are aligned."""
    match = re.search(r" ([=←]) ", line)
    if match is None:
        return "", "", line
    return line[: match.start()], SYMBOLS.get(match[1], match[1]), line[match.end() :]


class _Parser:
    """Reads one cell of an equation from left to right."""

    def __init__(self, text: str):
        # A combining hat stays a character of its own: ĥ becomes h and the hat.
        decomposed = unicodedata.normalize("NFD", text)
        self.tokens = [(m.lastgroup, m[0]) for m in TOKENS.finditer(decomposed)]
        self.at = 0

    def all(self) -> str:
        """All tokens that remain."""
        parts = []
        while self.at < len(self.tokens):
            parts.append(self.next())
        return " ".join(filter(None, parts))

    def next(self) -> str:
        """The next token, with the group that follows a root, a subscript or an exponent."""
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "verbatim":
            return rf"\mathtt{{{_escaped(text[1:-1])}}}"
        if kind == "number":
            number, _, exponent = text.replace("−", "-").partition("e")
            ten = rf"10^{{{exponent}}}"
            return number if not exponent else ten if number == "1" else rf"{number} \cdot {ten}"
        if kind == "name":
            return _name(text)
        if kind == "raised":
            return f"^{{{''.join(SUPERSCRIPTS[each] for each in text)}}}"
        if kind == "lowered":
            return f"_{{{''.join(SUBSCRIPTS[each] for each in text)}}}"
        if kind == "script":
            return f"{text}{{{self.group()}}}"
        if kind == "space":
            return r"\ " if self.beside_word() else r"\,"
        if text == "√":
            return rf"\sqrt{{{self.group()}}}"
        return SYMBOLS.get(text, text)

    def group(self) -> str:
        """What is below a root, an exponent or a subscript: a group in braces, or one token."""
        kind, opening = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        closing = {"{": "}", "(": ")"}.get(opening)
        if closing is None:
            sign = self.next()
            if kind == "name":
                while self.at < len(self.tokens) and self.tokens[self.at][0] == "script":
                    sign += self.next()
            return sign
        start, depth = self.at + 1, 1
        while depth:
            self.at += 1
            text = self.tokens[self.at][1]
            depth += (text == opening) - (text == closing)
        inside = "".join(text for _, text in self.tokens[start : self.at])
        self.at += 1
        return _Parser(inside).all()

    def beside_word(self) -> bool:
        """Whether the space before the current token separates a word from something else."""
        sides = self.tokens[max(self.at - 2, 0) : self.at + 1]
        return any(kind == "name" and _is_word(text) for kind, text in sides)


def _is_word(name: str) -> bool:
    base, _, _ = name.replace("\u0302", "").partition("_")
    return len(base) > 1


def _name(name: str) -> str:
    """A name: `W_ih` has a subscript, and so has `wkv_t`, but `embedding_scale` is one word."""
    base, _, below = name.partition("_")
    if _is_word(name) and len(below) > 1:
        head, _, last = name.rpartition("_")
        base, below = (head, last) if len(last) == 1 else (name, "")
    lower = f"_{{{_subscript(below)}}}" if below else ""
    hat = "\u0302" in base
    base = base.replace("\u0302", "")
    upright = len(base) > 1
    letters = rf"\mathrm{{{_escaped(base)}}}" if upright else SYMBOLS.get(base, base)
    return (rf"\hat{{{letters}}}" if hat else letters) + lower


def _subscript(below: str) -> str:
    return rf"\mathrm{{{_escaped(below)}}}" if len(below) > 1 else SYMBOLS.get(below, below)


def _escaped(word: str) -> str:
    return word.replace("_", r"\_")
