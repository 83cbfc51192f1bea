"""The configuration of Sphinx."""

import html
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import jax_models

project = "twinscan"
release = version = jax_models.__version__
html_title = f"twinscan {version}"
copyright = f"the authors of twinscan. Version {version}, Apache License 2.0"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["files/**"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["twinscan.css"]
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"
default_role = "code"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
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


def setup(app: Any) -> dict[str, Any]:
    """Typesets equations as MathML, which browsers show without a script or another site's."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
