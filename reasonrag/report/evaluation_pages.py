"""Write the pages of an evaluation: its metrics, and every question with the attempts of all policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.text import normalize_answer
from reasonrag.evaluation.report import sweep_panels
from reasonrag.evaluation.tables import bold_note, evaluation_tables, points
from reasonrag.report.charts import Chart, chart, interval_chart
from reasonrag.report.site import ListRow, Page, TextPool, number, open_site, reading
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import Row, read_shards
from reasonrag.storage.tables import trajectory_schema

Question = tuple[str, str]  # data set, id
Result = Row | str  # a row of `tables.trajectory_schema`, or the cause why there is none

_METRICS = "metrics.json"
_QUESTION = (("number", "index"), ("id", "text"), ("kind", "text"), ("question", "link"), ("golden answers", "list"))
_ONE = (("answer", "text"), ("EM", "number"), ("F1", "number"))
_TWO = (
    *(("first answer", "text"), ("second answer", "text"), ("first EM", "number"), ("second EM", "number")),
    *(("first F1", "number"), ("second F1", "number"), ("F1 second − first", "number")),
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
# Columns of `tables.trajectory_schema` on the page of a question, with their labels.
_FACTS = {
    "answer": "answer",
    "stop_reason": "stop reason",
    "em": "EM",
    "f1": "F1",
    "acc": "ACC",
    "retrievals": "searches",
    "steps": "steps",
    "well_formed": "well-formed",
    "reason": "format error",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "lasj": "right in meaning (LasJ)",
    "steps_over": "needless searches",
    "searches_known": "searches with a verdict",
    "steps_under": "wrong steps without a search",
    "own_steps_known": "such steps with a verdict",
}


@dataclass(frozen=True, slots=True)
class Attempts:
    """All attempts of one policy at one setting.

    Attributes:
        label: short name of the policy at this setting.
        setting: name of the setting.
        folder: of the policy, in the evaluation's folder.
        failures: causes of the attempts that were set aside.
    """

    label: str
    setting: str
    folder: Path
    failures: Mapping[Question, str]

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield rows of `tables.trajectory_schema`, in the order of the questions.

        Raises:
            RunError, DataError: the table is missing or damaged.
        """
        return read_shards(self.folder / "trajectories", self.setting, trajectory_schema(), columns=columns)


def write_evaluation_pages(evaluation: Path, out: Path) -> Path:
    """Write the pages of a finished evaluation into `out`, see `write_report`."""
    file = evaluation / _METRICS
    metrics = require_json(file)
    if "policies" not in metrics:
        raise RunError(
            f"{file} is of one policy of an evaluation; give the evaluation's folder, which holds those of its policies"
        )
    with reading(file):
        overview = {
            "policies": list(metrics["policies"]),
            "tables": evaluation_tables(metrics),
            "pictures": list(_charts(metrics)),
            "bold_note": bold_note(metrics["differences"]),
            "asked_differently": list(metrics["asked_differently"]),
            "run": _configuration(metrics),
            "versions": list(metrics["versions"].items()),
        }
    attempts = _attempts_of(evaluation, metrics)
    two = len(attempts) > 1
    with open_site(out, folder="questions", scripts=("choice.js", "comparison.js")) as site:
        site.write_pages("comparison.html.j2", _pages(attempts))
        return site.write(
            "index.html",
            "evaluation.html.j2",
            scripts=site.rows.close(),
            **overview,
            labels=[attempt.label for attempt in attempts],
            columns=_QUESTION + (_TWO if two else _ONE),
            filters=_FILTERS_OF_TWO if two else _FILTERS_OF_ONE,
        )


def _pages(attempts: Sequence[Attempts]) -> Iterator[Page]:
    labels = [attempt.label for attempt in attempts]
    for question, results in questions(attempts):
        columns = [question[name] for name in ("question_id", "kind", "question", "golden_answers")]
        values = {"labels": labels, "details": _details(labels, results)}
        yield Page(question, values, [ListRow([*columns, _cells(results)])])


