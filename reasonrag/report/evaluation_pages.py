"""The pages of an evaluation: how good the policies are, and every question with what each of them did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.evaluation.tables import evaluation_tables, points
from reasonrag.report.attempts import FIGURES, Asked, Attempts, attempts_label, attempts_of, cells, details, questions
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
    """Write the pages of a finished evaluation into `out`; returns the path of the first one.

    Raises:
        RunError: its `metrics.json` cannot be read, or `out` holds something else.
        DataError: its trajectories are damaged.
        OSError: the pages cannot be written.
    """
    file = evaluation / FIGURES
    figures = require_json(file)
    if "policies" not in figures:
        raise RunError(
            f"{file} is of one policy of an evaluation; give the evaluation's folder, which holds those of its policies"
        )
    with reading(file):
        overview = _overview(figures)
    attempts = attempts_of(evaluation, figures)
    two = len(attempts) > 1
    with open_site(out, folder="questions", scripts=("choice.js", "comparison.js")) as site:
        listing = Listing(site)
        for place, asked, last in with_last(questions(attempts)):
            _write_question(site, place, asked, attempts, last=last)
            of = asked.question
            row = [place, of["question_id"], of["kind"], of["question"], of["golden_answers"], cells(asked)]
            listing.add(row, site.page_name(place))
        return site.write_index(
            "evaluation.html.j2",
            **overview,
            labels=[of.label for of in attempts],
            columns=_QUESTION + (_TWO if two else _ONE),
            filters=_FILTERS_OF_TWO if two else _FILTERS_OF_ONE,
            scripts=listing.close(),
        )


def _overview(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What the first page tells, but for the questions."""
    return {
        "policies": list(figures["policies"]),
        "tables": evaluation_tables(figures),
        "pictures": list(_charts(figures)),
        "asked_differently": list(figures["asked_differently"]),
        "run": _what_was_run(figures),
        "versions": list(figures["versions"].items()),
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


def _what_was_run(figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    judge = figures["judge"] or {}
    return [
        ("data set", ", ".join(figures["dataset"]) or None),
        ("split", figures["split"]),
        ("questions", figures["questions"]["total"]),
        ("checksum of the questions", figures["content"]["questions"]),
        ("checksum of the corpus", figures["content"]["corpus"]),
        ("seed", str(figures["seed"])),
        ("rules of the metrics", figures["rules"]),
        ("judge", judge.get("model")),
        ("prompts of the judge", judge.get("prompts")),
    ]


def _write_question(site: Site, place: int, asked: Asked, attempts: list[Attempts], *, last: bool) -> None:
    site.write_page(
        place,
        "comparison.html.j2",
        last=last,
        question=asked.question,
        short_title=shortened(asked.question["question"], TITLE_COLUMNS),
        labels=[of.label for of in attempts],
        details=details(asked, attempts),
    )
