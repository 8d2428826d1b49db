"""The reference pages of `docs/`, written from the code: `python -m docs.reference`.

Columns and their meanings are those of `reasonrag.storage.tables`, commands those of `--help`, settings and their
descriptions those of the models that read them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.reference.commands import cli_page
from docs.reference.schema import schema_page
from docs.reference.settings import settings_page

DOCS = Path(__file__).parents[1]
PAGES: dict[str, Callable[[], str]] = {"schema.md": schema_page, "cli.md": cli_page, "settings.md": settings_page}
