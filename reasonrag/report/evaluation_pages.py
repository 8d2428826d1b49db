"""Write the pages of an evaluation: its metrics, and every question with the attempts of all policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.evaluation.tables import evaluation_tables, points
from reasonrag.report.attempts import (
    METRICS,
    Attempts,
    QuestionAttempts,
    attempts_label,
    attempts_of,
    cells,
    details,
    questions,
)
from reasonrag.report.charts import Chart, interval_chart
from reasonrag.report.site import (
    TITLE_COLUMNS,
    Listing,
    Site,
    open_site,
    reading,
    shortened,
    with_last,
)
from reasonrag.storage.files import require_json

_QUESTION = (("number", "index"), ("id", "text"), ("kind", "text"), ("question", "link"), ("golden answers", "list"))
_ONE = (("answer", "text"), ("EM", "number"), ("F1", "number"))
_TWO = (
    ("first answer", "text"),
    ("second answer", "text"),
    ("first EM", "number"),
    ("second EM", "number"),
    ("first F1", "number"),
    ("second F1", "number"),
    ("F1 second − first", "number"),
)
_CHARTS = {"em": "Exact match", "f1": "Token F1", "lasj": "Answers right in meaning (LasJ)"}
_FILTERS_OF_ONE = (("right", "right answers (EM)"), ("wrong", "wrong answers (EM)"), ("failed", "set aside"))
_FILTERS_OF_TWO = (
    ("em", "where they differ in EM"),
    ("answer", "where the answers differ"),
    ("gained", "where only the second is right (EM)"),
    ("lost", "where only the first is right (EM)"),
    ("failed", "where one was set aside"),
)


def write_evaluation_pages(evaluation: Path, out: Path) -> Path:
    """Write the pages of a finished evaluation into `out`; return the path of the first page.

    Raises:
        RunError: its `metrics.json` cannot be read, or `out` holds other files.
        DataError: its trajectories are damaged.
        OSError: the pages cannot be written.
    """
    file = evaluation / METRICS
    metrics = require_json(file)
    if "policies" not in metrics:
        raise RunError(
            f"{file} is of one policy of an evaluation; give the evaluation's folder, which holds those of its policies"
        )
    with reading(file):
        overview = _overview(metrics)
    attempts = attempts_of(evaluation, metrics)
    two = len(attempts) > 1
    with open_site(out, folder="questions", scripts=("choice.js", "comparison.js")) as site:
        listing = Listing(site)
        for page_number, question, last in with_last(questions(attempts)):
            _write_question(site, page_number, question, attempts, last=last)
            row = question.question
            columns = [row[name] for name in ("question_id", "kind", "question", "golden_answers")]
            listing.add([page_number, *columns, cells(question)], site.page_name(page_number))
        return site.write_index(
            "evaluation.html.j2",
            **overview,
            labels=[attempt.label for attempt in attempts],
            columns=_QUESTION + (_TWO if two else _ONE),
            filters=_FILTERS_OF_TWO if two else _FILTERS_OF_ONE,
            scripts=listing.close(),
        )


def _overview(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the first page, without the questions."""
    return {
        "policies": list(metrics["policies"]),
        "tables": evaluation_tables(metrics),
        "pictures": list(_charts(metrics)),
        "asked_differently": list(metrics["asked_differently"]),
        "run": _configuration(metrics),
        "versions": list(metrics["versions"].items()),
    }


def _charts(metrics: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield a chart of all policies and settings for each metric in [0, 1] that says how good a policy is."""
    for metric, title in _CHARTS.items():
        intervals = []
        for policy, setting, at_setting in points(metrics):
            interval = at_setting.get(metric)
            if interval:
                label = attempts_label(metrics, policy, setting)
                intervals.append((label, interval["low"], interval["mean"], interval["high"]))
        if intervals:
            yield interval_chart(title, f"interval-{metric}", intervals)


def _configuration(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    judge = metrics["judge"] or {}
    return [
        ("data set", ", ".join(metrics["dataset"]) or None),
        ("split", metrics["split"]),
        ("questions", metrics["questions"]["total"]),
        ("checksum of the questions", metrics["content"]["questions"]),
        ("checksum of the corpus", metrics["content"]["corpus"]),
        ("seed", str(metrics["seed"])),
        ("metric rules", metrics["rules"]),
        ("judge", judge.get("model")),
        ("judge prompts", judge.get("prompts")),
    ]


def _write_question(
    site: Site, page_number: int, question: QuestionAttempts, attempts: list[Attempts], *, last: bool
) -> None:
    site.write_page(
        page_number,
        "comparison.html.j2",
        last=last,
        question=question.question,
        short_title=shortened(question.question["question"], TITLE_COLUMNS),
        labels=[attempt.label for attempt in attempts],
        details=details(question, attempts),
    )
