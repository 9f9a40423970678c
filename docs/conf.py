"""Sphinx settings. `make docs` builds the site, and fails if Sphinx prints a warning."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

# The command-line reference shows the output of `sglang-topp --help`. Sphinx must find the command on `PATH`,
# and the output must have the same width on every machine.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["COLUMNS"] = "88"

project = "sglang-topp"
author = "the authors of sglang-topp"
copyright = author
version = release = version_of("sglang-topp")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.programoutput",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "sglang-topp"
html_show_copyright = False
html_math_renderer = "mathml"
highlight_language = "text"  # code blocks without a language hold commands and output

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = {"math"}  # GitHub shows the same fences

# Single backticks in docstrings are code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    name: name for name in ("ArrayLike", "OnAbort", "Prompts", "RaggedRows", "SamplingParams")
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

nitpicky = True
# Do not check references to names of other projects. To resolve these names, Sphinx would need the network.
nitpick_ignore_regex = [
    ("py:.*", r"(?!sglang_topp).*"),
    ("py:.*", r".*\._\w+"),
    ("py:.*", r".*\.CompressedMask"),
]

# `make docs LINKS=1` checks every external link, except links to 127.0.0.1, which lead to the reader's own
# servers.
linkcheck_ignore = [r"http://127\.0\.0\.1.*"]


def setup(app: Sphinx) -> None:
    """Write formulas as MathML: Sphinx's own MathJax is a script that each reader would fetch from a CDN."""
    app.add_html_math_renderer("mathml", (visit_inline_formula, None), (visit_formula, None))


def visit_inline_formula(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_formula(translator: HTML5Translator, node: nodes.math_block) -> None:
    formula = tex2mathml(node.astext(), as_block=True)
    translator.body.append(f'<div style="overflow-x: auto">{formula}</div>')
    raise nodes.SkipNode
