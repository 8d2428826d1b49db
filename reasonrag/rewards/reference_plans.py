"""Search-P1's reference plans, made once before training (sec. 3.2.1, eq. 5; Alg. 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import structlog

from reasonrag.core.errors import DataError, JudgeError
from reasonrag.core.text import cover_match, exact_match, normalize_answer
from reasonrag.core.types import Question
from reasonrag.rewards.judge import JudgeService
from reasonrag.rewards.verdicts import PlanCandidate, ReferencePlan, propose_plan, vote_plan
from reasonrag.rollout import gather_all
from reasonrag.storage.parquet import Row, read_parquet, write_parquet
from reasonrag.storage.tables import plan_schema

log = structlog.get_logger()

Plans = Mapping[tuple[str, str], ReferencePlan]
Correct = Literal["em", "cem"]


class Counts(Protocol):
    """Progress: `failed` counts questions on which the judge failed, `done` all other finished ones."""

    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class Made:
    """How many questions got a plan, and how many did not by cause (`no_correct_candidate`, or a failure's).

    `untried` questions were not started after too many failures.
    """

    plans: int
    without: Mapping[str, int]
    failed: int
    untried: int


async def make_plans(
    questions: Sequence[Question],
    judge: JudgeService,
    *,
    k: int,
    out: Path,
    concurrency: int = 16,
    correct: Correct = "em",
    show_answer: bool = False,
    max_failed: float = 0.05,
    counts: Counts | None = None,
) -> Made:
    """Make a reference plan for each question and write them all to one Parquet file (`tables.plan_schema`).

    A plan depends on the judge's replies alone: with a `JournaledLLM` behind the judge, the same call resumes after a
    kill, pays for nothing twice, and writes the same file. The file is written completely or not at all.

    Args:
        questions: with ids that are unique in their data set.
        judge: the planner and voter.
        k: candidates per question.
        out: the file; replaced if it exists.
        concurrency: questions in flight.
        correct: which candidates are kept: exact match, or cover match (a golden answer is contained).
        show_answer: show the planner the golden answers, as the prompt in App. D.2 does; then all are correct.
        max_failed: share of questions that may fail; beyond it no further question is started.
        counts: updated during the work.

    Raises:
        Interrupted: the run is shutting down; nothing is written, and the next call resumes.
        RunError: the journal cannot be written.
    """
    work = _Work(judge, k, correct, show_answer)
    rows: list[Row | None] = [None] * len(questions)
    failures_allowed = max_failed * len(questions)
    waiting = iter(enumerate(questions))

    async def worker(waiting: Iterator[tuple[int, Question]]) -> None:
        for index, question in waiting:
            rows[index] = await work.row(question, counts)
            if work.failed > failures_allowed:
                return

    await gather_all(worker(waiting) for _ in range(min(concurrency, len(questions))))
    kept = [row for row in rows if row is not None]
    write_parquet(out, kept, plan_schema())
    return Made(len(kept), dict(work.without), work.failed, len(questions) - len(kept) - work.without.total())


class _Work:
    """Plans question after question, and counts the questions without a plan."""

    def __init__(self, judge: JudgeService, k: int, correct: Correct, show_answer: bool) -> None:
        self._judge = judge
        self._k = k
        self._matches = {"em": exact_match, "cem": cover_match}[correct]
        self._show_answer = show_answer
        self.without: Counter[str] = Counter()
        self.failed = 0

    async def row(self, question: Question, counts: Counts | None) -> Row | None:
        """Return the question's row; None without a plan, counted by cause."""
        row: Row | None = None
        try:
            row = await self._plan(question)
        except JudgeError as error:
            log.warning("a question gets no plan", question=question.id, cause=error.cause, error=str(error))
            self.without[error.cause] += 1
            self.failed += 1
            if counts is not None:
                counts.failed += 1
            return None
        if row is None:
            self.without["no_correct_candidate"] += 1
        if counts is not None:
            counts.done += 1
        return row

    async def _plan(self, question: Question) -> Row | None:
        errors: list[JudgeError] = []
        proposed = await gather_all(self._candidate(question, sample, errors) for sample in range(self._k))
        candidates = [candidate for candidate in proposed if candidate is not None]
        if not candidates:
            raise errors[0]
        right = [plan for plan in candidates if self._matches(plan.answer, question.golden_answers)]
        if not right:
            return None
        distinct = {tuple(map(normalize_answer, plan.steps)) for plan in right}
        votes = len(right) if len(distinct) > 1 else 0
        plan = await vote_plan(self._judge, question, right) if votes else right[0]
        return {
            "dataset": question.dataset,
            "question_id": question.id,
            "planner": plan.planner,
            "steps": list(plan.steps),
            "candidates": len(candidates),
            "correct": len(right),
            "votes": votes,
        }

    async def _candidate(self, question: Question, sample: int, errors: list[JudgeError]) -> PlanCandidate | None:
        """Return a candidate, or None if the judge failed: the other candidates still count."""
        try:
            return await propose_plan(self._judge, question, sample=sample, show_answer=self._show_answer)
        except JudgeError as error:
            errors.append(error)
            return None


def load_plans(path: Path) -> dict[tuple[str, str], ReferencePlan]:
    """Read the plans that `make_plans` wrote, by data set and question id.

    Raises:
        DataError: the file cannot be read, or holds no plans.
    """
    plans: dict[tuple[str, str], ReferencePlan] = {}
    for row in read_parquet(path, plan_schema()):
        key = (row["dataset"], row["question_id"])
        if key in plans:
            raise DataError(f"{path.name} has two plans for question {key[1]!r} of {key[0]!r}; make it anew")
        plans[key] = ReferencePlan(row["planner"], tuple(row["steps"]))
    return plans
