"""Write the pages of a run: its settings, its metrics, and every question with its tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reasonrag.core.settings import dump
from reasonrag.report.drawing import details, draw
from reasonrag.report.site import TITLE_COLUMNS, Listing, open_site, shortened, with_last
from reasonrag.report.stats import RunCounts, margin_histogram, whole_number_histogram
from reasonrag.report.trees import QuestionTree, read_trees
from reasonrag.storage.runs import read_run

_STEP_TYPES = ("query", "evidence", "answer", "malformed")  # a malformed step is never chosen


def write_run_pages(run: Path, out: Path) -> Path:
    """Write the pages of a finished run into `out`; return the path of the first page.

    Raises:
        RunError: the run cannot be read, or `out` holds other files.
        DataError: its tables are damaged.
        OSError: the pages cannot be written.
    """
    config, summary = read_run(run)
    with open_site(out, folder="questions", scripts=("tree.js",)) as site:
        counts, listing = RunCounts(), Listing(site)
        for number, tree, last in with_last(read_trees(run, summary)):
            counts.add(tree)
            site.write_page(
                number,
                "question.html.j2",
                last=last,
                question=tree.root,
                short_title=shortened(tree.root["question"], TITLE_COLUMNS),
                drawing=draw(tree),
                details=details(tree),
            )
            listing.add(_cells(number, tree), site.page_name(number))
        metrics = counts.metrics(summary)
        by_type = metrics["pairs"]["by_type"]
        return site.write_index(
            "index.html.j2",
            config=config,
            settings=dump(config),
            summary=summary,
            metrics=metrics,
            types=_STEP_TYPES,
            pairs_by_chosen={kind: sum(by_type.get(kind, {}).values()) for kind in _STEP_TYPES[:-1]},
            histograms={
                "rounds": whole_number_histogram(counts.values["rounds"]),
                "tokens": whole_number_histogram(counts.values["chosen_tokens"]),
                "margins": margin_histogram(counts.values["margin"]),
            },
            scripts=listing.close(),
        )


def _cells(number: int, tree: QuestionTree) -> list[Any]:
    root = tree.root
    return [
        number,
        root["dataset"],
        root["question_id"],
        root["question"],
        root["golden_answers"],
        len(tree.nodes),
        max(row["depth"] for row in tree.nodes),
        len(tree.pairs),
        max((row["f1"] for row in tree.nodes if row["f1"] is not None), default=None),
    ]
