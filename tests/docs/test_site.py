"""The pages that the site generates."""

import pkgutil
import re
from importlib import import_module

import pytest

from docs_site import equations, pages, reference
from docs_site.proved import proved
from parity_tests.checks import CHECKS
from parity_tests.registry import CASES


@pytest.fixture(scope="module")
def api():
    """The pages of the API reference."""
    return reference.pages()


def test_every_public_name_is_on_a_page(api):
    entry = re.compile(r"{py:currentmodule} (\S+)\n```\n\n:+{py:\w+} (\w+)")
    described = [".".join(match) for page in api.values() for match in entry.findall(page)]
    packages = [*reference.OWN]
    for package in reference.OWN:
        found = pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
        packages += [module.name for module in found if module.ispkg]
    public = {
        f"{package}.{name}"
        for package in packages
        for name in getattr(import_module(package), "__all__", ())
    }
    assert public <= {*described}
    assert len(described) == len({*described})


def test_an_entry_has_signature_equation_example_and_links(api):
    page = api["reference/operators/min_rnn.md"]
    assert "x: Float[Array, 'batch time" in page or 'x: Float[Array, "batch time' in page
    assert "z_{t} & = \\sigma" in page
    lstm = api["reference/layers/lstm.md"]
    assert "```pycon\n>>> layer = LSTM(64, 256, rngs=nnx.Rngs(0))\n" in lstm
    assert ":param proj_bias: whether to add b_hr" in lstm
    assert ":raises ValueError: a size is not positive" in lstm
    assert "{py:attribute} h\n:type: Float[Array, '*layers batch out']" in lstm
    command_line = api["reference/command_line.md"]
    assert "## twinscan train" in command_line
    assert "--optimizer.learning-rate" in command_line


def test_an_equation_in_latex():
    text = "    h_t = √(1 − a_t²) ⊙ h_{t−1}     for each W_out\n    x ← x + mlp(norm1(x_N))\n"
    assert equations.latex(text) == (
        r"\begin{aligned}h_{t} & = \sqrt{1 \, - \, a_{t} ^{2}} \, \odot \, h _{t - 1} \qquad "
        r"\mathrm{for} \  \mathrm{each} \  W_{\mathrm{out}} \\ "
        r"x & \leftarrow x \, + \  \mathrm{mlp} ( \mathrm{norm1} ( x_{N} ) )\end{aligned}"
    )
    assert not equations.is_equation("    params = project(params)\n")
    assert not equations.is_equation("    >>> y = layer(x)\n")


def test_every_equation_is_typeset(api):
    mathml = pytest.importorskip("docutils.utils.math.latex2mathml")
    equations = re.findall(r"```{math}\n(.*?)\n```", "".join(api.values()))
    assert equations
    for equation in equations:
        mathml.tex2mathml(equation, as_block=True)


def test_the_navigation_has_every_page_once_and_finds_new_guides():
    places = [*pages.sources(), "guides/zebra.md", "guides/your_own.md", "guides/from_lstm.md"]
    parts = pages.navigation(dict.fromkeys(places))
    guides = [place for place in parts["Guides"] if place in places[-3:]]
    assert guides == ["guides/from_lstm.md", "guides/your_own.md", "guides/zebra.md"]
    listed = [place for members in parts.values() for place in members]
    assert len(listed) == len({*listed})
    assert {*places} - {*listed} == {"index.md"}


def test_what_is_proved_names_every_architecture():
    page = proved()
    for case in CASES.values():
        assert f"\n| {case.architecture.replace('_', ' ')} |" in page
    for check in CHECKS.values():
        assert f"\n- {check.__doc__.splitlines()[0]}\n" in page
    assert re.search(r"Measured on 20\d\d-\d\d-\d\d with python 3", page)
