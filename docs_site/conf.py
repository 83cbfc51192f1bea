"""The configuration of Sphinx."""

import html
import pydoc
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import jax_models
from docs_site import docstrings
from docs_site.reference import OWN

project = "twinscan"
release = version = jax_models.__version__
html_title = f"twinscan {version}"
copyright = f"the authors of twinscan. Version {version}, Apache License 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton"]
root_doc = "README"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["twinscan.css"]
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"
default_role = "py:obj"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True, "exclude-members": "state_type"}
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = autosummary_generate = False
OURS = tuple(f"{package}." for package in OWN)
myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div.highlight:not(.output *) pre"
linkcheck_anchors = False  # GitHub makes the anchors of its pages with JavaScript
linkcheck_timeout = 20


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    # A screen reader, and whoever selects an equation, gets its LaTeX.
    title = html.escape(node.astext(), quote=True)
    mathml = tex2mathml(node.astext(), as_block=True)
    self.body.append(f'<div class="math" role="math" aria-label="{title}">{mathml}</div>')
    raise nodes.SkipNode


def without_entry(app: Any, env: Any, node: Any, shown: nodes.Node) -> nodes.Node | None:
    """Shows a name without an entry without a link, unless it is one of ours that does not exist.

    Types and docstrings also name what other packages define, arguments, and private functions.
    """
    name = node["reftarget"]
    is_type = node.get("reftype") == "class"
    is_known = is_type or not name.startswith(OURS) or pydoc.locate(name) is not None
    return shown if node.get("refdomain") == "py" and is_known else None


def setup(app: Any) -> dict[str, Any]:
    """Typesets equations as MathML, which browsers show without a script or another site's."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-process-docstring", docstrings.rewrite)
    app.connect("autodoc-process-signature", docstrings.signature)
    app.connect("missing-reference", without_entry)
    app.add_directive_to_domain("py", "attribute", docstrings.Attribute, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
