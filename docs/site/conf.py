"""The site of the documentation: `make docs` builds it, from the pages that `pages.py` collects."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pygments.lexers.special import TextLexer

from fedensemble import __version__

project = "fedensemble"
author = "The fedensemble authors"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "api_coverage",
    "mathml",
    "references",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
default_role = "py:obj"  # docstrings have names in single backquotes
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

smartquotes = False  # docstrings have {"name": "mlp"} outside of code, too

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"fedensemble {release}"
html_theme_options = {"top_of_page_buttons": []}  # the source of a page is on the forge
html_show_sourcelink = False
html_copy_source = False
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]


def setup(app):
    app.add_lexer("csv", TextLexer)
