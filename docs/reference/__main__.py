"""Writes them."""

from __future__ import annotations

from docs.reference import DOCS, PAGES

for name, page in PAGES.items():
    (DOCS / name).write_text(page(), encoding="utf-8")
