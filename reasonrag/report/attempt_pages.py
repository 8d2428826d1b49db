"""Write the pages of an evaluation and of a training run: metrics, and for each question all attempts at it.

Attempts at one question, by policies of an evaluation or by the rollouts of one training step, are shown
by the same page: their scores, and two of them step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.plots import Bar, BarChart, Panel
from reasonrag.core.text import normalize_answer
from reasonrag.evaluation.metrics import METRICS
from reasonrag.evaluation.tables import bold_note, evaluation_tables, measured, points, sweep_panels
from reasonrag.report.site import Chart, ListRow, Page, TextPool, chart, number, open_site, reading
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import Row, read_parquet, read_shards
from reasonrag.storage.tables import rollout_schema, trajectory_schema
from reasonrag.training.run import SUMMARY, panels

Question = tuple[str, str]  # data set, id
Result = Row | str  # a row of `tables.trajectory_schema`, or the cause of a missing one

# Columns of `tables.trajectory_schema` that describe the question, or are shown as steps.
_NOT_FACTS = ("dataset", "question_id", "question", "golden_answers", "kind", "hops", "trajectory", "grade")
_MOST_LINES = 6  # a panel with more lines becomes one chart per line, because their scales differ
_MOST_TRAJECTORIES = 20_000  # in a report; a longer training run shows evenly chosen files


@dataclass(frozen=True, slots=True)
class Attempts:
    """All attempts of one policy at one setting.

    Attributes:
        label: short name of the policy at this setting, without the setting if it is the only one.
        setting: name of the setting.
        folder: of the policy, in the evaluation's folder.
        failures: causes of the attempts that were set aside.
    """

    label: str
    setting: str
    folder: Path
    failures: dict[Question, str]


def write_evaluation_pages(evaluation: Path, out: Path) -> Path:
    """Write the pages of a finished evaluation into `out`, see `write_report`."""
    file = evaluation / "metrics.json"
    metrics = require_json(file)
    with reading(file):
        attempts = _attempts_of(evaluation, metrics)
        charts: list[Panel | BarChart] = []
        for metric in measured(metrics, "page"):
            bars = []
            for attempt, (*_, at_setting) in zip(attempts, points(metrics), strict=True):
                if interval := at_setting.get(metric.name):
                    bars.append(Bar("mean", attempt.label, interval["mean"], interval["low"], interval["high"]))
            if bars:
                charts.append(BarChart(metric.label, "mean and 95 % interval", tuple(bars)))
        overview = {
            "metrics": metrics,
            "tables": [table for table in evaluation_tables(metrics).values() if table.rows],
            "charts": [chart(drawn) for drawn in (*charts, *sweep_panels(metrics))],
            "bold_note": bold_note(metrics["differences"]),
            "judge": (metrics["judge"] or {}).get("model"),
        }
    with open_site(out) as site:
        pages = (_question_page(attempts, question, results) for question, results in questions(attempts))
        site.write_pages("attempts.html.j2", pages)
        return site.write_index("evaluation.html.j2", labels=[attempt.label for attempt in attempts], **overview)


def _attempts_of(folder: Path, metrics: Mapping[str, Any]) -> list[Attempts]:
    """Return the policies and settings of an evaluation, in its order; `metrics` is the content of `metrics.json`."""
    attempts = {}
    for policy, setting, _ in points(metrics):
        if Path(policy).name != policy:
            raise ValueError(f"policy {policy!r} is not the name of a folder")
        label = policy if len(metrics["policies"][policy]) == 1 else f"{policy} {setting}"
        attempts[policy, setting] = Attempts(label, setting, folder / policy, {})
    for failure in metrics["failures"]:
        attempts[failure["policy"], failure["setting"]].failures[_question(failure)] = failure["cause"]
    return list(attempts.values())


def _question(row: Mapping[str, Any]) -> Question:
    return row["dataset"], row["question_id"]


def questions(attempts: Sequence[Attempts]) -> Iterator[tuple[Row, list[Result]]]:
    """Yield every question that at least one policy finished, in the order of the evaluation, with all results.

    Raises:
        RunError, DataError: a table is missing or damaged, or the tables have different orders.
    """
    schema = trajectory_schema()
    tables = [read_shards(attempt.folder / "trajectories", attempt.setting, schema) for attempt in attempts]
    heads = [next(table, None) for table in tables]
    while any(heads):
        for head in filter(None, heads):
            question = _question(head)
            # The next question of the evaluation is one that every other table has reached, or lacks.
            reached = [row is not None and _question(row) == question for row in heads]
            if all(there or question in attempt.failures for there, attempt in zip(reached, attempts, strict=True)):
                break
        else:
            raise DataError(
                "the policies' trajectories list the same questions in different orders; run the evaluation again in "
                "a new folder"
            )
        results: list[Result] = []
        for place, attempt in enumerate(attempts):
            if reached[place]:
                results.append(heads[place] or {})
                heads[place] = next(tables[place], None)
            else:
                results.append(attempt.failures[question])
        yield head, results


def _question_page(attempts: Sequence[Attempts], question: Row, results: Sequence[Result]) -> Page:
    messages, passages = TextPool(), TextPool()
    facts = [name for name in trajectory_schema().names if name not in _NOT_FACTS]
    cells: list[Any] = []  # answer, EM, F1, and a number that equal answers share; or the cause
    shown: list[Row] = []
    answers: dict[str | None, int] = {}
    for attempt, result in zip(attempts, results, strict=True):
        if isinstance(result, str):
            cells.append(result)
            shown.append({"label": attempt.label, "cause": result, "facts": [], "steps": []})
            continue
        answer = result["answer"]
        # Equal answers share a number, by which the list finds questions where two policies differ.
        normalized = None if answer is None else normalize_answer(answer)
        cells.append([answer, result["em"], result["f1"], answers.setdefault(normalized, len(answers))])
        steps, grade = _steps(result, messages, passages), result.get("grade") or {}
        values = [result[name] for name in facts] + list(map(grade.get, ("value", "reason")))
        shown.append(_attempt(attempt.label, values, steps))
    columns = [question[name] for name in ("question_id", "kind", "question", "golden_answers")]
    # Metrics have names of their own; other columns are readable as they are.
    labels = [METRICS[name].label if name in METRICS else name.replace("_", " ") for name in facts]
    labels += ["outcome", "why"]
    return _page(question, shown, labels, messages, passages, [ListRow([*columns, cells])])


def _page(
    question: Row, shown: list[Row], facts: list[str], messages: TextPool, passages: TextPool, rows: Sequence[ListRow]
) -> Page:
    details = {"attempts": shown, "facts": facts, "messages": messages.items, "passages": passages.items}
    return Page(question, details, rows)


def _attempt(label: str, facts: Sequence[Any], steps: list[Row]) -> Row:
    """Return an attempt for JSON: verdicts as words, numbers as text, because NaN would break it."""
    words = [("no", "yes")[fact] if isinstance(fact, bool) else number(fact) for fact in facts]
    return {"label": label, "cause": "", "facts": words, "steps": steps}


def _steps(row: Row, messages: TextPool, passages: TextPool) -> list[Row]:
    """Return a trajectory's steps. If a turn continues, only the text inserted since is kept, because turns grow."""
    steps: list[Row] = []
    written = ""
    for step in row["trajectory"] or []:
        # A turn that grows would repeat itself in every step, and make the page quadratic in its length.
        continues = bool(steps) and step["prefix"].startswith(written)
        kept = {name: step[name] for name in ("action", "content", "text", "finish_reason")}
        kept |= {"prompt": messages.messages(step["prompt"]), "passages": passages.passages(step["passages"])}
        kept |= {"continues": continues, "prefix": step["prefix"][len(written) :] if continues else step["prefix"]}
        steps.append(kept)
        written = step["prefix"] + step["text"]
    return steps


