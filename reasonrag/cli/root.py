"""The command that all others hang on."""

from __future__ import annotations

import click

from reasonrag import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Process rewards for agentic RAG: questions and a corpus in, preference data and policies out.

    \b
    Try it whole, without a GPU or a network:
      reasonrag build-tree --preset demo --limit 20 --out runs/demo
    """
