"""The recipes at full scale: settings are those of the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from reasonrag.online_rl.settings import rl_presets
from tests.docs.story import PAGES, ROOT

PAGE = "docs/papers.md"


def test_settings_in_tables_are_those_of_the_configuration_files() -> None:
    seen = 0
    for file, rows in _tables():
        settings = rl_presets().get(file) or yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        for name, shown in rows:
            found: Any = settings
            for part in name.split("."):
                found = found[part]
            assert yaml.safe_load(shown) == found or float(shown) == found, f"{file}: {name}"
            seen += 1
    assert seen > 50


def _tables() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Rows of each table of settings, with the configuration file or preset that is named next."""
    text = PAGES[PAGE].read_text(encoding="utf-8")
    for found in re.finditer(r"^\| setting \| value \| source \|\n(?:\|.*\n)+", text, re.MULTILINE):
        rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", found[0], re.MULTILINE)
        named = re.search(r"--(?:config|preset) ((?!configs/fsdp)[\w./-]+)", text[found.end() :])
        assert named is not None
        yield named[1], rows
