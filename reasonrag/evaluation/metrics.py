"""A trajectory's scores, and what kind of question it was at (arXiv:2505.14069, App. D; shared by all reports)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reasonrag.core.text import Rules, cover_match, exact_match, one_line, token_f1
from reasonrag.core.types import Malformed, Question, Search, Step, StopReason, Trajectory
from reasonrag.evaluation.judged import NOT_JUDGED, Verdicts
from reasonrag.formats.base import Reading
from reasonrag.pipeline.build import label
from reasonrag.storage.parquet import Row

METRICS = (
    "em",
    "f1",
    "acc",
    "retrievals",
    "steps",
    "forced",
    "format_rate",
    "prompt_tokens",
    "completion_tokens",
)

Scores = dict[str, float | int | None]

_MUSIQUE = re.compile(r"([2-4])hop\d?(?:__|$)")  # "3hop1__9285_5188_23307" as an id, "3hop1" as a type
_LONGEST_KIND = 60


def answer_scores(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> dict[str, float]:
    """`em`, `f1` and `acc` (a golden answer is contained), each in [0, 1]. A missing answer scores 0.

    >>> answer_scores("in New York", ["New York"])
    {'em': 0.0, 'f1': 0.8, 'acc': 1.0}
    """
    return {
        "em": exact_match(prediction, golden_answers, rules=rules),
        "f1": token_f1(prediction, golden_answers, rules=rules),
        "acc": cover_match(prediction, golden_answers, rules=rules),
    }


def scores(trajectory: Trajectory, *, reading: Reading | None = None, rules: Rules = "house") -> Scores:
    """The metrics of `METRICS` for a trajectory that has ended.

    Args:
        trajectory: the attempt.
        reading: by its format's own checker; without it, an attempt is in form where every step could be read and the
            last one answers, as in `reasonrag`.
        rules: of EM, F1 and ACC.

    Returns:
        `em`, `f1`, `acc` in [0, 1]; `retrievals`: searches that the policy asked for; `steps`: its decisions; `forced`:
        1 where the answer was forced at the step limit; `format_rate`: 1.0 where the attempt is well-formed; tokens
        summed over the steps, None unless the backend counted all of them.

    Raises:
        ValueError: the trajectory has not ended: what it would score is unknown, not 0.
    """
    if trajectory.stop_reason is None:
        raise ValueError("a trajectory that has not ended has no scores")
    steps = trajectory.steps
    return {
        **answer_scores(trajectory.answer, trajectory.question.golden_answers, rules=rules),
        "retrievals": sum(isinstance(step.action, Search) for step in steps),
        "steps": len(steps),
        "forced": int(trajectory.stop_reason is StopReason.FORCED_ANSWER),
        "format_rate": float(_in_form(trajectory) if reading is None else reading.well_formed),
        "prompt_tokens": _total([step.completion.prompt_tokens for step in steps]),
        "completion_tokens": _total([step.completion.completion_tokens for step in steps]),
    }


def kind(question: Question) -> str:
    """The kind of a question as its data set names it; "known" where the policy has seen the fact; "" where unnamed.

    MuSiQue's kinds are its numbers of hops, whatever the shape of the decomposition.

    >>> kind(Question("3hop1__9285_5188_23307", "...", ("x",)))
    '3hop'
    """
    metadata = question.metadata
    if metadata.get("known"):
        return "known"
    named = next((metadata[key] for key in ("kind", "type", "question_type") if metadata.get(key)), None)
    if isinstance(named, str) and named.strip() and not _MUSIQUE.match(named):
        return one_line(named)[:_LONGEST_KIND]
    found = _musique_hops(question)
    return f"{found}hop" if found else ""


def hops(question: Question) -> int | None:
    """How many searches the question needs, where the data set says so; None elsewhere.

    The demo world says it outright. MuSiQue says it in ids and types. HotpotQA and 2WikiMultiHopQA name the pages that
    hold the supporting facts, and each of them has to be found.
    """
    told = question.metadata.get("hops")
    if isinstance(told, int) and not isinstance(told, bool) and 0 < told < 1000:
        return told
    return _musique_hops(question) or _supporting_pages(question)


def trajectory_row(
    trajectory: Trajectory, reading: Reading, verdicts: Verdicts = NOT_JUDGED, *, rules: Rules = "house"
) -> Row:
    """A trajectory as a row of `tables.trajectory_schema`. Texts are as they were asked, written and found."""
    question = trajectory.question
    return {
        "dataset": question.dataset,
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "kind": kind(question),
        "hops": hops(question),
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
        **scores(trajectory, reading=reading, rules=rules),
        "well_formed": reading.well_formed,
        "reason": reading.reason,
        **verdicts.row(),
        "trajectory": [_step(step) for step in trajectory.steps],
    }


def _in_form(trajectory: Trajectory) -> bool:
    unread = any(isinstance(step.action, Malformed) for step in trajectory.steps)
    return not unread and trajectory.answer is not None


def _step(step: Step) -> dict[str, Any]:
    action, content = label(step.action)
    return {
        "action": action,
        "content": content,
        "prompt": [asdict(message) for message in step.prompt.messages],
        "prefix": step.prompt.prefix,
        "text": step.completion.text,
        "finish_reason": step.completion.finish_reason.value,
        "prompt_tokens": step.completion.prompt_tokens,
        "completion_tokens": step.completion.completion_tokens,
        "passages": [asdict(passage) for passage in step.passages],
    }


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum; None where one is unknown: a sum over the others would be too small."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _musique_hops(question: Question) -> int | None:
    metadata = question.metadata
    for text in (question.id, metadata.get("id"), metadata.get("type")):
        if isinstance(text, str) and (found := _MUSIQUE.match(text)):
            return int(found[1])
    return None


def _supporting_pages(question: Question) -> int | None:
    """Distinct titles of `supporting_facts`, as `{"title": [...], ...}` or `[[title, sentence], ...]`."""
    facts = question.metadata.get("supporting_facts")
    titles = facts.get("title") if isinstance(facts, dict) else facts
    if not isinstance(titles, list):
        return None
    if not isinstance(facts, dict):
        titles = [fact[0] if isinstance(fact, list) and fact else None for fact in titles]
    if not titles or not all(isinstance(title, str) for title in titles):
        return None
    return len(set(titles))
