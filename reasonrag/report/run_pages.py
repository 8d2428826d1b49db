"""Write the pages of a run: its settings, its metrics, and every question with its tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from reasonrag.core.settings import dump
from reasonrag.report.drawing import details, draw
from reasonrag.report.site import ListRow, Page, open_site
from reasonrag.report.stats import RunCounts, margin_histogram, whole_number_histogram
from reasonrag.report.trees import QuestionTree, read_trees
from reasonrag.storage.runs import read_run

_STEP_TYPES = ("query", "evidence", "answer", "malformed")  # a malformed step is never chosen


def write_run_pages(run: Path, out: Path) -> Path:
    """Write the pages of a finished run into `out`, see `write_report`."""
    config, summary = read_run(run)
    counts = RunCounts()
    with open_site(out, folder="questions", scripts=("tree.js",)) as site:
        site.write_pages("question.html.j2", _pages(read_trees(run, summary), counts))
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
        )


def _pages(trees: Iterable[QuestionTree], counts: RunCounts) -> Iterator[Page]:
    """Yield a page per question, after adding its tree to `counts`."""
    for tree in trees:
        counts.add(tree)
        best_f1 = max((row["f1"] for row in tree.nodes if row["f1"] is not None), default=None)
        depth = max(row["depth"] for row in tree.nodes)
        columns = [tree.root[name] for name in ("dataset", "question_id", "question", "golden_answers")]
        cells = [*columns, len(tree.nodes), depth, len(tree.pairs), best_f1]
        yield Page(tree.root, {"drawing": draw(tree), "details": details(tree)}, [ListRow(cells)])
