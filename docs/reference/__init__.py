"""The files that are written from the code: `python -m docs.reference`.

Columns and their meanings are those of `reasonrag.storage.tables`, commands those of `--help`, settings and their
descriptions those of the models that read them, figures of benchmarks those that `make bench` kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.reference import claims
from docs.reference.commands import cli_page
from docs.reference.options import options_json
from docs.reference.performance import performance_page
from docs.reference.schema import schema_page
from docs.reference.settings import settings_page
from tests.faults.matrix import faults_page
from tools.peers import peers_page

ROOT = Path(__file__).parents[2]
# By path in the repository. Commands read the options, so these are written first.
PAGES: dict[str, Callable[[], str]] = {
    "reasonrag/commands/options.json": options_json,
    "docs/schema.md": schema_page,
    "docs/cli.md": cli_page,
    "docs/settings.md": settings_page,
    "docs/results/performance.md": performance_page,
    "docs/results/peers.md": peers_page,
    "docs/results/faults.md": faults_page,
    "README.md": partial(claims.page, "README.md"),
    "docs/index.md": partial(claims.page, "docs/index.md"),
}
