"""The pages that the site generates."""

import inspect
import pkgutil
import re
from importlib import import_module

import pytest

pytest.importorskip("sphinx", reason="the site needs `make docs` or the extra `docs`")

from docs_site import docstrings, equations, pages, reference
from docs_site.proved import proved
from jax_models import LSTM, LSTMState
from parity_tests.checks import CHECKS
from parity_tests.registry import CASES
from train.trainer.mesh import MeshConfig


@pytest.fixture(scope="module")
def api():
    """The pages of the API reference."""
    return reference.pages()


def test_every_public_name_has_one_entry(api):
    entry = re.compile(r"^\.\. (?:auto\w+|py:data):: (\S+)$", re.MULTILINE)
    described = [path.replace("::", ".") for path in entry.findall("".join(api.values()))]
    packages = [*reference.OWN]
    for package in reference.OWN:
        modules = pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
        packages += [module.name for module in modules if module.ispkg]
    public = {
        f"{package}.{name}"
        for package in packages
        for name in getattr(import_module(package), "__all__", ())
    }
    assert public <= {*described}
    assert len(described) == len({*described})


def test_the_commands_show_their_options(api):
    assert "## twinscan train" in api["reference/command_line.md"]
    assert "--optimizer.learning-rate" in api["reference/command_line.md"]


def test_a_docstring_in_restructuredtext():
    text = "\n".join(docstrings.rest(inspect.cleandoc(LSTM.__doc__)))
    assert "\n>>> layer = LSTM(64, 256, rngs=nnx.Rngs(0))\n" in text
    assert "\n.. math::\n\n   \\begin{aligned}i,\\ f,\\ g,\\ o & = x_{t}" in text
    assert "The state is\n``LSTMState(h, c)`` with h" in text
    assert "\n:param proj_bias: whether to add b_hr" in text
    assert "\n:raises ValueError: a size is not positive" in text
    assert docstrings.rest("Takes *args, `x`s and `f`.\n\n    y = f(x)\n")[:5] == [
        r"Takes \*args, `x`\ s and `f`.",
        "",
        ".. code-block:: python",
        "",
        "   y = f(x)",
    ]
    assert docstrings.rest("Returns:\n    y: the\n        outputs.") == [
        ":returns: y: the outputs."
    ]


def test_types_are_as_in_the_code():
    positive = "~a.Annotated[float, <function checked at 0x7f>] | None = None"
    assert docstrings.plain(positive) == "float | None = None"
    kernel = "Float[jaxlib._jax.Array, 'in out'], dtype=<class 'jax.numpy.float32'>"
    assert docstrings.plain(kernel) == "Float[Array, 'in out'], dtype=jax.numpy.float32"
    fields = docstrings.signature(None, "class", "LSTMState", LSTMState, None, "(h: int)", "")
    assert fields == ("(h, c)", "")
    config = docstrings.signature(None, "class", "MeshConfig", MeshConfig, None, "(*args)", "")
    assert config == ("(data, model, sequence, fully_sharded)", "")


def test_a_value_does_not_have_the_docstring_of_its_type():
    lines = ["dict() -> new empty dictionary"]
    docstrings.rewrite(None, "data", "CASES", CASES, None, lines)
    assert not lines


def test_an_equation_in_latex():
    text = "    h_t = √(1 − a_t²) ⊙ ĥ_{t−1}     for each W_out\n    x ← x + 1e-6 mlp(norm1(x_N))\n"
    assert equations.latex(text) == (
        r"\begin{aligned}h_{t} & = \sqrt{1-a_{t}^{2}}\odot \hat{h}_{t-1} \qquad "
        r"\mathrm{for}\ \mathrm{each}\ W_{\mathrm{out}} \\ "
        r"x & \leftarrow  x+10^{-6}\ \mathrm{mlp}(\mathrm{norm1}(x_{N}))\end{aligned}"
    )
    assert equations.latex("    b_step · log_w_t\n") == (
        r"\begin{aligned}& b_{\mathrm{step}}\cdot \mathrm{log\_w}_{t}\end{aligned}"
    )
    assert not equations.is_equation("    params = project(params)\n")
    assert not equations.is_equation("    >>> y = layer(x)\n")


def test_the_navigation_has_every_page_once_and_finds_new_guides():
    new = ["docs/guides/zebra.md", "docs/guides/your_own.md", "docs/guides/from_lstm.md"]
    places = [*pages.sources(), *new]
    parts = pages.navigation(dict.fromkeys(places))
    guides = [f"{name}.md" for name in parts["Guides"] if f"{name}.md" in new]
    assert guides == [*reversed(new)]
    listed = [f"{name}.md" for members in parts.values() for name in members]
    assert len(listed) == len({*listed})
    assert {*places} - {*listed} == {"README.md"}


def test_what_is_proved_names_every_architecture():
    page = proved()
    for case in CASES.values():
        assert f"\n| {case.architecture.replace('_', ' ')} |" in page
    for check in CHECKS.values():
        assert f"\n- {check.__doc__.splitlines()[0]}\n" in page
    assert re.search(r"Measured on 20\d\d-\d\d-\d\d with python 3", page)
