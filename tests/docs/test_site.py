"""The site: no broken link or anchor, nothing asked of a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.story import PAGES, ROOT
from tests.e2e import product


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env=product.environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_builds_without_a_broken_link_or_anchor(site: Path) -> None:
    assert (site / "index.html").is_file()
    assert list(site.rglob("*.py")) == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    asked = re.compile(r"""(?:src|<link[^>]+href)=["']?(?:https?:)?//[^"'\s>]+""")
    for page in site.rglob("*.html"):
        assert asked.findall(page.read_text(encoding="utf-8")) == [], page.name


def test_the_readme_links_to_files_that_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES["README.md"].read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_every_page_is_reached_from_the_readme_or_the_index() -> None:
    text = "".join(PAGES[name].read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    assert [
        page
        for page in PAGES
        if page.startswith("docs/")
        and f"({page}" not in text
        and f"({page[5:]}" not in text
        and page != "docs/index.md"
    ] == []
