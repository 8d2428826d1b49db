"""Search-P1's reference plans, made once before training (sec. 3.2.1, eq. 5).

The policy attempts each question several times with the engine, searches included, so that questions that need a search
get a plan, too. A planner distils the correct attempts into the fewest steps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from reasonrag.core.errors import BackendError, DataError
from reasonrag.core.text import cover_match, exact_match
from reasonrag.core.types import Question, Trajectory
from reasonrag.online_rl.settings import PlanSettings
from reasonrag.rewards.base import queries
from reasonrag.rewards.judge import JudgeService, ReferencePlan, propose_plan, vote_plan
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.parquet import Row, read_parquet, write_parquet
from reasonrag.storage.tables import plan_schema

log = structlog.get_logger()

Plans = dict[tuple[str, str], ReferencePlan]
NO_CORRECT, NO_SEARCH = "no_correct_trajectory", "no_search"


class Counts(Protocol):
    """Progress: `failed` counts questions on which a backend failed, `done` all other finished ones."""

    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class Made:
    """The rows of questions with a plan (`tables.plan_schema`), and how many others there are by cause.

    The cause is `no_correct_trajectory`, `no_search` (correct from memory alone), or a failure's. `untried` questions
    were not started after too many failures.
    """

    rows: list[Row]
    without: Mapping[str, int]
    failed: int
    untried: int


async def make_plans(
    questions: Sequence[Question],
    engine: Engine,
    judge: JudgeService,
    *,
    settings: PlanSettings | None = None,
    seed: int = 0,
    concurrency: int = 16,
    max_failed: float = 0.05,
    counts: Counts | None = None,
) -> Made:
    """Make a reference plan for each question.

    As in eq. 5 of Search-P1 (sec. 3.2.1): K trajectories per question, of which the correct ones are kept; the planner
    sees their plans and searches, and votes for the fewest steps. Algorithm 1 and App. D.2 describe another way, a plan
    from the golden answer without any trajectory: `settings.show_answer` takes it where no trajectory helps.

    A plan depends on the replies of policy, retriever and planner alone: with a `JournaledLLM` behind each model, the
    same call resumes after a kill, pays for nothing twice, and returns the same.

    Args:
        questions: with ids that are unique in their data set.
        engine: makes the trajectories, in any format; its sampling should not be greedy.
        judge: the planner.
        settings: K, and which trajectories are kept.
        seed: of the trajectories.
        concurrency: questions in flight.
        max_failed: share of questions that may fail; beyond it no further question is started.
        counts: updated during the work.

    Raises:
        Interrupted: the run is shutting down; the next call resumes.
        RunError: the journal cannot be written.
    """
    settings = settings or PlanSettings()
    slots = asyncio.Semaphore(concurrency)
    without: Counter[str] = Counter()
    failed = 0

    async def make(question: Question) -> Row | None:
        nonlocal failed
        async with slots:
            if failed > max_failed * len(questions):
                return None
            try:
                row = await _plan(question, engine, judge, settings, seed)
            except BackendError as error:
                log.warning("a question gets no plan", question=question.id, cause=error.cause, error=str(error))
                without[error.cause] += 1
                failed += 1
                if counts is not None:
                    counts.failed += 1
                return None
        if counts is not None:
            counts.done += 1
        if isinstance(row, str):
            without[row] += 1
            return None
        return row

    rows = [row for row in await gather_all(map(make, questions)) if row is not None]
    return Made(rows, dict(without), failed, len(questions) - len(rows) - without.total())


async def _plan(
    question: Question, engine: Engine, judge: JudgeService, settings: PlanSettings, seed: int
) -> Row | str:
    """Return the row of a question, or why it has no plan; raise BackendError if no trajectory could be made."""
    errors: list[BackendError] = []

    async def attempt(sample: int) -> Trajectory | None:
        seeds = [derive_seed(seed, "plan", question.dataset, question.id, sample)]
        try:
            (trajectory,) = await engine.run([Trajectory(question)], seeds=seeds)
        except BackendError as error:
            errors.append(error)
            return None
        return trajectory

    attempts = await gather_all(map(attempt, range(settings.candidates)))
    trajectories = [trajectory for trajectory in attempts if trajectory is not None]
    if not trajectories:
        raise errors[0]
    matches = {"em": exact_match, "cem": cover_match}[settings.correct]
    correct = [trajectory for trajectory in trajectories if matches(trajectory.answer, question.golden_answers)]
    # A trajectory from memory has no step that could be asked of a policy.
    searching = [trajectory for trajectory in correct if queries(trajectory)]
    candidates = [ReferencePlan(engine.format.read(made).plan, queries(made)) for made in searching]
    if candidates:
        plan = await vote_plan(judge, question, candidates)
    elif settings.show_answer:
        plan = await propose_plan(judge, question)
    else:
        return NO_SEARCH if correct else NO_CORRECT
    return {
        "dataset": question.dataset,
        "question_id": question.id,
        "planner": plan.planner,
        "steps": list(plan.steps),
        "candidates": len(trajectories),
        "correct": len(correct),
        "votes": len(candidates),
    }


def save_plans(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of `Made` as a Parquet file (`tables.plan_schema`), completely or not at all."""
    write_parquet(path, rows, plan_schema())


def load_plans(path: Path) -> Plans:
    """Read the plans of a file that `save_plans` wrote, by data set and question id.

    Raises:
        DataError: the file cannot be read, or holds no plans.
    """
    plans: Plans = {}
    for row in read_parquet(path, plan_schema()):
        key = (row["dataset"], row["question_id"])
        if key in plans:
            raise DataError(f"{path.name} has two plans for question {key[1]!r} of {key[0]!r}; make it again")
        plans[key] = ReferencePlan(row["planner"], tuple(row["steps"]))
    return plans
