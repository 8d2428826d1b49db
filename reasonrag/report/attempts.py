"""An evaluation's trajectories, a question at a time: what every policy did at every setting, read in parallel."""

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

FIGURES = "metrics.json"
# What the page of a question tells of an attempt: columns of its table, and what they are called.
_FACTS = {
    "answer": "answer",
    "stop_reason": "end",
    "em": "EM",
    "f1": "F1",
    "acc": "ACC",
    "retrievals": "searches",
    "steps": "steps",
    "well_formed": "well-formed",
    "reason": "flaw of the form",
    "prompt_tokens": "tokens read",
    "completion_tokens": "tokens written",
    "lasj": "right in meaning (LasJ)",
    "steps_over": "needless searches",
    "searches_known": "of searches known",
    "steps_under": "false steps without a search",
    "own_steps_known": "of such steps known",
}


@dataclass(frozen=True, slots=True)
class Attempts:
    """All attempts of one policy at one setting; `failures` are the causes of those that were set aside."""

    label: str
    setting: str
    folder: Path
    failures: Mapping[Question, str]

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Rows of `tables.trajectory_schema`, in the order of the questions.

        Raises:
            RunError, DataError: they are not there, or damaged.
        """
        return read_shards(self.folder / "trajectories", self.setting, trajectory_schema(), columns=columns)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and what came of it: a row, or the cause of there being none, for each of the attempts."""

    found: list[Row | str]

    @property
    def question(self) -> Row:
        """A row that tells the question."""
        return next(row for row in self.found if isinstance(row, dict))


def attempts_of(folder: Path, figures: Mapping[str, Any]) -> list[Attempts]:
    """Policies and settings of an evaluation, in its order.

    Args:
        folder: the evaluation's.
        figures: what its `metrics.json` holds.

    Raises:
        RunError: figures that are not as this version writes them.
    """
    found = []
    for policy, settings in figures["policies"].items():
        file = folder / policy / FIGURES
        own = require_json(file)
        with reading(file):
            if Path(policy).name != policy:
                raise ValueError(f"policy {policy!r} is no name of a folder")
            failures: dict[str, dict[Question, str]] = {setting: {} for setting in settings}
            for failed in own["failures"]:
                question = failed["dataset"], failed["question_id"]
                failures.setdefault(failed["setting"], {})[question] = failed["cause"]
            for setting in settings:
                label = attempts_label(figures, policy, setting)
                found.append(Attempts(label, setting, folder / policy, failures[setting]))
    return found


def attempts_label(metrics: Mapping[str, Any], policy: str, setting: str) -> str:
    """Return the short name of a policy at a setting: the setting is left out if it is the only one."""
    return policy if len(metrics["policies"][policy]) == 1 else f"{policy} {setting}"


def questions(attempts: Sequence[Attempts]) -> Iterator[Asked]:
    """Every question that somebody finished, in the order in which they were asked.

    The tables are read side by side, and of each no more than a batch is held in memory. A question is missing in the
    table of an attempt that failed, so the order that all tables share is found first, from their ids alone.

    Raises:
        RunError, DataError: a table is missing or damaged, or they are in different orders.
    """
    ids = ("dataset", "question_id")
    order = shared_order([[_id(row) for row in of.rows(ids)] for of in attempts])
    remaining = [of.rows() for of in attempts]
    heads = [next(rows, None) for rows in remaining]
    for question in order:
        found: list[Row | str] = []
        for place, of in enumerate(attempts):
            head = heads[place]
            if head is not None and _id(head) == question:
                found.append(head)
                heads[place] = next(remaining[place], None)
            else:
                found.append(of.failures.get(question, "not tried"))
        yield Asked(found)


def shared_order(sequences: Sequence[Sequence[Question]]) -> list[Question]:
    """All questions in an order that agrees with every sequence, each of which may lack some.

    Raises:
        DataError: there is none, or a sequence names a question twice.

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


def cells(asked: Asked) -> list[list[Any] | str]:
    """Of each attempt what the list needs: answer, EM, F1, and a number that equal answers share; or the cause."""
    answers: dict[str | None, int] = {}
    found: list[list[Any] | str] = []
    for row in asked.found:
        if isinstance(row, str):
            found.append(row)
        else:
            said = None if row["answer"] is None else normalize_answer(row["answer"])
            found.append([row["answer"], row["em"], row["f1"], answers.setdefault(said, len(answers))])
    return found


def details(asked: Asked, attempts: Sequence[Attempts]) -> dict[str, Any]:
    """What the page of a question shows, as JSON; `messages` and `passages` are kept once and named by their place."""
    messages, passages = TextPool(), TextPool()
    return {
        "attempts": [
            {"label": of.label, "cause": row, "facts": [], "steps": []}
            if isinstance(row, str)
            else {"label": of.label, "cause": "", "facts": _facts(row), "steps": _steps(row, messages, passages)}
            for of, row in zip(attempts, asked.found, strict=True)
        ],
        "facts": list(_FACTS.values()),
        "messages": messages.items,
        "passages": passages.items,
    }


def _facts(row: Row) -> list[Any]:
    return [_word(row[name]) for name in _FACTS]


def _word(value: Any) -> Any:
    """A value as it is shown; verdicts in words. As text a number that is none cannot break the JSON either."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else number(value)


def _steps(row: Row, messages: TextPool, passages: TextPool) -> list[Row]:
    """A trajectory's steps. Of a turn that goes on only what was put in since is kept: turns grow with each step."""
    steps: list[Row] = []
    written = ""
    for step in row["trajectory"] or []:
        goes_on = bool(steps) and step["prefix"].startswith(written)
        steps.append(
            {
                "action": step["action"],
                "content": step["content"],
                "text": step["text"],
                "finish": step["finish_reason"],
                "prompt": messages.messages(step["prompt"]),
                "goes_on": goes_on,
                "prefix": step["prefix"][len(written) :] if goes_on else step["prefix"],
                "passages": [[passages.passage(passage), number(passage["score"])] for passage in step["passages"]],
            }
        )
        written = step["prefix"] + step["text"]
    return steps
