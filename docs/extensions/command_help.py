"""A directive for Sphinx: ```` ```{command-help} bench run ```` shows what `evenstep bench run --help` prints."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from evenstep.cli.commands import whole_parser


class CommandHelp(SphinxDirective):
    """The help of a command, as it is printed 88 columns wide."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Build the node."""
        parser: Any = whole_parser()
        for name in self.arguments[0].split() if self.arguments else []:
            parser = parser.sub_commands[name]
        text = help_text(parser)
        return [nodes.literal_block(text, text, language="text")]


def help_text(parser: ArgumentParser) -> str:
    """What `--help` prints."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    try:
        return parser.format_help()
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
