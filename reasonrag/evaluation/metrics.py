"""Scores of a trajectory, and the kind of its question (arXiv:2505.14069, App. D); all reports use them."""

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

METRICS = ("em", "f1", "acc", "retrievals", "steps", "forced", "format_rate", "prompt_tokens", "completion_tokens")

Scores = dict[str, float | int | None]

_MUSIQUE = re.compile(r"([2-4])hop\d?(?:__|$)")  # "3hop1__9285_5188_23307" as an id, "3hop1" as a type
_LONGEST_KIND = 60


def answer_scores(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> dict[str, float]:
    """Return `em`, `f1` and `acc` (the prediction contains a golden answer) in [0, 1]; a missing answer scores 0.

    >>> answer_scores("in New York", ["New York"])
    {'em': 0.0, 'f1': 0.8, 'acc': 1.0}
    """
    return {
        "em": exact_match(prediction, golden_answers, rules=rules),
        "f1": token_f1(prediction, golden_answers, rules=rules),
        "acc": cover_match(prediction, golden_answers, rules=rules),
    }


def scores(trajectory: Trajectory, *, reading: Reading | None = None, rules: Rules = "house") -> Scores:
    """Return the metrics of `METRICS` for a finished trajectory.

    `reading` is what the checker of its format says. Without it, an attempt is in form if every step could be parsed
    and the last one answers, as in the format `reasonrag`.

    Returns:
        `em`, `f1`, `acc` in [0, 1]; `retrievals`: searches; `steps`: decisions of the policy; `forced`: 1 if the
        answer was forced at the step limit; `format_rate`: 1.0 if the attempt is well-formed; tokens summed over the
        steps, None unless the backend counted all of them.

    Raises:
        ValueError: the trajectory has not ended, so its scores are unknown, not 0.
    """
    if trajectory.stop_reason is None:
        raise ValueError("a trajectory that has not ended has no scores")
    steps = trajectory.steps
    in_form = trajectory.answer is not None and not any(isinstance(step.action, Malformed) for step in steps)
    if reading is not None:
        in_form = reading.well_formed
    return {
        **answer_scores(trajectory.answer, trajectory.question.golden_answers, rules=rules),
        "retrievals": sum(isinstance(step.action, Search) for step in steps),
        "steps": sum(step.asked for step in steps),
        "forced": int(trajectory.stop_reason is StopReason.FORCED_ANSWER),
        "format_rate": float(in_form),
        "prompt_tokens": _total([step.completion.prompt_tokens for step in steps]),
        "completion_tokens": _total([step.completion.completion_tokens for step in steps]),
    }


def kind(question: Question) -> str:
    """Return the kind that the data set gives a question: "known" if the policy has seen the fact, "" if there is none.

    The kinds of MuSiQue are its numbers of hops, whatever the shape of the decomposition.

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
    """Return how many searches a question needs; None if the data set does not say.

    The demo world has the number. MuSiQue has it in ids and types. HotpotQA and 2WikiMultiHopQA name the pages with the
    supporting facts, each of which has to be found.
    """
    stated = question.metadata.get("hops")
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated < 1000:
        return stated
    return _musique_hops(question) or _supporting_pages(question)


def trajectory_row(
    trajectory: Trajectory, reading: Reading, verdicts: Verdicts = NOT_JUDGED, *, rules: Rules = "house"
) -> Row:
    """Return a trajectory as a row of `tables.trajectory_schema`, with all texts verbatim."""
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
    """Return the sum; None if a count is unknown, because a sum over the others would be too small."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _musique_hops(question: Question) -> int | None:
    for text in (question.id, question.metadata.get("id"), question.metadata.get("type")):
        if isinstance(text, str) and (found := _MUSIQUE.match(text)):
            return int(found[1])
    return None


def _supporting_pages(question: Question) -> int | None:
    """Count the distinct titles of `supporting_facts`: `{"title": [...], ...}` or `[[title, sentence], ...]`."""
    facts = question.metadata.get("supporting_facts")
    titles = facts.get("title") if isinstance(facts, dict) else facts
    if not isinstance(titles, list):
        return None
    if not isinstance(facts, dict):
        titles = [fact[0] if isinstance(fact, list) and fact else None for fact in titles]
    if not titles or not all(isinstance(title, str) for title in titles):
        return None
    return len(set(titles))
