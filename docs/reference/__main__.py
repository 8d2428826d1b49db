"""Write all files."""

from __future__ import annotations

from docs.reference import PAGES, ROOT

for name, page in PAGES.items():
    (ROOT / name).write_text(page(), encoding="utf-8")