# Training runs


def write_training_pages(training: Path, out: Path) -> Path:
    """Write the pages of a finished training run into `out`, see `write_report`. None of them names the machine."""
    summary = require_json(training / SUMMARY)
    with reading(training / SUMMARY):
        charts: list[Chart] = []
        for panel in panels(summary["history"]):
            # The components of a reward have very different scales, and cannot share an axis.
            apart = [Panel(line.label, panel.x_label, panel.y_label, (line,)) for line in panel.lines]
            charts += map(chart, [panel] if len(panel.lines) <= _MOST_LINES else apart)
    paths = sorted((training / "rollouts").glob("step-*.parquet"))  # of several processes step-000001-0.parquet
    rows = len(read_parquet(paths[0], rollout_schema())) if paths else 0
    every = ceil(len(paths) * rows / _MOST_TRAJECTORIES) or 1  # all steps have as many rows

    def pages() -> Iterator[Page]:
        for path in paths[::every]:  # one in memory at a time
            rollouts = read_parquet(path, rollout_schema())
            for _, group in groupby(rollouts, key=lambda row: (row["step"], _question(row))):
                yield _group_page(list(group))

    with open_site(out) as site:
        site.write_pages("attempts.html.j2", pages())
        return site.write_index("training.html.j2", charts=charts, summary=summary, every=every)


def _group_page(group: Sequence[Row]) -> Page:
    """Return the page of the attempts at a question in a step, with a row of the list per attempt."""
    parts = [dict(row["parts"]) for row in group]
    components = sorted({name for part in parts for name in part})
    names = ["reward", "advantage", *components, "final answer", "stop reason", "format check", "tokens of the turn"]
    names += ["policy tokens"]
    shown: list[Row] = []
    listed: list[ListRow] = []
    for place, (row, part) in enumerate(zip(group, parts, strict=True)):
        # As a reader says it: "answered, cut off".
        ending = (row["stop_reason"] or "not finished").replace("_", " ") + ", cut off" * bool(row["truncated"])
        aside = "" if row["reward"] is not None else row["cause"] or "no reward"
        facts = [f"set aside: {aside}" if aside else row["reward"], row["advantage"], *map(part.get, components)]
        facts += [row["answer"], ending, "well-formed" if row["well_formed"] else row["reason"]]
        facts += [row["tokens"], row["policy_tokens"]]
        # The whole turn as one step: its passages are in the format's tags.
        turn = {"action": "", "content": row["turn"], "text": row["turn"], "finish_reason": "stop", "prefix": ""}
        turn |= {"prompt": [], "continues": False, "passages": []}
        shown.append(_attempt(f"attempt {row['sample'] + 1}", facts, [turn]))
        em = part.get("em")
        marks = {
            "right": em == 1,
            "wrong": em is not None and em < 1,
            "unscored": bool(aside),
            "out of form": row["well_formed"] is False,
            "cut off": row["truncated"],
        }
        cells = [row["step"], row["question_id"], row["question"], row["sample"] + 1, row["answer"]]
        cells += [row["golden_answers"], row["reward"], row["advantage"], em, part.get("rc"), row["policy_tokens"]]
        anchor = f"#{place},{0 if place else min(1, len(group) - 1)}"
        listed.append(ListRow([*cells, ending, aside], [mark for mark, applies in marks.items() if applies], anchor))
    return _page(group[0], shown, names, TextPool(), TextPool(), listed)
