"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import evenstep

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "evenstep"
author = "the evenstep authors"
release = version = evenstep.__version__

extensions = [
    "command_help",
    "doctor_rules",
    "myst_nb",  # and with it myst_parser
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]  # output of a terminal is shown in fences without a language

# The notebook is run when the site is built; an error in it ends the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 180


def _is_reachable(host: str) -> bool:
    try:
        socket.create_connection((host, 443), timeout=2).close()
    except OSError:
        return False
    return True


# Links to torch's and python's own pages, where these can be reached: the site is built offline, too.
intersphinx_mapping = {
    name: (f"https://{where}", None)
    for name, where in {"python": "docs.python.org/3", "torch": "docs.pytorch.org/docs/stable"}.items()
    if _is_reachable(where.partition("/")[0])
}

autodoc_member_order = "groupwise"
autodoc_typehints = "description"
napoleon_google_docstring = True
copybutton_prompt_text = "$ "

html_theme = "pydata_sphinx_theme"
html_title = "evenstep"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["evenstep.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
}
