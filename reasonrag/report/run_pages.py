"""The pages of a run: what was run, what came out, and every question with its tree."""

from __future__ import annotations

from pathlib import Path

from reasonrag.core.settings import dump
from reasonrag.report.drawing import details, draw
from reasonrag.report.overview import Overview
from reasonrag.report.reading import read_trees
from reasonrag.report.site import TITLE_COLUMNS, Listing, open_site, with_last
from reasonrag.report.visible import shortened
from reasonrag.storage.runs import read_run


def write_run_pages(run: Path, out: Path) -> Path:
    """Write the pages of a finished run into `out`; returns the path of the first one.

    Raises:
        RunError: the run cannot be read, or `out` holds something else.
        DataError: its tables are damaged.
        OSError: the pages cannot be written.
    """
    config, summary = read_run(run)
    with open_site(out, folder="questions", scripts=("tree.js",)) as site:
        overview, listing = Overview(), Listing(site)
        for place, tree, last in with_last(read_trees(run, summary)):
            site.write_page(
                place,
                "question.html.j2",
                last=last,
                question=tree.root,
                short_title=shortened(tree.root["question"], TITLE_COLUMNS),
                drawing=draw(tree),
                details=details(tree),
            )
            listing.add([place, *overview.add(tree).values()], site.page_name(place))
        return site.write_index(
            "index.html.j2",
            config=config,
            settings=dump(config),
            summary=summary,
            overview=overview,
            scripts=listing.close(),
        )
