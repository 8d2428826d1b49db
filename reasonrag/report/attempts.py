"""Read an evaluation's trajectories question by question: the attempts of every policy at every setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import normalize_answer
from reasonrag.report.site import TextPool, number, reading
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import Row, read_shards
from reasonrag.storage.tables import trajectory_schema

Question = tuple[str, str]  # data set, id

METRICS = "metrics.json"
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


@dataclass(frozen=True, slots=True)
class QuestionAttempts:
    """The attempts at one question: for each policy and setting a row, or the cause why there is none."""

    results: list[Row | str]

    @property
    def question(self) -> Row:
        """One of the rows; the columns that describe the question are the same in all of them."""
        return next(row for row in self.results if isinstance(row, dict))


def attempts_of(folder: Path, metrics: Mapping[str, Any]) -> list[Attempts]:
    """Return the policies and settings of an evaluation, in its order.

    Args:
        folder: of the evaluation.
        metrics: the content of its `metrics.json`.

    Raises:
        RunError: the metrics do not have the layout of this version.
    """
    attempts = []
    for policy, settings in metrics["policies"].items():
        file = folder / policy / METRICS
        policy_metrics = require_json(file)
        with reading(file):
            if Path(policy).name != policy:
                raise ValueError(f"policy {policy!r} is not the name of a folder")
            failures: dict[str, dict[Question, str]] = {setting: {} for setting in settings}
            for failure in policy_metrics["failures"]:
                question = failure["dataset"], failure["question_id"]
                failures.setdefault(failure["setting"], {})[question] = failure["cause"]
            for setting in settings:
                label = attempts_label(metrics, policy, setting)
                attempts.append(Attempts(label, setting, folder / policy, failures[setting]))
    return attempts


def attempts_label(metrics: Mapping[str, Any], policy: str, setting: str) -> str:
    """Return the short name of a policy at a setting: without the setting if it is the only one."""
    return policy if len(metrics["policies"][policy]) == 1 else f"{policy} {setting}"


def questions(attempts: Sequence[Attempts]) -> Iterator[QuestionAttempts]:
    """Yield every question that at least one policy finished, in the order of the evaluation.

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
        results: list[Row | str] = []
        for index, attempt in enumerate(attempts):
            row = next_rows[index]
            if row is not None and _id(row) == question:
                results.append(row)
                next_rows[index] = next(tables[index], None)
            else:
                results.append(attempt.failures.get(question, "not tried"))
        yield QuestionAttempts(results)


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


def cells(question: QuestionAttempts) -> list[list[Any] | str]:
    """Return the list's values of each attempt: answer, EM, F1, and a number that equal answers share; or the cause."""
    answer_numbers: dict[str | None, int] = {}
    values: list[list[Any] | str] = []
    for result in question.results:
        if isinstance(result, str):
            values.append(result)
            continue
        answer = result["answer"]
        normalized = None if answer is None else normalize_answer(answer)
        number_of_answer = answer_numbers.setdefault(normalized, len(answer_numbers))
        values.append([answer, result["em"], result["f1"], number_of_answer])
    return values


def details(question: QuestionAttempts, attempts: Sequence[Attempts]) -> dict[str, Any]:
    """Return what the page of a question shows, as JSON. Prompts and passages are indices into shared lists."""
    messages, passages = TextPool(), TextPool()
    shown: list[Row] = []
    for attempt, result in zip(attempts, question.results, strict=True):
        if isinstance(result, str):
            shown.append({"label": attempt.label, "cause": result, "facts": [], "steps": []})
        else:
            facts = [_fact(result[name]) for name in _FACTS]
            steps = _steps(result, messages, passages)
            shown.append({"label": attempt.label, "cause": "", "facts": facts, "steps": steps})
    labels = list(_FACTS.values())
    return {"attempts": shown, "facts": labels, "messages": messages.items, "passages": passages.items}


def _fact(value: Any) -> Any:
    """Format a value: verdicts as words, numbers as text, so that NaN cannot break the JSON."""
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
