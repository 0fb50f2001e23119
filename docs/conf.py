"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

import evenstep

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "evenstep"
author = "the evenstep authors"
release = version = evenstep.__version__

extensions = [
    "command_help",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]  # output of a terminal is shown in fences without a language

autodoc_member_order = "groupwise"
autodoc_typehints = "description"
napoleon_google_docstring = True
copybutton_prompt_text = "$ "

html_theme = "pydata_sphinx_theme"
html_title = "evenstep"
html_show_sourcelink = False
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