def _charts(metrics: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield a chart of all policies and settings for each metric in [0, 1] that says how good a policy is.

    Curves of what was swept follow.
    """
    for metric, title in _CHARTS.items():
        intervals = []
        for policy, setting, at_setting in points(metrics):
            interval = at_setting.get(metric)
            if interval:
                label = _label(metrics, policy, setting)
                intervals.append((label, interval["low"], interval["mean"], interval["high"]))
        if intervals:
            yield interval_chart(title, f"interval-{metric}", intervals)
    for index, panel in enumerate(sweep_panels(metrics), 1):
        yield chart(panel, f"sweep-{index}")


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


def _attempts_of(folder: Path, metrics: Mapping[str, Any]) -> list[Attempts]:
    """Return the policies and settings of an evaluation, in its order; `metrics` is the content of `metrics.json`."""
    attempts = []
    for policy, settings in metrics["policies"].items():
        file = folder / policy / _METRICS
        policy_metrics = require_json(file)
        with reading(file):
            if Path(policy).name != policy:
                raise ValueError(f"policy {policy!r} is not the name of a folder")
            failures: dict[str, dict[Question, str]] = {setting: {} for setting in settings}
            for failure in policy_metrics["failures"]:
                question = failure["dataset"], failure["question_id"]
                failures.setdefault(failure["setting"], {})[question] = failure["cause"]
            for setting in settings:
                label = _label(metrics, policy, setting)
                attempts.append(Attempts(label, setting, folder / policy, failures[setting]))
    return attempts


def _label(metrics: Mapping[str, Any], policy: str, setting: str) -> str:
    """Return the short name of a policy at a setting: without the setting if it is the only one."""
    return policy if len(metrics["policies"][policy]) == 1 else f"{policy} {setting}"


def questions(attempts: Sequence[Attempts]) -> Iterator[tuple[Row, list[Result]]]:
    """Yield every question that at least one policy finished, in the order of the evaluation, with all results.

    The tables are read in parallel, one batch of each in memory. The table of a policy lacks the questions at which
    it failed, so the common order is computed first, from the ids alone.

    Raises:
        RunError, DataError: a table is missing or damaged, or the tables have different orders.
    """
    id_columns = ("dataset", "question_id")
    order = shared_order([[_id(row) for row in attempt.rows(id_columns)] for attempt in attempts])
    tables = [attempt.rows() for attempt in attempts]
    next_rows = [next(table, None) for table in tables]
    for question in order:
        results: list[Result] = []
        for index, attempt in enumerate(attempts):
            row = next_rows[index]
            if row is not None and _id(row) == question:
                results.append(row)
                next_rows[index] = next(tables[index], None)
            else:
                results.append(attempt.failures.get(question, "not tried"))
        # The columns that describe the question are the same in all rows.
        yield next(row for row in results if isinstance(row, dict)), results


def shared_order(sequences: Sequence[Sequence[Question]]) -> list[Question]:
    """Return all questions in an order that agrees with every sequence; a sequence may lack some questions.

    Raises:
        DataError: there is no such order, or a sequence names a question twice.

    >>> shared_order([[("d", "1"), ("d", "3")], [("d", "1"), ("d", "2"), ("d", "3")]])
    [('d', '1'), ('d', '2'), ('d', '3')]
    """
    longest = max(sequences, key=len, default=[])
    if all(sequence == longest for sequence in sequences) and len(set(longest)) == len(longest):
        return list(longest)
    sorter: TopologicalSorter[Question] = TopologicalSorter()
    for sequence in sequences:
        for question in sequence[:1]:
            sorter.add(question)
        for before, after in pairwise(sequence):
            sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        raise DataError(
            "the policies' trajectories list the same questions in different orders; run the evaluation again in a new "
            "folder"
        ) from error


def _id(row: Row) -> Question:
    return row["dataset"], row["question_id"]


def _cells(results: Sequence[Result]) -> list[Any]:
    """Return the list's values of each attempt: answer, EM, F1, and a number that equal answers share; or the cause."""
    answer_numbers: dict[str | None, int] = {}
    values: list[Any] = []
    for result in results:
        if isinstance(result, str):
            values.append(result)
            continue
        answer = result["answer"]
        normalized = None if answer is None else normalize_answer(answer)
        answer_number = answer_numbers.setdefault(normalized, len(answer_numbers))
        values.append([answer, result["em"], result["f1"], answer_number])
    return values


def _details(labels: Sequence[str], results: Sequence[Result]) -> dict[str, Any]:
    """Return what the page of a question shows, as JSON. Prompts and passages are indices into shared lists."""
    messages, passages = TextPool(), TextPool()
    shown: list[Row] = []
    for label, result in zip(labels, results, strict=True):
        attempt: Row = {"label": label, "cause": "", "facts": [], "steps": []}
        if isinstance(result, str):
            attempt["cause"] = result
        else:
            attempt["facts"] = [_fact(result[name]) for name in _FACTS]
            attempt["steps"] = _steps(result, messages, passages)
        shown.append(attempt)
    facts = list(_FACTS.values())
    return {"attempts": shown, "facts": facts, "messages": messages.items, "passages": passages.items}


def _fact(value: Any) -> Any:
    """Format a value for JSON: verdicts as words, numbers as text, because NaN would break it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value)


def _steps(row: Row, messages: TextPool, passages: TextPool) -> list[Row]:
    """Return a trajectory's steps. If a turn continues, only the text inserted since is kept, because turns grow."""
    steps: list[Row] = []
    written = ""
    for step in row["trajectory"] or []:
        continues = bool(steps) and step["prefix"].startswith(written)
        steps.append(
            {
                "action": step["action"],
                "content": step["content"],
                "text": step["text"],
                "finish": step["finish_reason"],
                "prompt": messages.messages(step["prompt"]),
                "continues": continues,
                "prefix": step["prefix"][len(written) :] if continues else step["prefix"],
                "passages": [[passages.passage(passage), number(passage["score"])] for passage in step["passages"]],
            }
        )
        written = step["prefix"] + step["text"]
    return steps
